"""The first tokens of pieces, computed with their history (Triton); the twin is :mod:`.edges`.

One launch in the forward, two in the backward: before the gradients travel, and after.

Legend as in :mod:`.edges`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from ..kernels.launch import MOST_PLANS, Launch
from ..kernels.tiles import block_dim
from .edges import EdgeInputs, HistoryTable, StaticHistoryTable
from .fused_edges_kernels import add_gradients_kernel, redo_backward_kernel, redo_kernel

_CHANNELS = 256  # per program of the kernel that adds gradients


class FusedEdges(NamedTuple):
    """See :class:`.edges.Edges`. The convolved columns are three sections of heads."""

    names: tuple[str, str, str]  # of the rule's inputs that these sections become
    column: int  # the first of these columns in a projection row
    heads: tuple[int, int, int]  # of each section
    widths: tuple[int, int, int]
    normalise: bool = False  # scale the heads of the first two to unit length
    batch_invariant: bool = False  # do not fuse products and sums, as the front itself does
    eps: float = 1e-6

    @property
    def channels(self) -> int:
        return sum(h * w for h, w in zip(self.heads, self.widths, strict=True))

    def redo(self, inputs: EdgeInputs, made: Any, names: Sequence[str]) -> None:
        table, proj, (weight, bias, *_), history = inputs
        # A name that is left out gets a pointer that the kernel never reads.
        there = getattr(made, names[0])
        outputs = [getattr(made, name) if name in names else there for name in self.names]
        first = self.names.index(names[0])
        assert tuple(names) == self.names[first : first + len(names)], "not neighbours"
        launch = _redo_launch(
            self, len(table.lines), *proj.shape[:2], weight.shape[-1], proj.stride()[:2],
            history.stride(), bias is not None, (first, first + len(names)),
        )  # fmt: skip
        launch(proj, history, weight, bias, table.pieces, *outputs)

    def backward(self, inputs: EdgeInputs, grads: Any) -> FusedBackward:
        table, proj, (weight, bias, *_), history = inputs
        given = [getattr(grads, name).contiguous() for name in self.names]
        factor = getattr(grads, "factor", None)
        N, B, past = len(table.lines), proj.shape[1], weight.shape[-1] - 1
        R, _, channels = history.shape
        sums = channels * (past + 1 + (bias is not None))
        partial = proj.new_empty(N * B, sums, dtype=torch.float32)
        # Of documents in fixed buffers some rows arrive that no piece reads.
        new = proj.new_zeros if isinstance(table, StaticHistoryTable) else proj.new_empty
        made = new(R + N * past, B, channels, dtype=torch.float32)
        launch = _backward_launch(
            self, N, R, *proj.shape[:2], past + 1, proj.stride()[:2], history.stride(),
            given[0].shape[2] // self.heads[0], bias is not None, factor is not None,
        )  # fmt: skip
        if launch is not None:
            launch(proj, history, weight, bias, table.pieces, *given, factor, made, partial)
        grads = grads._replace(**dict(zip(self.names, given, strict=True)))
        return FusedBackward(made[:R], grads, self, table, made, partial)


class FusedBackward(NamedTuple):
    """See :class:`.edges.EdgesBackward`."""

    d_history: Tensor
    grads: Any
    edges: FusedEdges
    table: HistoryTable
    made: Tensor  # [R + N (W - 1), B, C], gradients of the history and of the tokens computed again
    partial: Tensor  # [N B, C W], or C (W + 1): gradients of weight and bias

    def add(
        self, d_proj: Tensor, returned: Tensor, of_parameters: tuple[Tensor | None, ...]
    ) -> tuple[Tensor | None, ...]:
        d_weight, d_bias, *_ = of_parameters
        additions, (R, B, _) = self.table.additions, self.d_history.shape
        assert d_weight is not None
        launch = _add_launch(
            self.edges, *additions.shape, R, self.made.shape[0] - R, self.partial.shape[0], B,
            d_weight.shape[-1], d_proj.stride()[:2], d_bias is not None,
        )  # fmt: skip
        if launch is not None:
            launch(self.made, returned, self.partial, additions, d_proj, d_weight, d_bias)
        return of_parameters


@lru_cache(maxsize=MOST_PLANS)
def _sections(edges: FusedEdges) -> dict[str, int]:
    constants = {"COLUMN": edges.column}
    for letter, heads, width in zip("ABC", edges.heads, edges.widths, strict=True):
        constants |= {
            f"HEADS_{letter}": heads, f"WIDTH_{letter}": width, f"BLOCK_{letter}": block_dim(width)
        }  # fmt: skip
    return constants


@lru_cache(maxsize=MOST_PLANS)
def _redo_launch(
    edges: FusedEdges, N: int, S: int, B: int, W: int, strides: tuple[int, ...],
    history_strides: tuple[int, ...], has_bias: bool, sections: tuple[int, int],
) -> Launch:  # fmt: skip
    """``sections``: the first section that is computed, and one past the last."""
    first, slots = sum(edges.heads[: sections[0]]), sum(edges.heads[slice(*sections)])
    return Launch(
        redo_kernel, (N, slots, B), S, first, *strides, *history_strides, edges.eps,
        **_sections(edges), W=W, HAS_BIAS=has_bias, NORMALISE=edges.normalise, num_warps=1,
        enable_fp_fusion=not edges.batch_invariant,
    )  # fmt: skip


@lru_cache(maxsize=MOST_PLANS)
def _backward_launch(
    edges: FusedEdges, N: int, R: int, S: int, B: int, W: int, strides: tuple[int, ...],
    history_strides: tuple[int, ...], group: int, has_bias: bool, scaled: bool,
) -> Launch | None:  # fmt: skip
    """None if no token is computed again."""
    if not N:
        return None
    return Launch(
        redo_backward_kernel, (N, sum(edges.heads), B), S, R, *strides, *history_strides, edges.eps,
        **_sections(edges), GROUP=group, W=W, HAS_BIAS=has_bias, NORMALISE=edges.normalise,
        SCALED=scaled, num_warps=1, enable_fp_fusion=not edges.batch_invariant,
    )  # fmt: skip


@lru_cache(maxsize=MOST_PLANS)
def _add_launch(
    edges: FusedEdges, M: int, columns: int, R: int, redone: int, partial_rows: int, B: int, W: int,
    strides: tuple[int, ...], has_bias: bool,
) -> Launch | None:  # fmt: skip
    """None if nothing is added."""
    if not M and not partial_rows:
        return None
    taps = W + has_bias if partial_rows else 0
    return Launch(
        add_gradients_kernel, (M + taps, triton.cdiv(edges.channels, _CHANNELS), B),
        M, columns - 1, R, redone, partial_rows, *strides,
        COLUMN=edges.column, CHANNELS=edges.channels, W=W, HAS_BIAS=has_bias, BLOCK=_CHANNELS,
        num_warps=4,
    )  # fmt: skip
