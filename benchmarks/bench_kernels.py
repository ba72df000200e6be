"""Every kernel of the mixer against the bytes it must move at this GPU's copy
bandwidth.

    python3 benchmarks/bench_kernels.py --out results.jsonl
    python3 benchmarks/bench_kernels.py --sweep     other tile shapes, to revise
                                                    kernels/tiles.py

Target: at least 80% of the copy bandwidth.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

from lib.measure import copy_bandwidth, environment, table, time_ms, write_lines
from lib.problem import Problem

from megatron_gdn.ops.kernels.tiles import RowTile, SegmentTile
from megatron_gdn.ops.readout import kernels as norm


def bytes_moved(problem: Problem) -> dict[str, int]:
    """The bytes that each kernel must read and write."""
    S, B, _ = problem.proj.shape
    sizes = problem.sizes
    _, H, K, V = sizes
    qkv = 2 * sizes.layout.conv_width
    v = 2 * H * V
    gates = 2 * 2 * H
    return {
        "prepare forward": S * B * (2 * qkv + gates + 8 * H),
        "prepare backward": S * B * (2 * qkv + 2 * 2 * H * K + v + 2 * gates + 8 * H),
        "norm forward": S * B * 3 * v,
        "norm backward": S * B * 5 * v,
    }


def runs_of(problem: Problem) -> dict[str, Callable[..., object]]:
    return {
        "prepare forward": problem.forward,
        "prepare backward": problem.backward,
        "norm forward": problem.norm_forward,
        "norm backward": problem.norm_backward,
    }


SWEEP = {
    "prepare forward": [
        SegmentTile(4, steps, 4, stages=stages)
        for steps in (32, 64)
        for stages in (1, 2, 3)
    ],
    "prepare backward": [
        SegmentTile(4, steps, 4, 96, stages)
        for steps in (32, 64, 128)
        for stages in (2, 3, 4)
    ],
    "norm forward": [RowTile(rows, 1, 4) for rows in (16, 32)],
    "norm backward": [
        RowTile(rows, repeats, 4) for rows in (8, 16) for repeats in (4, 8, 16)
    ],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[32768, 8192])
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument(
        "--heads", type=int, nargs=2, default=(16, 32), metavar=("KEY", "VALUE")
    )
    parser.add_argument("--documents", type=int, nargs="+", default=[0, 32])
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--kernels", nargs="+", choices=SWEEP, default=list(SWEEP))
    parser.add_argument("--out", help="append JSON lines to this file")
    args = parser.parse_args()
    bandwidth = copy_bandwidth()
    setting = {"environment": environment(), "copy_TB_s": bandwidth / 1e12}
    rows = [
        ["tokens", "documents", "kernel", "tile", "us", "min us", "of copy bandwidth"]
    ]
    for tokens in args.tokens:
        for documents in args.documents:
            problem = Problem(
                tokens, tuple(args.heads), documents, batch=args.batch, device="cuda"
            )
            runs = runs_of(problem)
            moved = bytes_moved(problem)
            for kernel in args.kernels:
                run = runs[kernel]
                floor = moved[kernel] / bandwidth * 1e6
                for tile in SWEEP[kernel] if args.sweep else [None]:
                    timed = run_with(kernel, run, tile)
                    us = timed["median"] * 1e3
                    record = {
                        "tokens": tokens,
                        "documents": documents,
                        "kernel": kernel,
                        "tile": tile,
                        "us": us,
                        "floor_us": floor,
                        **setting,
                    }
                    write_lines(args.out, [record])
                    rows.append(
                        [
                            str(tokens),
                            str(documents),
                            kernel,
                            "table" if tile is None else ",".join(map(str, tile)),
                            f"{us:.1f}",
                            f"{floor:.1f}",
                            f"{floor / us:.0%}",
                        ]
                    )
            del problem, runs
    print(f"copy {bandwidth / 1e12:.2f} TB/s, heads {tuple(args.heads)} of 128, bf16")
    print(table(rows))


def steady_ms(run: Callable[[], object]) -> dict[str, float]:
    """Over enough runs that the clocks have settled and launches run ahead of the
    device."""
    return time_ms(run, warmup=30, repeats=100)


def run_with(kernel: str, run: Callable[..., object], tile) -> dict[str, float]:
    """Time a kernel at one tile shape; None is the shape of the table."""
    if tile is None or kernel != "norm forward":
        return steady_ms(run if tile is None else lambda: run(tile=tile))
    kept = norm.norm_forward_tile
    norm.norm_forward_tile = lambda *_: tile
    try:
        return steady_ms(run)
    finally:
        norm.norm_forward_tile = kept


if __name__ == "__main__":
    main()
