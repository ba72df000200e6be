"""Do the layer's bits hold, and what does that cost?

    python3 benchmarks/bench_determinism.py --out determinism.jsonl
    python3 benchmarks/bench_determinism.py --parts repeats --backends flash_qla --ratios 2

Three parts, on one GPU:

    repeats     forward + backward again and again in two processes that share the GPU,
                over poisoned memory and beside a competing stream: the bits of output
                and gradients
    neighbours  one document alone, beside others, and elsewhere in the buffer
    cost        time and memory of the fast path, the deterministic one, the plain rule,
                and megatron-core's deterministic mode

"flash_qla" and "reference" run in deterministic mode and under torch's own switch,
which raises at an op without a fixed order; "flash_qla-fast" and "fla" as outside of
it.
"""

from __future__ import annotations

import argparse
import os
import time

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
# 1, as often set for Megatron, queues streams up
os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "8"

import torch  # noqa: E402
from lib.invariance import check_batch_invariance  # noqa: E402
from lib.layers import DEVICE, our_layer, start_megatron, thd, upstream_layer  # noqa: E402
from lib.measure import environment, memory_mib, table, time_ms, write_lines  # noqa: E402
from lib.processes import compare_processes, in_processes  # noqa: E402
from lib.repeats import check_repeats, forward_backward  # noqa: E402

from megatron_gdn.ops.delta_rule.base import HeadSizes  # noqa: E402

KEY_HEADS = 16
HEAD_DIM = 128
DOCUMENTS = (100, 63, 1, 3932, 4096)
BACKENDS = ("flash_qla", "flash_qla-fast", "fla", "reference")
PARTS = ("repeats", "neighbours", "cost")
LAYOUTS = ("dense", "thd")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument(
        "--backends",
        nargs="+",
        choices=BACKENDS,
        default=["flash_qla", "reference", "fla"],
    )
    parser.add_argument(
        "--ratios",
        type=int,
        nargs="+",
        default=[2, 1, 4],
        help="value heads per key head",
    )
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS))
    parser.add_argument("--repeats", type=int, default=200)
    parser.add_argument(
        "--slow-repeats",
        type=int,
        default=20,
        help="of fla and the reference, whose first ratio alone is run",
    )
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument(
        "--scale", type=int, default=1, help="divide every length by this"
    )
    parser.add_argument(
        "--seconds", type=float, default=1e9, help="start no new case after this"
    )
    parser.add_argument("--out", help="append JSON lines to this file")
    return parser.parse_args()


def setting() -> dict[str, str]:
    return environment() if DEVICE == "cuda" else {"gpu": "none"}


def lengths(args) -> list[int]:
    return [max(1, length // args.scale) for length in DOCUMENTS]


def build(backend: str, ratio: int, args):
    start_megatron()
    torch.manual_seed(0)
    sizes = HeadSizes(KEY_HEADS, KEY_HEADS * ratio, HEAD_DIM, HEAD_DIM)
    name = backend.removesuffix("-fast")
    deterministic = backend in ("flash_qla", "reference")
    return our_layer(
        args.hidden, sizes, name, deterministic=deterministic
    ), deterministic


def normal(*shape: int, seed: int) -> torch.Tensor:
    generator = torch.Generator(DEVICE).manual_seed(seed)
    return torch.randn(*shape, generator=generator, device=DEVICE).bfloat16()


def offsets_of(parts: list[int]) -> list[int]:
    return [0, *torch.tensor(parts).cumsum(0).tolist()]


def repeats_in_one_process(index: int, args, cases):
    """``{case: report}``; runs in a process of its own."""
    began = time.monotonic()
    reports = {}
    for case in cases:
        if time.monotonic() - began > args.seconds:
            continue
        backend, ratio, layout, repeats = case
        layer, deterministic = build(backend, ratio, args)
        tokens = sum(lengths(args))
        x = normal(tokens, 1, args.hidden, seed=1)
        params = thd(offsets_of(lengths(args))) if layout == "thd" else None
        run = forward_backward(
            layer,
            x,
            normal(tokens, 1, args.hidden, seed=2),
            attention_mask=None,
            packed_seq_params=params,
        )
        torch.use_deterministic_algorithms(deterministic)
        reports[case] = check_repeats(run, repeats)
        torch.use_deterministic_algorithms(False)
        if index == 0:
            print(
                f"{backend} 1:{ratio} {layout}: {reports[case]}, "
                f"{reports[case].seconds:.1f} s",
                flush=True,
            )
        del layer, run, x
    return reports


def repeats(args) -> None:
    cases = []
    for backend in args.backends:
        slow = backend in ("fla", "reference")
        for ratio in args.ratios[:1] if slow else args.ratios:
            for layout in args.layouts:
                cases.append(
                    (
                        backend,
                        ratio,
                        layout,
                        args.slow_repeats if slow else args.repeats,
                    )
                )
    by_process = in_processes(
        repeats_in_one_process, args, cases, processes=args.processes
    )
    rows = [
        [
            "backend",
            "value heads per key head",
            "layout",
            "repeats",
            "tensors",
            "verdict",
        ]
    ]
    for case in cases:
        reports = [found[case] for found in by_process if case in found]
        if len(reports) < args.processes:
            rows.append([*map(str, case[:3]), "0", "0", "out of time"])
            continue
        verdict = "not compared"
        if len(reports) > 1:
            verdict = compare_processes(reports) or "equal"
        done = sum(report.repeats for report in reports)
        rows.append(
            [
                *map(str, case[:3]),
                f"{args.processes} x {done // args.processes}",
                str(len(reports[0].digests)),
                verdict,
            ]
        )
        record = {
            "part": "repeats",
            "backend": case[0],
            "ratio": case[1],
            "layout": case[2],
            "processes": args.processes,
            "repeats": done,
            "verdict": verdict,
            "digests": reports[0].digests,
            "seconds": reports[0].seconds,
            "lengths": lengths(args),
            "hidden": args.hidden,
            "environment": setting(),
        }
        write_lines(args.out, [record])
    print("\n" + table(rows) + "\n", flush=True)


def neighbours(args) -> None:
    """The longest odd document among the others, through the layer and through the
    mixer alone."""
    order = sorted(lengths(args), reverse=True)
    parts = [order[1], *(n for i, n in enumerate(order) if i != 1)]
    rows = [["backend", "value heads per key head", "part", "differs"]]
    for backend in [b for b in args.backends if b != "fla"]:
        for ratio in args.ratios:
            layer, _ = build(backend, ratio, args)

            def through_layer(x, offsets, d_out, layer=layer):
                return forward_backward(
                    layer, x, d_out, attention_mask=None, packed_seq_params=thd(offsets)
                )()

            from megatron_gdn.ops.mixer import mix

            def through_mixer(x, offsets, d_out, layer=layer):
                proj = x.detach().requires_grad_()
                batch = layer.micro_batches.of(thd(offsets), proj)
                out = mix(proj, layer.stages(proj, batch), batch.passage.neighbours)
                return {
                    "output": out,
                    "dproj": torch.autograd.grad(out, proj, d_out)[0],
                }

            widths = {
                "layer": (through_layer, args.hidden, args.hidden),
                "mixer": (through_mixer, layer.in_proj_dim, layer.v_dim),
            }
            for part, (run, width, d_width) in widths.items():
                xs = [normal(n, 1, width, seed=n) for n in parts]
                ds = [normal(n, 1, d_width, seed=n + 1) for n in parts]

                def tokens_only(x, offsets, d_out, run=run):
                    names = ("output", "dx", "dproj")
                    return {
                        k: v for k, v in run(x, offsets, d_out).items() if k in names
                    }

                found = check_batch_invariance(tokens_only, xs, ds)
                verdict = "; ".join(
                    f"{d.name} {d.where} ({d.relative:.1e})" for d in found
                )
                rows.append([backend, str(ratio), part, verdict or "nothing"])
                record = {
                    "part": "neighbours",
                    "backend": backend,
                    "ratio": ratio,
                    "through": part,
                    "lengths": parts,
                    "differs": [str(d) for d in found],
                    "environment": setting(),
                }
                write_lines(args.out, [record])
            del layer
    print("\n" + table(rows) + "\n", flush=True)


def cost(args) -> None:
    """Everything in one run, at two value heads per key head."""
    start_megatron()
    sizes = HeadSizes(KEY_HEADS, 2 * KEY_HEADS, HEAD_DIM, HEAD_DIM)
    tokens = sum(lengths(args))
    x = normal(tokens, 1, args.hidden, seed=1).requires_grad_()
    grad = normal(tokens, 1, args.hidden, seed=2)
    documents = thd(offsets_of(lengths(args)))
    wanted = {
        "fast": ("flash_qla", False, False),
        "deterministic": ("flash_qla", True, False),
        "deterministic, torch's switch on": ("flash_qla", True, True),
        "reference": ("reference", True, False),
        "megatron-core": ("upstream", False, False),
        "megatron-core deterministic": ("upstream", True, False),
    }
    rows = [
        ["layer", "layout", "fwd ms", "fwd+bwd ms", "to fast", "saved MiB", "peak MiB"]
    ]
    base = {}
    for name, (backend, deterministic, switch) in wanted.items():
        if backend in BACKENDS and backend not in args.backends:
            continue
        torch.manual_seed(0)
        if backend == "upstream":
            layer = upstream_layer(args.hidden, sizes, deterministic=deterministic)
        else:
            layer = our_layer(args.hidden, sizes, backend, deterministic=deterministic)
        for layout in args.layouts:
            if backend == "upstream" and deterministic and layout == "thd":
                continue  # refused there

            def forward(layer=layer, layout=layout):
                return layer(
                    x, None, packed_seq_params=documents if layout == "thd" else None
                )[0]

            def both(layer=layer, forward=forward):
                x.grad = None
                for parameter in layer.parameters():
                    parameter.grad = None
                forward().backward(grad)

            slow = backend == "upstream" and deterministic
            settings = (
                {"warmup": 1, "repeats": 5} if slow else {"warmup": 20, "repeats": 20}
            )
            torch.use_deterministic_algorithms(switch)
            timed = [time_ms(run, **settings) for run in (forward, both)]
            x.grad = None
            memory = memory_mib(forward)
            torch.use_deterministic_algorithms(False)
            total = timed[1]["median"]
            fast = base.setdefault(layout, total)
            rows.append(
                [
                    name,
                    layout,
                    f"{timed[0]['median']:.3f}",
                    f"{total:.3f}",
                    f"{total / fast:.3f}",
                    f"{memory['saved']:.0f}",
                    f"{memory['peak']:.0f}",
                ]
            )
            print("  ".join(rows[-1]), flush=True)
            record = {
                "part": "cost",
                "layer": name,
                "layout": layout,
                "forward": timed[0],
                "forward_backward": timed[1],
                **memory,
                "lengths": lengths(args),
                "hidden": args.hidden,
                "environment": setting(),
            }
            write_lines(args.out, [record])
        del layer
    print("\n" + table(rows), flush=True)


def main() -> None:
    args = arguments()
    began = time.monotonic()
    for part, run in (("repeats", repeats), ("neighbours", neighbours), ("cost", cost)):
        if part in args.parts:
            run(args)
            print(
                f"{part}: {time.monotonic() - began:.0f} s since the start\n",
                flush=True,
            )


if __name__ == "__main__":
    main()
