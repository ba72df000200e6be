"""Where the time of one forward and backward goes: every kernel of a layer, by total
time.

python3 benchmarks/profile_layer.py --cases 1x32768 --layers ours upstream
"""

from __future__ import annotations

import argparse
import os

import torch
from lib.layers import CASES, start_megatron
from lib.measure import environment, table, write_lines


def kernel_times(run, repeats: int = 5) -> list[tuple[str, float, float]]:
    """``(name, launches, microseconds)`` per call of ``run``, the longest first."""
    for _ in range(3):
        run()
    torch.cuda.synchronize()
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CUDA]
    ) as profile:
        for _ in range(repeats):
            run()
        torch.cuda.synchronize()
    found = [
        (e.key, e.count / repeats, e.self_device_time_total / repeats)
        for e in profile.key_averages()
        if e.self_device_time_total
    ]
    return sorted(found, key=lambda row: -row[2])


def print_kernels(of: str, times: list[tuple[str, float, float]], longest: int) -> None:
    total = sum(us for _, _, us in times)
    launches = sum(count for _, count, _ in times)
    print(f"\n{of}: {total:.0f} us in {launches:g} kernels per forward and backward")
    rows = [["us", "launches", "kernel"]]
    rows += [
        [f"{us:.0f}", f"{count:g}", key[:90]] for key, count, us in times[:longest]
    ]
    print(table(rows), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", nargs="+", choices=CASES, default=["1x32768"])
    parser.add_argument("--layers", nargs="+", default=["ours", "upstream"])
    parser.add_argument("--core", choices=("flash_qla", "fla"), default="flash_qla")
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument(
        "--heads", type=int, nargs=2, default=(16, 32), metavar=("KEY", "VALUE")
    )
    parser.add_argument("--out", help="append JSON lines to this file")
    args = parser.parse_args()
    os.environ["FLA_FLASH_QLA"] = "1" if args.core == "flash_qla" else "0"

    from bench_layer import forwards, with_backward

    from megatron_gdn.ops.delta_rule.base import HeadSizes

    start_megatron()
    sizes = HeadSizes(*args.heads, 128, 128)
    for name in args.cases:
        runs, modules, x, _ = forwards(CASES[name], args.layers, args, sizes)
        for layer, run in runs.items():
            times = kernel_times(with_backward(run, modules[layer], x))
            record = {
                "case": name,
                "layer": layer,
                "core": args.core,
                "kernels": times,
                "environment": environment(),
            }
            write_lines(args.out, [record])
            print_kernels(f"{name} {layer}", times, 30)


if __name__ == "__main__":
    main()
