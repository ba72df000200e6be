"""Our Kimi Delta Attention beside fla's own layer and Megatron's, in one run, at the
same sizes.

    python3 benchmarks/bench_kda.py --out results.jsonl   1 x 8192 and packed, on a GPU
    MEGATRON_LM=FOLDER python3 benchmarks/bench_kda.py   beside Megatron's own layer,
                                                         too
    python3 benchmarks/bench_kda.py --tiny               a few tokens of ours, on any
                                                         machine

FOLDER is a clone of Megatron-LM with KimiDeltaAttention (pull request 6556); ours runs
in it too. All layers project, convolve, gate, run the recurrence, norm and project
back, in bf16; their weights differ. Ours runs fla's kernels of the recurrence or
cuDNN's. Linears are Megatron's local ones, and where Transformer Engine is installed
also its own, in bf16 and in FP8 tensorwise. Every case's times are printed as soon as
they are known; then come the times of each projection and stage, run alone, and the
longest kernels of a forward and backward.

Legend: S seq, B batch, D hidden, H heads, K head dim.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

CLONE = Path(os.environ.get("MEGATRON_LM", "shared/megatron-lm"))
HAS_MEGATRONS = (CLONE / "megatron/core/ssm/gated_delta_net/kda.py").is_file()
if HAS_MEGATRONS:  # before anything imports Megatron
    sys.path.insert(0, str(CLONE.resolve()))

import torch  # noqa: E402
from lib.layers import DEVICE, Case, start_megatron, thd  # noqa: E402
from lib.measure import environment, table, time_of, write_lines  # noqa: E402
from lib.stage_times import Times, stage_times  # noqa: E402
from profile_layer import kernel_times, print_kernels  # noqa: E402
from torch import nn  # noqa: E402

from megatron_gdn import KimiDeltaAttention  # noqa: E402
from megatron_gdn.specs import kimi_delta_attention_spec  # noqa: E402

HAS_TE = find_spec("transformer_engine") is not None
CASES = {
    case.name: case
    for case in (
        Case("1x8192", 1, 8192),
        Case("thd8192", 1, 8192, documents=16),
        Case("1x32768", 1, 32768),
    )
}
TINY = (Case("2x96", 2, 96), Case("thd160", 1, 160, documents=3))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--cases", nargs="+", choices=CASES, default=["1x8192", "thd8192"]
    )
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--lower-bound", type=float, help="of the gate; -5 is usual")
    parser.add_argument(
        "--backends",
        nargs="+",
        choices=("fla", "cudnn"),
        default=["fla"],
        help="of our layer; without a GPU plain torch",
    )
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument(
        "--longest", type=int, default=25, help="how many kernels to print; 0: none"
    )
    parser.add_argument(
        "--configurations",
        type=int,
        help="of each of fla's kernels to tune over; default all",
    )
    parser.add_argument(
        "--seconds", type=float, default=1e9, help="start no new case after this"
    )
    parser.add_argument("--tiny", action="store_true", help="tiny sizes and 2 repeats")
    parser.add_argument("--out", help="append JSON lines to this file")
    args = parser.parse_args()
    if args.tiny:
        args.hidden = 32
        args.heads = 4
        args.head_dim = 16
        args.repeats = 2
    return args


@dataclass(frozen=True)
class Layer:
    """One of the layers to measure."""

    whose: str  # "ours", "Megatron's" or "fla's"
    backend: str = "auto"  # of ours
    full: bool = False  # whether our gates have full width, as Megatron's have
    te: bool = False  # whether linears are Transformer Engine's
    fp8: bool = False  # tensorwise
    deterministic: bool = False

    @property
    def name(self) -> str:
        words = [self.whose]
        if self.backend == "cudnn":
            words.append("cudnn")
        if self.whose == "ours" and self.full:
            words.append("full gates")
        if self.fp8:
            words.append("FP8")
        elif self.te:
            words.append("TE")
        if self.deterministic:
            words.append("deterministic")
        return ", ".join(words)

    def build(self, args: argparse.Namespace) -> nn.Module:
        if self.whose == "fla's":
            return build_theirs(args)
        if self.whose == "ours":
            return self._build_ours(args)
        return self._build_megatrons(args)

    def _build_ours(self, args: argparse.Namespace) -> nn.Module:
        """Our layer, whose gates have the low rank of Kimi Linear unless they are
        full."""
        rank = args.head_dim
        if self.full:
            rank = 0
        mixer = KimiDeltaAttention(
            self._config(args),
            kimi_delta_attention_spec(self._linears).submodules,
            pg_collection=groups(),
            gate_lower_bound=args.lower_bound,
            backend=self.backend,
            forget_rank=rank,
            output_rank=rank,
        )
        return mixer.to(DEVICE)

    def _build_megatrons(self, args: argparse.Namespace) -> nn.Module:
        """Megatron's own class, whose gates have full width."""
        upstream: Any = import_module("megatron.core.ssm.gated_delta_net")
        bound = args.lower_bound
        config = self._config(
            args, kda_safe_gate=bound is not None, kda_lower_bound=bound
        )
        modules: Any = kimi_delta_attention_spec(self._linears).submodules
        submodules = upstream.KimiDeltaAttentionSubmodules(
            in_proj=modules.in_proj,
            out_norm=modules.out_norm,
            out_proj=modules.out_proj,
            beta_proj=modules.in_proj,
        )
        return upstream.KimiDeltaAttention(
            config, submodules, 1, pg_collection=groups()
        ).to(DEVICE)

    @property
    def _linears(self) -> str:
        if self.te:
            return "te"
        return "local"

    def _config(self, args: argparse.Namespace, **more: Any) -> Any:
        from megatron.core.enums import Fp8Recipe
        from megatron.core.transformer.transformer_config import TransformerConfig

        config: Any = TransformerConfig(
            num_layers=1,
            hidden_size=args.hidden,
            num_attention_heads=4,
            normalization="RMSNorm",
            activation_func=nn.functional.silu,  # Megatron's class takes no other
            linear_num_key_heads=args.heads,
            linear_num_value_heads=args.heads,
            linear_key_head_dim=args.head_dim,
            linear_value_head_dim=args.head_dim,
            linear_conv_kernel_dim=4,
            bf16=True,
            params_dtype=torch.bfloat16,
            gradient_accumulation_fusion=False,
            add_bias_linear=False,
            use_cpu_initialization=DEVICE == "cpu",
            deterministic_mode=self.deterministic,
            **more,
        )
        if self.fp8:
            config.fp8 = "hybrid"
            config.fp8_recipe = Fp8Recipe.tensorwise
        return config

    def context(self, module: Any) -> AbstractContextManager[Any]:
        """The context of a forward."""
        if not self.fp8:
            return nullcontext()
        from megatron.core.fp8_utils import get_fp8_context

        return get_fp8_context(module.config)


def layers_of(args: argparse.Namespace) -> list[Layer]:
    """The layers that this machine can run, those of most interest first."""
    if DEVICE == "cpu":
        return [Layer("ours"), Layer("ours", full=True)]
    first, *other = args.backends
    found = [Layer("ours", first), Layer("ours", first, full=True)]
    found += [Layer("ours", backend) for backend in other]
    if HAS_MEGATRONS:
        found.append(Layer("Megatron's"))
    if HAS_TE:
        for fp8 in (False, True):
            found.append(Layer("ours", first, te=True, fp8=fp8))
            found.append(Layer("ours", first, full=True, te=True, fp8=fp8))
            if HAS_MEGATRONS:
                found.append(Layer("Megatron's", te=True, fp8=fp8))
    else:
        print("FP8: skipped, Transformer Engine is not installed", flush=True)
    found.append(Layer("fla's"))
    found.append(Layer("ours", deterministic=True))
    return found


def groups() -> Any:
    from megatron.core.process_groups_config import ProcessGroupCollection

    return ProcessGroupCollection.use_mpu_process_groups(["tp", "cp"])


def build_theirs(args: argparse.Namespace) -> nn.Module:
    bound = args.lower_bound
    layer = _fla_module().KimiDeltaAttention(
        hidden_size=args.hidden,
        head_dim=args.head_dim,
        num_heads=args.heads,
        safe_gate=bound is not None,
        lower_bound=bound,
    )
    return layer.to(DEVICE, torch.bfloat16)


def _fla_module() -> Any:
    """fla.layers.kda; without fla.layers itself where that needs packages that are not
    here."""
    try:
        return import_module("fla.layers.kda")
    except ModuleNotFoundError:
        found = find_spec("fla")
        package = ModuleType("fla.layers")
        assert found is not None and found.submodule_search_locations
        package.__path__ = [
            f"{folder}/layers" for folder in found.submodule_search_locations
        ]
        sys.modules["fla.layers"] = package
        return import_module("fla.layers.kda")


def tune_over(most: int) -> None:
    """Leave each of fla's kernels, of those imported so far, its first
    configurations."""
    for name, module in list(sys.modules.items()):
        if not name.startswith("fla."):
            continue
        for kernel in list(vars(module).values()):
            while hasattr(kernel, "fn") and not hasattr(kernel, "configs"):
                kernel = kernel.fn
            if isinstance(getattr(kernel, "configs", None), list):
                kernel.configs = kernel.configs[:most]


class Run:
    """A layer, and a case as its input."""

    def __init__(
        self, layer: Layer, module: nn.Module, case: Case, args: argparse.Namespace
    ) -> None:
        self.layer = layer
        self.module = module
        shape = (case.tokens, case.batch, args.hidden)
        x = torch.randn(shape, device=DEVICE, dtype=torch.bfloat16)
        offsets = case.offsets()
        if layer.whose == "fla's":
            self.x = x.transpose(0, 1).contiguous()
            self.packed = None
            if offsets is not None:
                self.packed = torch.tensor(offsets, device=DEVICE)
        else:
            self.x = x
            self.packed = thd(offsets)
        self.x.requires_grad_()
        self.grad = torch.randn_like(self.x)
        # plain torch, which deterministic mode takes, is slow
        self.repeats = args.repeats
        self.warmup = 5
        if layer.deterministic:
            self.repeats = min(args.repeats, 4)
            self.warmup = 1

    def context(self) -> AbstractContextManager[Any]:
        return self.layer.context(self.module)

    def forward(self) -> torch.Tensor:
        if self.layer.whose == "fla's":
            return self.module(self.x, cu_seqlens=self.packed)[0]
        with self.context():
            return self.module(self.x, None, packed_seq_params=self.packed)[0]

    def both(self) -> None:
        self.x.grad = None
        self.module.zero_grad(set_to_none=True)
        self.forward().backward(self.grad)

    def milliseconds(self, run: Callable[[], object]) -> float:
        return time_of(run, self.repeats, self.warmup)["median"]

    def measured(self) -> dict[str, Any]:
        """Forward, forward and backward, and the MiB that are kept in between."""
        made: dict[str, Any] = {
            "forward": time_of(self.forward, self.repeats, self.warmup),
            "both": time_of(self.both, self.repeats, self.warmup),
        }
        if DEVICE == "cuda":
            before = torch.cuda.memory_allocated()
            out = self.forward()
            made["kept_mib"] = (torch.cuda.memory_allocated() - before) / 2**20
            del out
            # what the GPU takes if the host is never late
            kernels = kernel_times(self.both, repeats=3)
            made["gpu_ms"] = sum(us for _, _, us in kernels) / 1e3
        return made

    def stages(self) -> Times:
        """``[forward, backward]`` of each projection and stage, and of the layer."""
        made = stage_times(
            self.module, self.x.detach(), self.packed, self.milliseconds, self.context
        )
        forward = self.milliseconds(self.forward)
        made["the layer"] = [forward, self.milliseconds(self.both) - forward]
        return made


def attempted(what: str, run: Callable[[], Any]) -> Any:
    """The result of ``run``; None, with the error printed, if it fails: the other
    layers are measured all the same."""
    try:
        return run()
    except Exception:
        print(f"{what}: FAILED\n{traceback.format_exc(limit=-4)}", flush=True)
        return None


def table_of_stages(case: str, found: dict[str, Times]) -> str:
    """A row for each stage, two columns for each layer."""
    names = dict.fromkeys(name for times in found.values() for name in times)
    rows = [["ms, forward / backward", *found]]
    for name in names:
        cells = []
        for times in found.values():
            pair = times.get(name)
            cells.append("" if pair is None else f"{pair[0]:.3f} / {pair[1]:.3f}")
        rows.append([name, *cells])
    return f"\n{case}, each stage alone\n{table(rows)}\n"


def table_of_times(case: str, found: dict[str, dict[str, Any]]) -> str:
    """A row for each layer; ratios are of forward and backward."""
    against = ["Megatron's", "fla's"]
    ratios = [f"of {one}" for one in against]
    heads = ["fwd ms", "fwd+bwd ms", "its host ms", "its kernels ms", "kept MiB"]
    heads += ratios
    rows = [[case, *heads]]
    for name, made in found.items():
        both = made["both"]["median"]
        row = [name, f"{made['forward']['median']:.3f}", f"{both:.3f}"]
        if "kept_mib" in made:
            row.append(f"{made['both']['host']:.3f}")
            row.append(f"{made['gpu_ms']:.3f}")
            row.append(f"{made['kept_mib']:.0f}")
        else:
            row += ["", "", ""]
        for one in against:
            if one in found:
                row.append(f"{both / found[one]['both']['median']:.2f}")
            else:
                row.append("")
        rows.append(row)
    return f"\n{table(rows)}\n"


def main() -> None:
    args = arguments()
    began = time.monotonic()

    def late(what: str) -> bool:
        seconds = time.monotonic() - began
        if seconds > args.seconds:
            print(f"{what}: skipped, out of time", flush=True)
        else:
            print(f"{what}: after {seconds:.0f} s", flush=True)
        return seconds > args.seconds

    start_megatron()
    torch.manual_seed(0)
    modules: dict[Layer, nn.Module] = {}
    for layer in layers_of(args):
        module = attempted(f"building {layer.name}", partial(layer.build, args))
        if module is not None:
            modules[layer] = module
    if args.configurations is not None:
        tune_over(args.configurations)
    environ = environment() if DEVICE == "cuda" else {"gpu": "none"}
    sizes = [args.hidden, args.heads, args.head_dim, args.lower_bound]
    setting = {"sizes": sizes, "environment": environ}
    cases = TINY if args.tiny else tuple(CASES[name] for name in args.cases)
    tables: list[str] = []
    for case in cases:
        found: dict[str, dict[str, Any]] = {}
        for layer, module in modules.items():
            what = f"{case.name} {layer.name}"
            if late(what):
                continue
            run = Run(layer, module, case, args)
            made = attempted(what, run.measured)
            if made is not None:
                found[layer.name] = made
        tables.append(table_of_times(case.name, found))
        print(tables[-1], flush=True)
        write_lines(args.out, [{"case": case.name, **setting, **found}])
    for case in cases:
        stages: dict[str, Times] = {}
        for layer, module in modules.items():
            what = f"{case.name} stages of {layer.name}"
            if layer.whose == "fla's" or layer.deterministic or late(what):
                continue
            made = attempted(what, Run(layer, module, case, args).stages)
            if made is not None:
                stages[layer.name] = made
        tables.append(table_of_stages(case.name, stages))
        print(tables[-1], flush=True)
        write_lines(args.out, [{"case": case.name, **setting, "stages": stages}])
    if DEVICE == "cuda" and args.longest:
        for layer, module in modules.items():
            what = f"kernels of {layer.name}"
            if layer.deterministic or late(what):
                continue
            run = Run(layer, module, cases[0], args)
            kernels = attempted(what, partial(kernel_times, run.both))
            if kernels is not None:
                print_kernels(f"{cases[0].name} {layer.name}", kernels, args.longest)
                record = {"case": cases[0].name, "layer": layer.name}
                write_lines(args.out, [{**record, **setting, "kernels": kernels}])
        # once more, since many lines of kernels stand between
        print(*tables, sep="\n", flush=True)


if __name__ == "__main__":
    main()
