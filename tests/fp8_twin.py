"""Linears in FP8 on the CPU, tensorwise: operands are rounded, products are in fp32."""

from contextlib import contextmanager
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.extensions import transformer_engine as te_linears
from megatron.core.quantization.quant_config import RecipeConfig
from megatron.core.quantization.utils import get_quant_config_or_none
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from torch import Tensor, nn

from megatron_gdn.compat.torch_linear import DuplicatedLinear

_on = [False]


@contextmanager
def fp8_on():
    _on.append(True)
    try:
        yield
    finally:
        _on.pop()


def recipe(pattern: str, when: str = "training_recipe", **settings) -> RecipeConfig:
    """Megatron's quantization recipe with these settings for the modules of a name."""
    config = {
        "transformer_engine_config_type": "TEQuantizationParams",
        "training_recipe": {},
    }
    config[when] = settings
    matchers = {
        "only": {"type": "glob", "pattern": pattern, "config": "only", "enabled": True}
    }
    return RecipeConfig.from_config_dict(
        {"configs": {"only": config}, "matchers": matchers}
    )


def _unchanged(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """In the place of `rounded`, for a product outside of FP8."""
    return x


def rounded(x: Tensor, dtype: torch.dtype = torch.float8_e4m3fn) -> Tensor:
    """``x`` with the bits of an FP8 tensor with one scale, in fp32."""
    scale = torch.finfo(dtype).max / x.abs().max().float().clamp_min(1e-30)
    return (x.float() * scale).to(dtype).float() / scale


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, group, split, fused, fp8=True):
        """``split``: x is this rank's tokens, and all ranks' are gathered, in FP8;
        ``fused``: the weight's gradient is added to its ``main_grad``."""
        round_to_fp8 = rounded if fp8 else _unchanged
        x8, w8 = round_to_fp8(x), round_to_fp8(weight)
        total = _gather(x8, group) if split else x8
        ctx.save_for_backward(total, w8)
        ctx.weight = weight
        ctx.group = group
        ctx.split = split
        ctx.fused = fused
        ctx.round_to_fp8 = round_to_fp8
        return (total @ w8.t()).to(x.dtype)

    @staticmethod
    def backward(ctx, d_y):
        total, w8 = ctx.saved_tensors
        weight = ctx.weight
        group = ctx.group
        d8 = ctx.round_to_fp8(d_y, torch.float8_e5m2)
        d_x = d8 @ w8
        if ctx.split:
            out = d_x.new_empty(d_x.shape[0] // group.size(), *d_x.shape[1:])
            dist.reduce_scatter_tensor(out, d_x.contiguous(), group=group)
            d_x = out
        elif group.size() > 1:
            dist.all_reduce(d_x, group=group)
        if not ctx.needs_input_grad[1]:
            return d_x.to(d_y.dtype), None, None, None, None, None
        d_weight = d8.flatten(0, 1).t() @ total.flatten(0, 1)
        if ctx.fused:
            weight.main_grad.add_(d_weight)
            d_weight = None
            if hasattr(weight, "grad_added_to_main_grad"):
                weight.grad_added_to_main_grad = True
                d_weight = torch.full_like(weight, torch.nan)  # nobody may read it
        else:
            d_weight = d_weight.to(weight.dtype)
        return d_x.to(d_y.dtype), d_weight, None, None, None, None


def _gather(x: Tensor, group) -> Tensor:
    if group.size() == 1:
        return x
    out = x.new_empty(group.size() * x.shape[0], *x.shape[1:])
    dist.all_gather_into_tensor(out, x.contiguous(), group=group)
    return out


class Fp8Column(ColumnParallelLinear):
    """As ``TEColumnParallelLinear``."""

    def __init__(self, *args, config, **options):
        super().__init__(*args, config=config, **options)
        self.fp8_meta = {}
        self.fuse_wgrad_accumulation = False
        self.sequence_parallel = config.sequence_parallel and self.tp_group.size() > 1
        self.finish_init(
            get_quant_config_or_none(options.get("name"), config.quant_recipe)
        )

    def finish_init(self, quantization_config) -> None:
        self.te_quant_params = None
        if quantization_config is not None:
            parse = te_linears.TEQuantizationParams.parse_from_config
            self.te_quant_params = parse(quantization_config)

    def will_execute_quantized(self, is_context_quantized: bool) -> bool:
        return te_linears._get_should_context_be_quantized_params(
            self.te_quant_params, self.training, is_context_quantized or _on[-1]
        )

    def forward(self, x, *args, **options):
        fp8 = self.will_execute_quantized(False)
        fused = self.fuse_wgrad_accumulation
        if not fp8 and not fused:
            return super().forward(x, *args, **options)
        y = _Product.apply(
            x, self.weight, self.tp_group, self.sequence_parallel, fused, fp8
        )
        bias = self.bias
        return (y if bias is None else y + bias), None


class Fp8NormedColumn(Fp8Column):
    """As ``TELayerNormColumnParallelLinear``."""

    normalization = "RMSNorm"
    zero_centered_gamma = False

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.eps = 1e-6
        self.layer_norm_weight = nn.Parameter(torch.ones(self.weight.shape[1]))
        self.layer_norm_bias = None
        self.layer_norm_weight.sequence_parallel = self.sequence_parallel
        self.return_layernorm_output = self.return_layernorm_output_gathered = False

    def forward(self, x, *args, **options):
        gamma = self.layer_norm_weight + int(self.zero_centered_gamma)
        if self.normalization == "RMSNorm":
            normed = F.rms_norm(x, x.shape[-1:], gamma, self.eps)
        else:
            normed = F.layer_norm(
                x, x.shape[-1:], gamma, self.layer_norm_bias, self.eps
            )
        y, _ = super().forward(normed, *args, **options)
        if not self.return_layernorm_output:
            return y, None
        return (
            y,
            _gather(normed.detach(), self.tp_group) if self._gathers else normed,
        ), None

    @property
    def _gathers(self) -> bool:
        return self.return_layernorm_output_gathered and self.sequence_parallel


class Fp8Duplicated(DuplicatedLinear):
    """As ``TELinear`` with the whole weight on every rank."""

    def __init__(self, *args, config, **options):
        super().__init__(*args, config=config, **options)
        self.fp8_meta = {}
        self.finish_init(
            get_quant_config_or_none(options.get("name"), config.quant_recipe)
        )

    finish_init = Fp8Column.finish_init
    will_execute_quantized = Fp8Column.will_execute_quantized

    def forward(self, x):
        if not self.will_execute_quantized(False):
            return super().forward(x)
        alone = SimpleNamespace(size=lambda: 1)
        return _Product.apply(x, self.weight, alone, False, False), None
