"""The layers under measurement: ours, Megatron's and fla's, of every mixer.

A layer is built from Megatron's local linears, or from Transformer Engine's, which add
their weights' gradients into fp32 buffers (``main_grad``), as in Megatron's launches.
"""

from __future__ import annotations

import dataclasses
import math
import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_gdn.gdn.flash_qla.plan import kernels
from megatron_gdn.ops.delta_rule.base import HeadSizes
from megatron_gdn.ops.rules.fla_configurations import (
    FIXED_CONFIGURATIONS,
    tuned_kernels,
)

from .clone import CLONE, has_clone
from .model import DEVICE, transformer_config

BF16 = torch.bfloat16
SPECS = {
    "gdn": "gated_delta_net_spec",
    "gdn2": "gated_delta_net2_spec",
    "gdp": "gated_delta_product_spec",
    "kda": "kimi_delta_attention_spec",
    "mamba2": "mamba2_spec",
}
# Megatron's classes.
MEGATRONS = {
    "gdn": "gated_delta_net.GatedDeltaNet",
    "gdn2": "gated_delta_net.GatedDeltaNet2",
    "gdp": "gated_delta_product.GatedDeltaProductMixer",
    "kda": "gated_delta_net.KimiDeltaAttention",
}
# Mixers that Megatron builds with the hidden size as an argument.
IN_MAMBA_LAYERS = ("gdp", "mamba2")
CONFIG_FIELDS = ("deterministic_mode", "batch_invariant_mode")


@dataclass(frozen=True)
class Sizes:
    """Of a mixer.

    Attributes:
        heads: key heads (or groups) and value heads.
        state_dim: rows of a state; 0: as ``head_dim``.
        updates: per token, of Gated DeltaProduct.
        lower_bound: of the gate, of Kimi Delta Attention.
    """

    mixer: str = "gdn"
    hidden: int = 2048
    heads: tuple[int, int] = (16, 32)
    head_dim: int = 128
    state_dim: int = 0
    updates: int = 2
    lower_bound: float | None = None

    @property
    def of_heads(self) -> HeadSizes:
        return HeadSizes(*self.heads, self.state_dim or self.head_dim, self.head_dim)


@dataclass(frozen=True)
class Layer:
    """One of the layers of a benchmark.

    Attributes:
        whose: "ours", "megatron" or "fla".
        backend: of our rule; "" for the benchmark's own.
        linears: "local" or "te"; "" for the case's own.
        fused: whether Transformer Engine's linears add into ``main_grad``.
        fp8: Megatron's name of a recipe, or "".
        strict: under torch's own switch, which raises at an op without a fixed order.
        few: timed over few runs, since it is slow.
        config: fields of the config.
        options: of our constructor.
    """

    name: str
    whose: str = "ours"
    backend: str = ""
    linears: str = ""
    fused: bool = True
    fp8: str = ""
    strict: bool = False
    few: bool = False
    config: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, name: str, row: dict[str, Any]) -> Layer:
        """From a row of the registry: what is no attribute is an option."""
        known = {each.name for each in dataclasses.fields(cls)}
        own = {}
        config = {}
        options = {}
        for key, value in row.items():
            if key in known:
                own[key] = value
            elif key in CONFIG_FIELDS:
                config[key] = value
            else:
                options[key] = value
        return cls(name, **own, config=config, options=options)

    def why_not(self, mixer: str, clone_file: str) -> str:
        """Why this machine cannot run it; "" if it can."""
        if (self.fp8 or self.linears == "te") and not find_spec("transformer_engine"):
            return "Transformer Engine is not installed"
        of_clone = self.whose == "megatron" and mixer != "gdn"
        if DEVICE == "cpu" and (of_clone or self.whose == "fla"):
            return "fla's kernels need a GPU"
        if of_clone and not has_clone(clone_file):
            return f"{CLONE / clone_file} is not there; set MEGATRON_LM"
        if of_clone and mixer == "gdp" and not find_spec("causal_conv1d"):
            return "causal-conv1d is not installed"
        return ""

    def context(self, module: Any) -> AbstractContextManager[Any]:
        """The context of a forward."""
        if not self.fp8:
            return nullcontext()
        from megatron.core.fp8_utils import get_fp8_context

        return get_fp8_context(module.config)


def start_megatron(
    rank: int = 0, world: int = 1, store: Any = None, **sizes: int
) -> None:
    """Megatron over so many ranks, of which this is one; ``sizes``: of its parallel
    state."""
    from megatron.core import parallel_state, tensor_parallel

    if DEVICE == "cpu":
        from megatron_gdn.compat.one_process import run_megatron_on_cpu

        run_megatron_on_cpu()
    else:
        torch.cuda.set_device(rank)
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group(
            "nccl" if DEVICE == "cuda" else "gloo",
            store=store or torch.distributed.HashStore(),
            rank=rank,
            world_size=world,
        )
        parallel_state.initialize_model_parallel(**sizes)
    tensor_parallel.model_parallel_cuda_manual_seed(0)


def config_of(
    layer: Layer,
    sizes: Sizes,
    linears: str = "local",
    cp: int = 1,
    dtype: torch.dtype = BF16,
) -> Any:
    from megatron.core.enums import Fp8Recipe

    first, second, state_dim, head_dim = sizes.of_heads
    if sizes.mixer in IN_MAMBA_LAYERS:
        of_mixer = {
            "mamba_num_groups": first,
            "mamba_num_heads": second,
            "mamba_head_dim": head_dim,
            "mamba_state_dim": state_dim,
        }
    else:
        of_mixer = {
            "linear_num_key_heads": first,
            "linear_num_value_heads": second,
            "linear_key_head_dim": state_dim,
            "linear_value_head_dim": head_dim,
        }
    if sizes.mixer == "kda" and layer.whose == "megatron":
        of_mixer["kda_safe_gate"] = sizes.lower_bound is not None
        of_mixer["kda_lower_bound"] = sizes.lower_bound
    config = transformer_config(
        sizes.hidden,
        dtype,
        context_parallel_size=cp,
        gradient_accumulation_fusion=linears == "te" and layer.fused,
        deterministic_mode=layer.config.get("deterministic_mode", False),
        **of_mixer,
    )
    # The constructor asks for FlashAttention, which no layer here has.
    config.batch_invariant_mode = layer.config.get("batch_invariant_mode", False)
    if sizes.mixer == "gdp":
        config.gdp_num_householder = sizes.updates
    if layer.fp8:
        config.fp8 = "hybrid"
        config.fp8_recipe = Fp8Recipe[layer.fp8]
    return config


def build(
    layer: Layer,
    sizes: Sizes,
    backend: str = "auto",
    linears: str = "local",
    cp: int = 1,
    dtype: torch.dtype = BF16,
    seed: int = 3,
) -> nn.Module:
    """The layer with random weights; ``backend`` and ``linears`` where it says none."""
    torch.manual_seed(seed)
    if layer.whose == "fla":
        return fla_layer(sizes)
    linears = layer.linears or linears
    config = config_of(layer, sizes, linears, cp, dtype)
    if layer.whose == "megatron":
        module = megatrons_layer(config, sizes, linears)
    else:
        module = our_layer(layer, config, sizes, layer.backend or backend, linears)
    module.to(DEVICE)
    if sizes.mixer == "gdn" and dtype == BF16:
        module.bfloat16()
    if linears == "te" and layer.fused:
        for parameter in module.parameters():
            # where Transformer Engine adds its gradient
            main_grad = torch.zeros_like(parameter, dtype=torch.float32)
            parameter.main_grad = main_grad  # pyright: ignore[reportAttributeAccessIssue]
    return module


def groups() -> Any:
    from megatron.core.process_groups_config import ProcessGroupCollection

    return ProcessGroupCollection.use_mpu_process_groups(["tp", "cp"])


def our_layer(
    layer: Layer, config: Any, sizes: Sizes, backend: str, linears: str
) -> nn.Module:
    """Ours as a launch builds it."""
    from megatron.core.transformer.spec_utils import build_module

    from megatron_gdn import specs

    if DEVICE == "cpu" and backend not in ("auto", "reference"):
        backend = "auto"
    options = {"backend": backend, **layer.options}
    if sizes.mixer == "kda":
        # Kimi Linear's gates have the rank of a head, Megatron's have full width.
        rank = sizes.head_dim if options.pop("low_rank", False) else 0
        options |= {"forget_rank": rank, "output_rank": rank}
        options["gate_lower_bound"] = sizes.lower_bound
    spec = getattr(specs, SPECS[sizes.mixer])(linears, **options)
    width = {"d_model": sizes.hidden} if sizes.mixer in IN_MAMBA_LAYERS else {}
    return build_module(spec, config, layer_number=1, pg_collection=groups(), **width)


def megatrons_layer(config: Any, sizes: Sizes, linears: str) -> nn.Module:
    """With the linears and the norm of our spec."""
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    from megatron_gdn import specs

    of_gdn = sizes.mixer == "gdn"
    if of_gdn and DEVICE == "cuda" and os.environ.get("FLA_FLASH_QLA") != "0":
        # fences FlashQLA's kernels for this layer too: ours would, sooner or later
        kernels()
    name, class_name = MEGATRONS[sizes.mixer].split(".")
    package: Any = import_module(f"megatron.core.ssm.{name}")
    if sizes.mixer == "gdp" and not package.HAVE_MAMBA_SSM:
        package.HAVE_MAMBA_SSM = True
        package.ExtendedRMSNorm = CompiledNorm
    ours = getattr(specs, SPECS[sizes.mixer])(linears).submodules
    parts = {
        "in_proj": ours.in_proj,
        "beta_proj": ours.in_proj,
        "out_proj": ours.out_proj,
        "out_norm": ours.out_norm,
    }
    if of_gdn and linears == "local":
        parts["out_norm"] = WrappedTorchNorm
    # Gated DeltaNet's and Gated DeltaNet-2's are one class.
    submodules = getattr(package, f"{class_name.removesuffix('2')}Submodules")
    names = [each.name for each in dataclasses.fields(submodules)]
    width = [sizes.hidden] if sizes.mixer in IN_MAMBA_LAYERS else []
    return getattr(package, class_name)(
        config,
        submodules(**{name: parts[name] for name in names}),
        *width,
        layer_number=1,
        pg_collection=groups(),
    )


class CompiledNorm(nn.Module):
    """The function of mamba-ssm's gated norm in one compiled kernel each way."""

    def __init__(
        self,
        size: int,
        eps: float,
        group_size: int,
        norm_before_gate: bool,
        device: Any,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        assert not norm_before_gate
        self.weight = nn.Parameter(torch.ones(size, device=device, dtype=dtype))
        self.eps = eps
        self.group_size = group_size
        self._call = torch.compile(self._norm)

    def _norm(self, y: Tensor, z: Tensor, weight: Tensor) -> Tensor:
        u = y.float() * F.silu(z.float())
        u = u.unflatten(-1, (-1, self.group_size))
        u = u * (u.square().mean(-1, keepdim=True) + self.eps).rsqrt()
        return (u.flatten(-2) * weight.float()).to(y.dtype)

    def forward(self, y: Tensor, z: Tensor) -> Tensor:
        return self._call(y, z, self.weight)


def fla_layer(sizes: Sizes) -> nn.Module:
    """fla's own KimiDeltaAttention; without the package fla.layers itself where that
    needs packages that are not here."""
    try:
        module: Any = import_module("fla.layers.kda")
    except ModuleNotFoundError:
        found = find_spec("fla")
        package = ModuleType("fla.layers")
        assert found is not None and found.submodule_search_locations
        folders = found.submodule_search_locations
        package.__path__ = [f"{folder}/layers" for folder in folders]
        sys.modules["fla.layers"] = package
        module = import_module("fla.layers.kda")
    layer = module.KimiDeltaAttention(
        hidden_size=sizes.hidden,
        head_dim=sizes.head_dim,
        num_heads=sizes.heads[1],
        safe_gate=sizes.lower_bound is not None,
        lower_bound=sizes.lower_bound,
    )
    return layer.to(DEVICE, BF16)


def tune_over(most: int) -> None:
    """Leave each of fla's kernels, of those imported so far, the configuration of
    deterministic mode, or if none is listed its first ``most`` ones."""
    listed = {
        id(kernel): fixed
        for kernel, fixed, _ in tuned_kernels()
        if kernel.base_fn.__name__ in FIXED_CONFIGURATIONS
    }
    for name, module in list(sys.modules.items()):
        if not name.startswith("fla."):
            continue
        for kernel in list(vars(module).values()):
            while hasattr(kernel, "fn") and not hasattr(kernel, "configs"):
                kernel = kernel.fn
            if isinstance(getattr(kernel, "configs", None), list):
                kernel.configs = listed.get(id(kernel), kernel.configs[:most])
    tuned_kernels.cache_clear()  # deterministic mode gives these lists back


def slow_gates(layer: Any) -> None:
    """Decays of exp(-1/4096) a token: a state lives over some 4,096 tokens."""
    with torch.no_grad():
        layer.A_log.fill_(math.log(1 / 4096 / math.log(2)))
        layer.dt_bias.zero_()
        alpha = layer.in_proj.weight[-layer.A_log.numel() :]
        alpha.zero_()  # softplus(0) = log 2 for every token


# With its initial weights a layer's output is a sixth of its input in size (hidden
# 2048). The gate shrinks with the input, so after four layers nothing is left to
# compare. This factor on out_proj keeps the output near the input's size for three
# layers (1.8); after six it is 42 times as large.
_LARGER = 6.5


def row_of(build_one: Callable[[], nn.Module], layers: int) -> nn.ModuleList:
    """``layers`` results of ``build_one``; if more than one, each with a larger
    ``out_proj``."""
    row = nn.ModuleList([build_one() for _ in range(layers)])
    if layers > 1:
        with torch.no_grad():
            for layer in row:
                layer.out_proj.weight.mul_(_LARGER)  # pyright: ignore[reportCallIssue]
    return row


def through(row: nn.ModuleList, x: Tensor, packed: Any) -> Tensor:
    """``x`` through the layers, one after the other."""
    for layer in row:
        x = layer(x, None, packed_seq_params=packed)[0]
    return x


def thd(offsets: list[int] | None) -> Any:
    """Megatron's description of documents between these offsets; None for an unpacked
    batch."""
    from megatron.core.packed_seq_params import PackedSeqParams

    if offsets is None:
        return None
    cu_seqlens = torch.tensor(offsets, dtype=torch.int32, device=DEVICE)
    longest = max(b - a for a, b in zip(offsets, offsets[1:], strict=False))
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )
