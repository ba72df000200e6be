"""Every kernel of the mixer against the bytes it must move at this GPU's copy
bandwidth. Target: at least 80% of it."""

from __future__ import annotations

from lib.measure import time_ms
from lib.problem import Problem
from lib.session import Session


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


def kernels(session: Session) -> None:
    heads = session.sizes().heads
    for case in session.cases():
        documents = len(case.lengths or ())
        problem = Problem(
            case.tokens, heads, documents, batch=case.batch, device="cuda"
        )
        moved = bytes_moved(problem)
        runs = {
            "prepare forward": problem.forward,
            "prepare backward": problem.backward,
            "norm forward": problem.norm_forward,
            "norm backward": problem.norm_backward,
        }
        for kernel, run in runs.items():
            floor = moved[kernel] / session.bandwidth * 1e6
            # until the clocks have settled and launches run ahead of the device
            us = time_ms(run, warmup=30, repeats=100)["median"] * 1e3
            record = {
                "case": case.name,
                "layer": kernel,
                "kernel": kernel,
                "tokens": case.tokens,
                "documents": documents,
                "us": us,
                "floor_us": floor,
                "reached": floor / us,
            }
            session.emit(record)
        del problem, runs, run
