"""One layer of a cell: built, timed on a GPU or a CPU, and held to another."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from megatron_gdn.gdn.flash_qla import plan as flash_qla_plan

from .layers import (
    DEVICE,
    accumulate,
    our_layer,
    slow_gates,
    upstream_layer,
    with_backward,
)
from .measure import captured, memory_mib, time_ms
from .saved import saved_mib
from .shapes import Cell

# Both layers round to bf16 (2^-9) after each of some ten steps between input and
# output, and their errors are independent: ours from megatron-core's is at most this,
# relative to its size.
FURTHEST = 2 * 10 * 2**-9
LEVELS = {
    "ours": "none",
    "ours-light": "light",
    "ours-full": "full",
    "ours-uncut": "none",
}


@contextmanager
def rows_side_by_side() -> Iterator[None]:
    """Inside, FlashQLA's rule cuts no batch of several rows, as before it learnt to."""
    usual = flash_qla_plan.multiprocessors
    flash_qla_plan.multiprocessors = lambda: 0
    flash_qla_plan.plan_of_rows.cache_clear()
    try:
        yield
    finally:
        flash_qla_plan.multiprocessors = usual
        flash_qla_plan.plan_of_rows.cache_clear()


def milliseconds(run: Callable[[], Any], repeats: int) -> dict[str, float]:
    """:func:`time_ms`; on a CPU one call's time."""
    if DEVICE == "cuda":
        return time_ms(run, repeats=repeats)
    began = time.perf_counter()
    run()
    ms = (time.perf_counter() - began) * 1e3
    return {"median": ms, "p10": ms, "p90": ms, "host": ms, "n": 1}


def build(name: str, cell: Cell) -> torch.nn.Module:
    """A layer of the cell, from the seed of all its layers."""
    torch.manual_seed(3)
    if name == "upstream":
        layer = upstream_layer(cell.hidden, cell.sizes, linears=cell.linears)
    else:
        layer = our_layer(
            cell.hidden,
            cell.sizes,
            "auto" if DEVICE == "cpu" else "flash_qla",
            linears=cell.linears,
            recompute=LEVELS[name],
        )
    if cell.gates == "slow":
        slow_gates(layer)
    if cell.linears == "te":
        accumulate(layer)
    return layer


def gradient(parameter: torch.Tensor, linears: str) -> torch.Tensor:
    """Where the cell's linears put it."""
    found: Any = getattr(parameter, "main_grad", None) if linears == "te" else None
    if found is None or not found.any():  # not a linear's weight
        found = parameter.grad
    return found.detach().float().clone()


class Measured:
    """One layer of a cell: its run, and what was found of it."""

    def __init__(
        self, name: str, cell: Cell, x: torch.Tensor, packed: Any, weights: dict
    ) -> None:
        self.name = name
        self.cell = cell
        self.x = x
        self.module = build(name, cell)
        if weights:
            self.module.load_state_dict(weights, strict=False)
        self.forward = lambda: self.module(x, None, packed_seq_params=packed)[0]
        self.both = with_backward(self.forward, self.module, x)

    def results(self) -> dict[str, torch.Tensor]:
        """Output and gradients of one forward and backward."""
        torch.manual_seed(4)
        self.x.grad = None
        for parameter in self.module.parameters():
            parameter.grad = None
            if self.cell.linears == "te":
                parameter.main_grad.zero_()
        out = self.forward()
        out.backward(torch.randn_like(out))
        assert self.x.grad is not None
        found = {"out": out.detach(), "x": self.x.grad.detach().clone()}
        for name, parameter in self.module.named_parameters():
            if name in ("in_proj.weight", "out_proj.weight"):
                found[name] = gradient(parameter, self.cell.linears)
        return found

    def record(self, repeats: int, graph: bool) -> dict[str, Any]:
        made: dict[str, Any] = {"eager": milliseconds(self.both, repeats)}
        made["forward"] = milliseconds(self.forward, repeats)
        self.x.grad = None
        made |= (
            memory_mib(self.forward) if DEVICE == "cuda" else saved_mib(self.forward)
        )
        if graph and DEVICE == "cuda":
            replay, _ = captured(self.both)
            made["graph"] = milliseconds(replay.replay, repeats)
        return made


def errors(found: dict, exact: dict) -> dict[str, float]:
    """Each tensor's distance, relative to its size."""
    return {
        name: float((found[name].float() - x.float()).norm() / x.float().norm())
        for name, x in exact.items()
    }
