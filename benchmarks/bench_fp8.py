"""The layer under Megatron's FP8 recipes, beside its bf16 self and megatron-core's own
layer.

    python3 benchmarks/bench_fp8.py --out results.jsonl     times, memory and errors on
                                                            one GPU
    python3 benchmarks/bench_fp8.py --toy                   small, on a CPU: errors in
                                                            bf16 alone
    python3 benchmarks/bench_fp8.py --profile --tokens 8192 --recipes tensorwise
                                                            where a layer's time goes, host and GPU

Errors are those of output and gradients against the same layer in fp64, relative to
their size, for gates as initialised and for slow ones. "gates too" is FP8 for all
columns of in_proj.
"""

from __future__ import annotations

import argparse
import gc
import re
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from lib import layers as lib
from lib.layers import DEVICE, accumulate, our_layer, slow_gates, upstream_layer
from lib.measure import environment, host_ms, memory_mib, table, time_ms, write_lines

from megatron_gdn.mixers.fp8 import GatesOutsideFP8
from megatron_gdn.ops.delta_rule.base import HeadSizes

RECIPES = ("delayed", "tensorwise", "blockwise")
SHAPES = {"2048 16/32": (2048, (16, 32)), "4096 16/64": (4096, (16, 64))}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--recipes", nargs="+", choices=RECIPES, default=list(RECIPES))
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument(
        "--seconds", type=float, default=1e9, help="start nothing new after this"
    )
    parser.add_argument("--out", help="append JSON lines to this file")
    parser.add_argument("--no-errors", action="store_true")
    parser.add_argument("--profile", action="store_true", help="that alone, see above")
    parser.add_argument(
        "--layers", nargs="+", default=["ours"], help="of --profile: upstream too"
    )
    parser.add_argument("--toy", action="store_true")
    return parser.parse_args()


class Configured:
    """Inside, layers are built with this recipe (None: bf16); :meth:`run` is Megatron's
    context."""

    def __init__(self, recipe: str | None) -> None:
        self.recipe = recipe
        self._plain = lib.transformer_config

    def __enter__(self) -> Configured:
        def config(*args: Any, **options: Any) -> Any:
            made: Any = self._plain(*args, **options)
            if self.recipe is not None:
                from megatron.core.enums import Fp8Recipe

                made.fp8 = "hybrid"
                made.fp8_recipe = Fp8Recipe[self.recipe]
            return made

        lib.transformer_config = config
        return self

    def __exit__(self, *_: object) -> None:
        lib.transformer_config = self._plain

    def run(self, layer: Any) -> Any:
        if self.recipe is None:
            return nullcontext()
        from megatron.core.fp8_utils import get_fp8_context

        return get_fp8_context(layer.config)


def build(
    name: str, hidden: int, sizes: HeadSizes, recipe: str | None
) -> tuple[Any, Configured]:
    linears = "te" if DEVICE == "cuda" else "local"
    with Configured(recipe) as configured:
        torch.manual_seed(3)
        if name == "upstream":
            layer: Any = upstream_layer(hidden, sizes, linears=linears)
        else:
            backend = "flash_qla" if DEVICE == "cuda" else "auto"
            layer = our_layer(hidden, sizes, backend, linears=linears)
    if name == "gates too" and isinstance(layer.in_proj, GatesOutsideFP8):
        layer.in_proj.__class__ = type(layer.in_proj).__bases__[1]
    if linears == "te":
        accumulate(layer)
    return layer, configured


def clear(layer: Any, x: torch.Tensor) -> None:
    x.grad = None
    for parameter in layer.parameters():
        parameter.grad = None


def measure(name: str, shape: str, recipe: str | None, args: Any) -> dict[str, Any]:
    forward, both, start = calls(name, shape, recipe, args)
    made: dict[str, Any] = {"eager": time_ms(both, repeats=args.repeats)}
    made["forward"] = time_ms(forward, repeats=args.repeats)
    start()
    return made | memory_mib(forward)


def calls(
    name: str, shape: str, recipe: str | None, args: Any
) -> tuple[Callable[[], Any], ...]:
    """A forward of the layer; a forward and backward; what forgets gradients before
    these."""
    hidden, heads = SHAPES[shape]
    layer, configured = build(name, hidden, HeadSizes(*heads, 128, 128), recipe)
    x = torch.randn(
        args.tokens, 1, hidden, device="cuda", dtype=torch.bfloat16
    ).requires_grad_()
    grad = torch.randn_like(x)

    def forward() -> torch.Tensor:
        with configured.run(layer):
            return layer(x, None)[0]

    def both() -> None:
        clear(layer, x)
        forward().backward(grad)

    return forward, both, lambda: clear(layer, x)


def results(
    layer: Any, x: torch.Tensor, grad: torch.Tensor, run: Any
) -> dict[str, torch.Tensor]:
    """Output and gradients of the second of two passes: delayed scaling has seen the
    first."""
    out = x
    for _ in range(2):
        clear(layer, x)
        for parameter in layer.parameters():
            if hasattr(parameter, "main_grad"):
                parameter.main_grad.zero_()
        with run(layer):
            out = layer(x, None)[0]
        out.backward(grad)
    assert x.grad is not None
    found = {"out": out, "x": x.grad}
    for name, parameter in layer.named_parameters():
        main: Any = getattr(parameter, "main_grad", None)
        found[name] = parameter.grad if main is None or not main.any() else main
    weight = found.pop("in_proj.weight")
    first = layer.dims.layout.main_width
    return {**found, "in_proj main": weight[:first], "in_proj gates": weight[first:]}


def exact_layer(layer: Any, hidden: int, sizes: HeadSizes) -> Any:
    """The layer in fp64, in plain torch, with the weights of ``layer``; its norm goes
    in front."""
    twin: Any = our_layer(hidden, sizes, "reference", linears="local").double()
    for name in ("A_log", "dt_bias"):
        parameter = twin.get_parameter(name)
        parameter.data = parameter.data.double()
    weights = {
        n: p.double() for n, p in layer.named_parameters() if "layer_norm" not in n
    }
    twin.load_state_dict(weights, strict=False)
    return twin


def errors(recipe: str | None, name: str, gates: str, toy: bool) -> dict[str, float]:
    hidden, sizes = (
        (2048, HeadSizes(16, 32, 128, 128)) if not toy else (32, HeadSizes(2, 4, 8, 8))
    )
    layer, configured = build(name, hidden, sizes, recipe)
    if gates == "slow":
        slow_gates(layer)
    torch.manual_seed(9)
    tokens = 256 if toy else 2048
    x = torch.randn(
        tokens, 1, hidden, device=DEVICE, dtype=torch.bfloat16
    ).requires_grad_()
    grad = torch.randn_like(x)
    found = results(layer, x, grad, configured.run)
    twin = exact_layer(layer, hidden, sizes)
    gamma = getattr(layer.in_proj, "layer_norm_weight", None)
    x64 = x.detach().double().requires_grad_()
    normed = x64
    if gamma is not None:
        normed = torch.nn.functional.rms_norm(
            x64, (hidden,), gamma.double(), layer.config.layernorm_epsilon
        )
    inner = normed.detach().requires_grad_()
    exact = results(twin, inner, grad.double(), lambda _: nullcontext())
    assert inner.grad is not None
    if gamma is not None:
        (exact["x"],) = torch.autograd.grad(normed, x64, inner.grad)
    return {
        key: float((found[key].double() - true).norm() / true.norm())
        for key, true in exact.items()
        if key in found and true.norm() > 0
    }


# The first whose pattern is found in a kernel's name.
KERNELS = {
    "GEMM": r"(?i)gemm|nvjet|cutlass|xmma|splitk",
    "norm of TE": r"(?i)rmsnorm|layernorm|transformer_engine::normalization",
    "quantise": r"(?i)transformer_engine|amax|quantize",
    "torch's": r"at::|Mem(cpy|set)",
    "front, rule, readout": "",
}
# Torch's calls: TE's GEMMs are not among them, so products are those of the gates.
OPERATIONS = (
    "aten::mm",
    "aten::addmm_",
    "aten::addmm",
    "aten::cat",
    "aten::copy_",
    "aten::add_",
    "aten::fill_",
    "aten::mul",
    "aten::linalg_vector_norm",
)


def profile(run: Callable[[], None], repeats: int = 5) -> dict[str, Any]:
    """Microseconds of the GPU by :data:`KERNELS` and by torch's calls; milliseconds of
    the host."""
    timed = time_ms(run, repeats=20)
    host = host_ms([run])[0]
    with torch.profiler.profile() as found:
        for _ in range(repeats):
            run()
        torch.cuda.synchronize()
    kernels = {}
    of_calls = {}
    for event in found.key_averages():
        us = event.self_device_time_total / repeats
        count = event.count / repeats
        if event.is_user_annotation or not us:
            continue
        if event.device_type == torch.autograd.DeviceType.CUDA:
            kernels[event.key] = (us, count)
        elif event.key in OPERATIONS:
            of_calls[event.key] = us
    groups = dict.fromkeys(KERNELS, 0.0)
    for name, (us, _) in kernels.items():
        groups[next(group for group, of in KERNELS.items() if re.search(of, name))] += (
            us
        )
    launches = sum(count for _, count in kernels.values())
    return {
        "eager": timed,
        "host": host,
        "groups": groups,
        "calls": of_calls,
        "launches": launches,
        "kernels": kernels,
    }


def profiles(args: argparse.Namespace, late: Callable[[str], bool]) -> None:
    """A column for each layer and recipe; the longest kernels, since their names
    decide."""
    for shape in args.shapes:
        columns = [
            (recipe, layer) for recipe in (None, *args.recipes) for layer in args.layers
        ]
        columns = [
            (r, layer)
            for r, layer in columns
            if not late(f"profile {shape} {r} {layer}")
        ]
        made = [
            profile(calls(layer, shape, recipe, args)[1]) for recipe, layer in columns
        ]
        heads = [f"{layer} {recipe or 'bf16'}" for recipe, layer in columns]
        rows = [[f"{shape}, {args.tokens} tokens", *heads]]
        for key in ("eager", "host"):
            rows.append([f"{key} ms", *(f"{one[key]['median']:.3f}" for one in made)])
        rows.append(["kernels", *(f"{one['launches']:.0f}" for one in made)])
        total = [f"{sum(one['groups'].values()):.0f}" for one in made]
        rows.append(["GPU us", *total])
        for kind, names in (("groups", KERNELS), ("calls", OPERATIONS)):
            rows += [
                [f"  {n} us", *(f"{one[kind].get(n, 0):.0f}" for one in made)]
                for n in names
            ]
        print(table(rows), flush=True)
        for (recipe, layer), head, one in zip(columns, heads, made, strict=True):
            record = {
                "profile": shape,
                "recipe": recipe,
                "layer": layer,
                "tokens": args.tokens,
            }
            write_lines(args.out, [record | one | {"environment": environment()}])
            longest = sorted(one["kernels"].items(), key=lambda kernel: -kernel[1][0])[
                :24
            ]
            print(head)
            print(
                *(f"  {us:.0f} us {n:g}x {key[:110]}" for key, (us, n) in longest),
                sep="\n",
            )


def main() -> None:
    args = arguments()
    began = time.monotonic()
    lib.start_megatron()

    def late(what: str) -> bool:
        gc.collect()
        if time.monotonic() - began > args.seconds:
            print(f"{what}: skipped, out of time", flush=True)
            return True
        return False

    times: list[list[str]] = []
    if args.profile:
        return profiles(args, late)
    if not args.toy:
        times = timed("ours", args, late)
    if not args.no_errors:
        measured_errors(args, late)
    if not args.toy:  # last: megatron-core's kernels compile for a minute and more
        times += timed("upstream", args, late)
        print(table([TIMES, *times]))


TIMES = ["shape", "recipe", "layer", "fwd ms", "fwd+bwd ms", "/ own bf16", "saved MiB"]


def timed(name: str, args: Any, late: Callable[[str], bool]) -> list[list[str]]:
    """Rows of the table of times."""
    setting = {"environment": environment(), "tokens": args.tokens}
    rows = []
    for shape in args.shapes:
        base = None
        for recipe in (None, *args.recipes):
            if late(f"{shape} {recipe} {name}"):
                continue
            made = measure(name, shape, recipe, args)
            both = made["eager"]["median"]
            base = base or both
            record = {
                "shape": shape,
                "recipe": recipe,
                "layer": name,
                **made,
                **setting,
            }
            write_lines(args.out, [record])
            rows.append(
                [
                    shape,
                    recipe or "bf16",
                    name,
                    f"{made['forward']['median']:.3f}",
                    f"{both:.3f}",
                    f"{both / base:.3f}",
                    f"{made['saved']:.0f}",
                ]
            )
            print("  ".join(rows[-1]), flush=True)
    return rows


def measured_errors(args: Any, late: Callable[[str], bool]) -> None:
    rows: list[list[str]] = []
    for gates in lib.GATES:
        for recipe in (None,) if args.toy else (None, *args.recipes):
            also = () if recipe is None else ("gates too",)
            for name in ("ours", *also):
                if late(f"errors {gates} {recipe} {name}"):
                    continue
                found = errors(recipe, name, gates, args.toy)
                record = {
                    "gates": gates,
                    "recipe": recipe,
                    "layer": name,
                    "errors": found,
                }
                write_lines(args.out, [record])
                rows = rows or [["gates", "recipe", "layer", *found]]
                shown = [f"{found.get(key, 0):.1e}" for key in rows[0][3:]]
                rows.append([gates, recipe or "bf16", name, *shown])
                print("  ".join(rows[-1]), flush=True)
    print(table(rows))


if __name__ == "__main__":
    main()
