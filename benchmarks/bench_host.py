"""What the host takes to issue one forward and backward of a layer, ours beside
megatron-core's.

    python3 benchmarks/bench_host.py --out results.jsonl
    python3 benchmarks/bench_host.py --layers ours --cases 1x8192 --profile 25

Calls are issued behind a kernel that sleeps, so the host waits for nothing, and the
layers take turns. A backward through several layers (``--in-a-row``) wakes autograd's
thread once. The last column has the backward in the calling thread: what it is less by
goes into autograd's own thread. ``--profile`` prints the functions in which the time
goes, likewise in the calling thread, where Python's profiler sees the backward; its
times are longer by what it costs itself.
"""

from __future__ import annotations

import argparse
import cProfile
import os
import pstats

import torch
from lib.layers import LINEARS, OPTIONS, Case, forwards, start_megatron, with_backward
from lib.measure import IN_A_ROW, environment, host_ms, table, write_lines

from megatron_gdn.ops.delta_rule.base import HeadSizes

CASES = {
    case.name: case
    for case in (
        Case("1x8192", 1, 8192),
        Case("thd8192", 1, 8192, documents=8),
        Case("1x2048", 1, 2048),
        Case("1x4096", 1, 4096),
    )
}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--cases", nargs="+", choices=CASES, default=["1x8192", "thd8192"]
    )
    parser.add_argument(
        "--layers",
        nargs="+",
        choices=("upstream", *OPTIONS),
        default=["upstream", "ours"],
    )
    parser.add_argument("--core", choices=("flash_qla", "fla"), default="flash_qla")
    parser.add_argument(
        "--linears",
        choices=LINEARS,
        default="local",
        help="te: Transformer Engine's, which add gradients into main_grad",
    )
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument(
        "--heads", type=int, nargs=2, default=(16, 32), metavar=("KEY", "VALUE")
    )
    parser.add_argument(
        "--in-a-row",
        type=int,
        default=1,
        choices=IN_A_ROW,
        metavar="LAYERS",
        help="1 to 6 layers after each other, as in a model; times are of one",
    )
    parser.add_argument("--profile", type=int, default=0, metavar="FUNCTIONS")
    parser.add_argument("--out", help="append JSON lines to this file")
    return parser.parse_args()


def print_profile(of: str, run, functions: int, calls: int = 20) -> None:
    """The functions that take the most of ``calls`` calls, by their own time."""
    with torch.autograd.set_multithreading_enabled(False):
        profile = cProfile.Profile()
        profile.enable()
        for _ in range(calls):
            run()
        profile.disable()
        torch.cuda.synchronize()
    print(f"\n{of}, {calls} calls with the backward in the calling thread:")
    for order in ("tottime", "cumulative"):
        pstats.Stats(profile).sort_stats(order).print_stats(functions)


def main() -> None:
    args = arguments()
    os.environ["FLA_FLASH_QLA"] = "1" if args.core == "flash_qla" else "0"
    start_megatron()
    sizes = HeadSizes(*args.heads, 128, 128)
    rows = [
        [
            "case",
            "layer",
            "forward ms",
            "forward + backward ms",
            "ratio",
            "in one thread ms",
        ]
    ]
    profiles = []
    for name in args.cases:
        several = args.in_a_row
        runs, modules, x, _ = forwards(CASES[name], args.layers, args, sizes, several)
        base = None
        boths = [with_backward(run, modules[layer], x) for layer, run in runs.items()]
        forwards_ms = host_ms(list(runs.values()), in_a_row=several)
        totals_ms = host_ms(boths, in_a_row=several)
        with torch.autograd.set_multithreading_enabled(False):
            alone_ms = host_ms(boths, in_a_row=several)
        found = zip(runs, boths, forwards_ms, totals_ms, alone_ms, strict=True)
        for layer, both, forward, total, alone in found:
            record = {
                "case": name,
                "layer": layer,
                "core": args.core,
                "heads": list(args.heads),
                "host_forward": forward,
                "host_forward_backward": total,
                "host_in_one_thread": alone,
                "in_a_row": several,
                "linears": args.linears,
                "environment": environment(),
            }
            write_lines(args.out, [record])
            base = total["median"] if base is None else base
            rows.append(
                [
                    name,
                    layer,
                    f"{forward['median']:.3f}",
                    f"{total['median']:.3f} ({total['p10']:.3f} .. {total['p90']:.3f})",
                    f"{total['median'] / base:.3f}",
                    f"{alone['median']:.3f}",
                ]
            )
            print("  ".join(rows[-1]), flush=True)
            if args.profile:
                profiles.append((f"{name} {layer}", both))
    print("\n" + table(rows), flush=True)
    for of, run in profiles:
        print_profile(of, run, args.profile)


if __name__ == "__main__":
    main()
