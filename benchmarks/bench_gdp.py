"""Our Gated DeltaProduct beside Megatron main's own layer: forward and backward, with one
checkpoint.

    MEGATRON_LM=FOLDER python3 benchmarks/bench_gdp.py --out results.jsonl   1 x 8192 and packed
    python3 benchmarks/bench_gdp.py --tiny                     a few tokens of ours,
                                                               anywhere

FOLDER, by default ``shared/megatron-lm``, is a clone of Megatron-LM at main, or its
folder ``megatron`` alone: no network is needed. Both layers then run in that Megatron.
Without it, or without causal-conv1d, which Megatron's layer needs, ours is measured
alone. Both project, convolve, gate, run n updates of the state per token, norm and
project back, in bf16 with local linears: ours by FlashQLA's or fla's delta rule over n
rows per token, Megatron's by fla's ``chunk_gated_delta_product``. Where mamba-ssm is
absent, Megatron's norm is the same function compiled by torch. Every case's times are
printed as soon as they are known; then come the times of our stages, run alone, and the
longest kernels of a forward and backward.

Legend: D hidden, G groups, H heads, n updates per token.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

CLONE = Path(os.environ.get("MEGATRON_LM", "shared/megatron-lm"))
HAS_CLASS = (CLONE / "megatron/core/ssm/gated_delta_product.py").is_file()
if HAS_CLASS:  # before anything imports Megatron
    sys.path.insert(0, str(CLONE.resolve()))

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from bench_kda import CASES, TINY, attempted, tune_over  # noqa: E402
from lib.layers import DEVICE, Case, start_megatron, thd  # noqa: E402
from lib.measure import (  # noqa: E402
    environment,
    table,
    time_of,
    times_of_layer,
    write_lines,
)
from lib.stage_times import stage_times  # noqa: E402
from profile_layer import kernel_times, print_kernels  # noqa: E402
from torch import Tensor, nn  # noqa: E402

from megatron_gdn import GatedDeltaProduct, GatedDeltaProductSubmodules  # noqa: E402

THEIRS = "Megatron's"
HAS_THEIRS = HAS_CLASS and find_spec("causal_conv1d") is not None


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--groups", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument(
        "--updates", type=int, nargs="+", default=[2, 4], help="n, per token"
    )
    parser.add_argument(
        "--backends",
        nargs="+",
        default=["flash_qla", "fla"],
        help="of our layer; without a GPU plain torch",
    )
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument(
        "--longest", type=int, default=12, help="how many kernels to print; 0: none"
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
        args.groups = 2
        args.head_dim = 16
        args.repeats = 2
    if DEVICE == "cpu":
        args.backends = ["reference"]
    return args


def build(args: argparse.Namespace, updates: int) -> dict[str, Any]:
    """The layers with n ``updates`` per token by name, with equal weights."""
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.tensor_parallel.layers import (
        ColumnParallelLinear,
        RowParallelLinear,
    )
    from megatron.core.transformer.transformer_config import TransformerConfig

    config: Any = TransformerConfig(
        num_layers=1,
        hidden_size=args.hidden,
        num_attention_heads=4,
        normalization="RMSNorm",
        mamba_num_heads=args.heads,
        mamba_num_groups=args.groups,
        mamba_head_dim=args.head_dim,
        mamba_state_dim=args.head_dim,
        bf16=True,
        params_dtype=torch.bfloat16,
        gradient_accumulation_fusion=False,
        add_bias_linear=False,
        use_cpu_initialization=DEVICE == "cpu",
    )
    config.gdp_num_householder = updates
    linears = {"in_proj": ColumnParallelLinear, "out_proj": RowParallelLinear}
    groups = ProcessGroupCollection.use_mpu_process_groups(["tp", "cp"])

    def ours(**options: Any) -> nn.Module:
        parts = GatedDeltaProductSubmodules(**linears)
        return GatedDeltaProduct(
            config, parts, args.hidden, pg_collection=groups, **options
        ).to(DEVICE)

    def theirs() -> nn.Module:
        package: Any = import_module("megatron.core.ssm.gated_delta_product")
        if not package.HAVE_MAMBA_SSM:
            package.HAVE_MAMBA_SSM = True
            package.ExtendedRMSNorm = CompiledNorm
        parts = package.GatedDeltaProductMixerSubmodules(**linears)
        return package.GatedDeltaProductMixer(
            config, parts, args.hidden, layer_number=1, pg_collection=groups
        ).to(DEVICE)

    first = args.backends[0]
    made: dict[str, Callable[[], nn.Module]] = {
        f"ours, {backend}": partial(ours, backend=backend) for backend in args.backends
    }
    made[f"ours, {first}, light"] = partial(ours, backend=first, recompute="light")
    if HAS_THEIRS:
        made[THEIRS] = theirs
    layers: dict[str, Any] = {}
    for name, make in made.items():
        layer = attempted(f"building {name}", make)
        if layer is None:
            continue
        if layers:
            weights = next(iter(layers.values())).state_dict()
            layer.load_state_dict(weights)
        layers[name] = layer
    return layers


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
        self._call = torch.compile(partial(gated_norm, group_size=group_size, eps=eps))

    def forward(self, y: Tensor, z: Tensor) -> Tensor:
        return self._call(y, z, self.weight)


def gated_norm(
    y: Tensor, z: Tensor, weight: Tensor, group_size: int, eps: float
) -> Tensor:
    u = y.float() * F.silu(z.float())
    u = u.unflatten(-1, (-1, group_size))
    u = u * (u.square().mean(-1, keepdim=True) + eps).rsqrt()
    return (u.flatten(-2) * weight.float()).to(y.dtype)


class Run:
    """A layer, and a case as its input."""

    def __init__(self, layer: nn.Module, case: Case, args: argparse.Namespace) -> None:
        self.layer = layer
        self.repeats = args.repeats
        shape = case.tokens, case.batch, args.hidden
        self.x = torch.randn(shape, device=DEVICE, dtype=torch.bfloat16)
        self.x.requires_grad_()
        self.packed = thd(case.offsets())
        self.grad = torch.randn_like(self.x)

    def forward(self) -> Tensor:
        return self.layer(self.x, packed_seq_params=self.packed)[0]

    def both(self) -> None:
        self.x.grad = None
        self.layer.zero_grad(set_to_none=True)
        self.forward().backward(self.grad)

    def times(self) -> dict[str, Any]:
        return times_of_layer(self.forward, self.layer, self.x, self.repeats)

    def stages(self) -> dict[str, list[float]]:
        milliseconds = lambda run: time_of(run, self.repeats)["median"]  # noqa: E731
        return stage_times(self.layer, self.x.detach(), self.packed, milliseconds)

    def kernels(self) -> Any:
        return kernel_times(self.both)


def rows_of_times(case: str, found: dict[str, Any]) -> list[list[str]]:
    """A row for each layer; ratios are of forward and backward."""
    rows = []
    for name, made in found.items():
        both = made["both"]["median"]
        kept = f"{made['kept_mib']:.0f}" if "kept_mib" in made else ""
        row = [case, name, f"{made['forward']['median']:.3f}", f"{both:.3f}", kept]
        if THEIRS in found:
            row.append(f"{both / found[THEIRS]['both']['median']:.2f}")
        else:
            row.append("")
        rows.append(row)
    return rows


def main() -> None:
    args = arguments()
    began = time.monotonic()

    def late(what: str) -> bool:
        seconds = time.monotonic() - began
        print(f"{what}: after {seconds:.0f} s", flush=True)
        return seconds > args.seconds

    start_megatron()
    torch.manual_seed(0)
    sizes = [args.hidden, args.heads, args.groups, args.head_dim]
    environ = environment() if DEVICE == "cuda" else {"gpu": "none"}
    setting = {"sizes": sizes, "environment": environ}
    heads = ["case", "whose", "fwd ms", "fwd+bwd ms", "kept MiB", "of Megatron's"]
    rows = [heads]
    cases = TINY if args.tiny else CASES
    layers_of = {n: build(args, n) for n in args.updates}
    if args.configurations is not None:
        tune_over(args.configurations)
    for updates, layers in layers_of.items():
        for case in cases:
            name = f"{case.name}, n = {updates}"
            found: dict[str, Any] = {}
            outputs = {}
            torch.manual_seed(1)
            for whose, layer in layers.items():
                if late(f"{name} {whose}"):
                    continue
                torch.manual_seed(1)
                run = Run(layer, case, args)
                made = attempted(f"{name} {whose}", run.times)
                if made is not None:
                    found[whose] = made
                    outputs[whose] = run.forward().detach().float()
            rows += rows_of_times(name, found)
            for row in rows[len(rows) - len(found) :]:
                print(*row, flush=True)
            apart = [
                float((y - z).norm() / y.norm())
                for y in list(outputs.values())[-1:]
                for z in outputs.values()
            ]
            print(f"{name}: outputs are {max(apart, default=0):.1e} apart", flush=True)
            record = {"case": case.name, "updates": updates, **setting, **found}
            write_lines(args.out, [{**record, "outputs apart": apart}])
    print(table(rows), flush=True)
    more = [(n, whose) for n in args.updates[:1] for whose in layers_of[n]]
    for updates, whose in more:
        run = Run(layers_of[updates][whose], cases[0], args)
        record = {"case": cases[0].name, "updates": updates, "layer": whose, **setting}
        what = f"{cases[0].name}, n = {updates}, {whose}"
        if not late(f"stages of {what}"):
            stages = attempted(what, run.stages)
            for name, pair in (stages or {}).items():
                print(f"{name}: {pair[0]:.3f} / {pair[1]:.3f} ms", flush=True)
            write_lines(args.out, [{**record, "stages": stages}])
        if DEVICE == "cuda" and args.longest and not late(f"kernels of {what}"):
            kernels = attempted(what, run.kernels)
            if kernels is not None:
                print_kernels(what, kernels, args.longest)
                write_lines(args.out, [{**record, "kernels": kernels}])
    print(table(rows), flush=True)


if __name__ == "__main__":
    main()
