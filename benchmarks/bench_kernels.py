"""Every kernel of the mixer against the bytes it must move at this GPU's copy bandwidth.

    python3 benchmarks/bench_kernels.py --out results.jsonl
    python3 benchmarks/bench_kernels.py --sweep     other tile shapes, to revise kernels/tiles.py

Target: at least 80% of the copy bandwidth.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from measure import copy_bandwidth, environment, table, time_ms, write_lines

from megatron_gdn.ops.documents import Documents
from megatron_gdn.ops.front import gdn as prepare
from megatron_gdn.ops.gated_norm import norm
from megatron_gdn.ops.head_sizes import HeadSizes
from megatron_gdn.ops.kernels.tiles import Block, Walk


class Problem:
    """Tensors of one shape in bf16, and the bytes each kernel must read and write."""

    def __init__(self, tokens: int, batch: int, sizes: HeadSizes, documents: int) -> None:
        G, H, K, V = self.sizes = sizes
        S, B = tokens, batch

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)

        self.proj, self.d_proj = normal(S, B, sizes.width), normal(S, B, sizes.width)
        self.weight = normal(sizes.conv_width, 1, 4)
        self.A_log, self.dt_bias = (torch.randn(H, device="cuda") for _ in range(2))
        self.gamma = normal(V)
        self.o, self.d_out = normal(B, S, H, V), normal(S, B, H * V)
        self.dq, self.dk, self.dv = normal(B, S, H, K), normal(B, S, H, K), normal(B, S, H, V)
        self.dg, self.dbeta = (torch.randn(B, S, H, device="cuda") for _ in range(2))
        self.documents = None
        if documents:
            offsets = [n * S // documents for n in range(documents)] + [S]
            self.documents = Documents.from_cu_seqlens(offsets, S, device="cuda")
        qkv, v, gates = 2 * sizes.conv_width, 2 * H * V, 2 * 2 * H
        self.bytes = {
            "prepare forward": S * B * (2 * qkv + gates + 8 * H),
            "prepare backward": S * B * (2 * qkv + 2 * 2 * H * K + v + 2 * gates + 8 * H),
            "norm forward": S * B * 3 * v,
            "norm backward": S * B * 5 * v,
        }

    def runs(self) -> dict[str, Callable[..., object]]:
        parameters = (self.weight, None, self.A_log, self.dt_bias, self.sizes)
        grads = (self.dq, self.dk, self.dv, self.dg, self.dbeta)
        z = self.sizes.layout.columns("z")
        return {
            "prepare forward": lambda **tile: prepare.prepare_forward(
                self.proj, *parameters, documents=self.documents, **tile
            ),
            "prepare backward": lambda **tile: prepare.prepare_backward(
                self.proj, *parameters, *grads, self.d_proj, documents=self.documents, **tile
            ),
            "norm forward": lambda: norm.gated_norm_forward(self.o, self.proj, self.gamma, z),
            "norm backward": lambda **tile: norm.gated_norm_backward(
                self.d_out, self.o, self.proj, self.gamma, z, self.d_proj, **tile
            ),
        }


SWEEP = {
    "prepare forward": [
        Walk(4, steps, 4, stages=stages) for steps in (32, 64) for stages in (1, 2, 3)
    ],
    "prepare backward": [
        Walk(4, steps, 4, 96, stages) for steps in (32, 64, 128) for stages in (2, 3, 4)
    ],
    "norm forward": [Block(rows, 1, 4) for rows in (16, 32)],
    "norm backward": [
        Block(rows, repeats, 4) for rows in (8, 16) for repeats in (4, 8, 16)
    ],
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[32768, 8192])
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--heads", type=int, nargs=2, default=(16, 32), metavar=("KEY", "VALUE"))
    parser.add_argument("--documents", type=int, nargs="+", default=[0, 32])
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--kernels", nargs="+", choices=SWEEP, default=list(SWEEP))
    parser.add_argument("--out", help="append JSON lines to this file")
    args = parser.parse_args()
    bandwidth = copy_bandwidth()
    setting = {"environment": environment(), "copy_TB_s": bandwidth / 1e12}
    rows = [["tokens", "documents", "kernel", "tile", "us", "min us", "of copy bandwidth"]]
    for tokens in args.tokens:
        for documents in args.documents:
            problem = Problem(tokens, args.batch, HeadSizes(*args.heads, 128, 128), documents)
            runs = problem.runs()
            for kernel in args.kernels:
                run = runs[kernel]
                floor = problem.bytes[kernel] / bandwidth * 1e6
                for tile in SWEEP[kernel] if args.sweep else [None]:
                    timed = run_with(kernel, run, tile)
                    us = timed["median"] * 1e3
                    record = {"tokens": tokens, "documents": documents, "kernel": kernel,
                              "tile": tile, "us": us, "floor_us": floor, **setting}  # fmt: skip
                    write_lines(args.out, [record])
                    rows.append([str(tokens), str(documents), kernel, "table" if tile is None else
                                 ",".join(map(str, tile)), f"{us:.1f}", f"{floor:.1f}",
                                 f"{floor / us:.0%}"])  # fmt: skip
            del problem
    print(f"copy {bandwidth / 1e12:.2f} TB/s, heads {tuple(args.heads)} of 128, bf16")
    print(table(rows))


def steady_ms(run: Callable[[], object]) -> dict[str, float]:
    """Over enough runs that the clocks have settled and launches run ahead of the device."""
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
