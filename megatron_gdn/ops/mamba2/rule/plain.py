"""The SSD recurrence in plain torch: any device, dtype and size; repeatable bit for bit.

Every product has a fixed shape on a GPU (see :class:`...rules.chunk_table.ChunkTable`), so the
bits of a sequence do not depend on the others of its batch. The backward computes the forward again
under autograd, one group of chunks at a time. So the T x T matrices of the chunks (T tokens each)
are kept for one group, not for a whole sequence.

Legend: N sequences, G groups, R heads per group, H = G R, K state dim, V head dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...documents import Documents
from ...fp32_matmul import full_fp32_matmul
from ...rules.base import RuleOutput, Saved
from ...rules.chunk_table import CHUNK, ChunkTable
from ...state_maps.state_map import StateMap
from .base import SSDInputs, decays_of_sequences, sequence_lengths, wide_dtype
from .chunked import (
    GroupInputs,
    group_inputs,
    output_of_group,
    run_group,
    state_gradients_of_group,
    states_of_group,
)

_CHUNK_DIMS = (3, 2, 2, 3, 3, 3)  # of the inputs: [n, G, R, ...] or [n, G, ...]


class PlainSSD:
    """A :class:`~...rules.base.Rule` over :class:`SSDInputs`.

    Args:
        aligned: a token's bits depend on its sequence alone, see :mod:`...aligned`.
    """

    name = "reference"
    batch_invariant = True
    aligned = False
    operand_dtype = None
    reads_again = frozenset(SSDInputs._fields)

    def __init__(self, aligned: bool = False) -> None:
        self.aligned = aligned

    def why_not_heads(self, heads: int) -> None:
        """Any number of them can run."""

    def begin(self, inputs: SSDInputs, documents: Documents | None) -> PlainForward:
        return PlainForward(inputs, documents, self.aligned)

    def begin_backward(
        self, d_o: Tensor, inputs: SSDInputs, saved: Saved, documents: Documents | None
    ) -> PlainBackward:
        return PlainBackward(d_o, inputs, documents)


class _Pass:
    """Inputs, their chunks, and states in the shape that chunks are computed with."""

    def __init__(
        self, inputs: SSDInputs, documents: Documents | None, aligned: bool = False
    ) -> None:
        self.inputs, self.lengths = inputs, sequence_lengths(inputs, documents)
        H, V = inputs.x.shape[2:]
        G, K = inputs.B.shape[2:]
        self.state_shape = (G, H // G, K, V)
        self.table = ChunkTable.build(self.lengths, CHUNK, H, inputs.x.device, aligned)

    def states(self, given: Tensor | None) -> Tensor:
        """``[N, H, K, V]``, or None for zero, to a new tensor ``[N, G, R, K, V]``."""
        shape, x = (len(self.lengths), *self.state_shape), self.inputs.x
        if given is None:
            return x.new_zeros(shape, dtype=wide_dtype(x))
        return given.to(wide_dtype(x), copy=True).reshape(shape)

    def carried(self) -> Tensor:
        return self.inputs.x.new_zeros(self.state_shape, dtype=wide_dtype(self.inputs.x))


def _take(states: Tensor, index: tuple[Tensor, Tensor] | None) -> Tensor:
    """The states of the sequences that begin (or end) in a group of chunks."""
    return states[:0] if index is None else states.index_select(0, index[1])


def _put(states: Tensor, index: tuple[Tensor, Tensor] | None, new: Tensor) -> None:
    if index is not None:
        states.index_copy_(0, index[1], new)


class PlainForward:
    def __init__(
        self, inputs: SSDInputs, documents: Documents | None, aligned: bool = False
    ) -> None:
        self._pass = _Pass(inputs, documents, aligned)

    @torch.no_grad()
    def state_map(self) -> StateMap:
        one, inputs = self._pass, self._pass.inputs
        initial, final, carried = one.states(None), one.states(None), one.carried()
        with full_fp32_matmul(inputs.x.device.type):
            for group in one.table.groups:
                x = group_inputs(one.table, group, inputs)
                ends = states_of_group(group, x, carried, _take(initial, group.begin_index))
                _put(final, group.end_index, ends.final)
                carried = ends.carried
        decay = decays_of_sequences(inputs.g.to(final.dtype), one.lengths)
        K = one.state_shape[2]
        return StateMap(final.flatten(1, 2), decay[..., None, None].expand(-1, -1, K, 1))

    @torch.no_grad()
    def run(
        self, initial: Tensor | None = None, *, keep: bool = True, final: bool = False
    ) -> RuleOutput:
        one, inputs = self._pass, self._pass.inputs
        walks = final or not one.table.are_chunks
        entering, carried = one.states(initial), one.carried()
        leaving = one.states(initial) if walks else entering
        rows = one.table.rows_like(inputs.x)
        with full_fp32_matmul(inputs.x.device.type):
            for group in one.table.groups:
                x = group_inputs(one.table, group, inputs)
                first = _take(entering, group.begin_index)
                if walks:
                    o, ends = run_group(group, x, carried, first)
                    _put(leaving, group.end_index, ends.final)
                    carried = ends.carried
                else:
                    o = output_of_group(x, x.g.cumsum(-1), list(first))
                one.table.put(rows, group, o.flatten(0, 2))
        o = one.table.to_tokens(rows, inputs.x)
        return RuleOutput(o, leaving.flatten(1, 2) if final else None, Saved())


class PlainBackward:
    def __init__(self, d_o: Tensor, inputs: SSDInputs, documents: Documents | None) -> None:
        self._pass, self._d_o = _Pass(inputs, documents), d_o

    def _d_chunks(self, group) -> Tensor:
        one = self._pass
        heads = one.state_shape[:2]
        return one.table.to_chunks(self._d_o, group, heads, wide_dtype(one.inputs.x))

    @torch.no_grad()
    def d_initial(self) -> Tensor:
        one = self._pass
        d_final, d_initial, d_carried = one.states(None), one.states(None), one.carried()
        with full_fp32_matmul(one.inputs.x.device.type):
            for group in reversed(one.table.groups):
                x = group_inputs(one.table, group, one.inputs)
                d_ends = state_gradients_of_group(
                    group, x, self._d_chunks(group), d_carried, _take(d_final, group.end_index)
                )
                _put(d_initial, group.begin_index, d_ends.final)
                d_carried = d_ends.carried
        return d_initial.flatten(1, 2)

    def run(self, initial: Tensor | None = None, d_final: Tensor | None = None) -> SSDInputs:
        one, inputs = self._pass, self._pass.inputs
        entering, d_leaving = one.states(initial), one.states(d_final)
        rows = [one.table.rows_like(x) for x in inputs]
        with full_fp32_matmul(inputs.x.device.type):
            starts, d_carried = self._starts(entering), one.carried()
            for group in reversed(one.table.groups):
                x, carried = group_inputs(one.table, group, inputs), starts.pop()
                first = _take(entering, group.begin_index)
                with torch.enable_grad():
                    leaves = GroupInputs(*(t.detach().requires_grad_() for t in x))
                    carried, first = (t.detach().requires_grad_() for t in (carried, first))
                    o, ends = run_group(group, leaves, carried, first)
                d_ends = (d_carried, _take(d_leaving, group.end_index))
                *grads, d_carried = torch.autograd.grad(
                    (o, *ends), (*leaves, carried), (self._d_chunks(group), *d_ends),
                    materialize_grads=True,
                )  # fmt: skip
                for to, gradient, dims in zip(rows, grads, _CHUNK_DIMS, strict=True):
                    one.table.put(to, group, gradient.flatten(0, dims - 1))
        found = (one.table.to_tokens(to, like) for to, like in zip(rows, inputs, strict=True))
        return SSDInputs(*found)

    @torch.no_grad()
    def _starts(self, entering: Tensor) -> list[Tensor]:
        """The state that enters every group of chunks."""
        one = self._pass
        starts = [one.carried()]
        for group in one.table.groups[:-1]:
            x = group_inputs(one.table, group, one.inputs)
            first = _take(entering, group.begin_index)
            starts.append(states_of_group(group, x, starts[-1], first).carried)
        return starts
