"""Every kernel of the mixer against the bytes it must move at this GPU's copy
bandwidth. Target: at least 80% of it.

``--set sweep=true``: other tile shapes, to revise ops/kernels/tiles.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lib.measure import time_ms
from lib.problem import Problem
from lib.session import Session

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


def kernels(session: Session) -> None:
    heads = session.sizes().heads
    for case in session.cases():
        documents = len(case.lengths or ())
        problem = Problem(
            case.tokens, heads, documents, batch=case.batch, device="cuda"
        )
        runs = runs_of(problem)
        moved = bytes_moved(problem)
        for kernel, run in runs.items():
            floor = moved[kernel] / session.bandwidth() * 1e6
            for tile in SWEEP[kernel] if session.row["sweep"] else [None]:
                us = run_with(kernel, run, tile)["median"] * 1e3
                record: dict[str, Any] = {
                    "case": case.name,
                    "kernel": kernel,
                    "tokens": case.tokens,
                    "documents": documents,
                    "tile": tile,
                    "us": us,
                    "floor_us": floor,
                    "reached": floor / us,
                }
                session.emit(record | {"layer": kernel})
        del problem, runs
