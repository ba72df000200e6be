"""The state-space dual (SSD) in plain torch: any device, dtype and size; repeatable bit for bit.

    S_t = exp(g_t) S_{t-1} + dt_t B_t x_t^T        o_t = S_t^T C_t + D_t x_t

per head: linear attention with a scalar decay (Dao, Gu, *Transformers are SSMs*, 2024). With s_t
the sum of g from the first token of a chunk to t, S the state that enters the chunk:

    o_t   = sum_{u <= t} exp(s_t - s_u) (C_t . B_u) dt_u x_u  +  exp(s_t) S^T C_t  +  D x_t
    S_out = exp(s_last) S  +  sum_u exp(s_last - s_u) B_u (dt_u x_u)^T

Every exponent is <= 0; those of u > t are masked before exp(). The backward computes the forward
again under autograd, one group of chunks at a time, so the T x T matrices of one group are kept.

Legend: B batch, S seq, N sequences, n chunks, T tokens of a chunk, G groups, R heads per group
(heads h R .. h R + R - 1 read group h of B and C), H = G R, K state dim, V head dim.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..ops.rules.base import Rule, RuleBackward, RuleForward, RuleOutput, Saved, in_rows
from ..ops.rules.chunk_table import CHUNK, ChunkGroup, ChunkTable, lengths_of_sequences
from ..ops.state_maps.state_map import StateMap
from ..ops.switches import full_fp32_matmul

UNLIMITED = (0.0, math.inf)


class SSDInputs(NamedTuple):
    """What the front makes; also the gradients of these, in the same shapes."""

    x: Tensor  # [B, S, H, V]
    B: Tensor  # [B, S, G, K], the keys
    C: Tensor  # [B, S, G, K], the queries
    dt: Tensor  # [B, S, H] fp32, >= 0
    g: Tensor  # [B, S, H] fp32 log-decay, <= 0
    D: Tensor  # [B, S, H, 1 or V] fp32; a parameter, so all tokens share its memory


def wide_dtype(x: Tensor) -> torch.dtype:
    """fp32, or fp64 for fp64."""
    return torch.promote_types(x.dtype, torch.float32)


# The inputs of a group of chunks, in fp32 (fp64 for fp64), are SSDInputs too:
# x [n, G, R, T, V], B and C [n, G, T, K], dt and g [n, G, R, T], D [n, G, R, T, 1 or V].
_CHUNK_DIMS = (3, 2, 2, 3, 3, 3)  # before T, of each


def walk(
    group: ChunkGroup, x: SSDInputs, sums: Tensor, carried: Tensor, initial: Tensor
) -> tuple[list[Tensor], Tensor, Tensor]:
    """The states that enter the chunks, the one after the last, those after sequences that end.

    ``sums``: of g, within each chunk. ``carried [G, R, K, V]``: from the group before.
    ``initial [b, G, R, K, V]``: of the b sequences that begin in the group.
    """
    decay = sums[..., -1:, None].exp()
    weight = (sums[..., -1:] - sums).exp() * x.dt
    local = x.B.mT[:, :, None] @ (weight[..., None] * x.x)
    state, entering, final = carried, [], []
    begins = {chunk: place for place, chunk in enumerate(group.begins)}
    for chunk in range(group.chunks):
        if chunk in begins:
            state = initial[begins[chunk]]
        entering.append(state)
        state = decay[chunk] * state + local[chunk]
        if chunk in group.ends:
            final.append(state)
    return entering, state, torch.stack(final) if final else initial[:0]


def walk_back(
    group: ChunkGroup, x: SSDInputs, d_o: Tensor, d_carried: Tensor, d_final: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of ``carried`` and ``initial``, from ``d_o [n, G, R, T, V]``; read no state."""
    sums = x.g.cumsum(-1)
    d_entering = x.C.mT[:, :, None] @ (sums.exp()[..., None] * d_o)
    decay = sums[..., -1:, None].exp()
    ends = {chunk: place for place, chunk in enumerate(group.ends)}
    d_initial: list[Tensor] = []
    for chunk in reversed(range(group.chunks)):
        if chunk in ends:
            d_carried = d_final[ends[chunk]]
        d_carried = decay[chunk] * d_carried + d_entering[chunk]
        if chunk in group.begins:
            d_initial.insert(0, d_carried)
            d_carried = torch.zeros_like(d_carried)
    return d_carried, torch.stack(d_initial) if d_initial else d_final[:0]


def output_of_group(x: SSDInputs, sums: Tensor, entering: list[Tensor]) -> Tensor:
    """``[n, G, R, T, V]``; ``entering`` has no states for the empty chunks at the end."""
    empty = [torch.zeros_like(entering[0])] * (x.x.shape[0] - len(entering))
    # Masked before exp(), by 0: for -inf it takes ten times as long on a CPU. A token's decay to
    # itself is exp(0) and has no gradient. As a difference of sums it would add the largest terms
    # of the gradient of g twice, with opposite signs.
    decay = (sums[..., :, None] - sums[..., None, :]).tril(-1).exp().tril()
    scores = (x.C @ x.B.mT)[:, :, None] * decay
    inside = scores @ (x.dt[..., None] * x.x)
    before = (sums.exp()[..., None] * x.C[:, :, None]) @ torch.stack([*entering, *empty])
    return inside + before + x.D * x.x


def run_group(
    group: ChunkGroup, x: SSDInputs, carried: Tensor, initial: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Output ``[n, G, R, T, V]`` and states of one group of chunks; differentiable."""
    sums = x.g.cumsum(-1)
    entering, carried, final = walk(group, x, sums, carried, initial)
    return output_of_group(x, sums, entering), carried, final


class _Chunked:
    """The chunks of a stage's inputs, and states in the shape that chunks are computed with."""

    def __init__(self, stage: Any, aligned: bool = False) -> None:
        self.inputs: SSDInputs = stage._inputs
        self.wide = wide_dtype(self.inputs.x)
        self.lengths = lengths_of_sequences(stage._rows, stage._documents)
        (H, V), (G, K) = self.inputs.x.shape[2:], self.inputs.B.shape[2:]
        self.state_shape = (G, H // G, K, V)
        self.table = ChunkTable.build(self.lengths, CHUNK, H, self.inputs.x.device, aligned)

    def of(self, group: ChunkGroup) -> SSDInputs:
        """Tokens to chunks; empty slots are zero: they write nothing and do not decay."""
        heads = self.state_shape[:2]
        kinds = (heads if dims == 3 else heads[:1] for dims in _CHUNK_DIMS)
        made = (
            self.table.to_chunks(x, group, kind, self.wide)
            for x, kind in zip(self.inputs, kinds, strict=True)
        )
        return SSDInputs(*made)

    def states(self, given: Tensor | None) -> Tensor:
        """``[N, H, K, V]``, or None for zero, to a new tensor ``[N, G, R, K, V]``."""
        shape = (len(self.lengths), *self.state_shape)
        if given is None:
            return self.inputs.x.new_zeros(shape, dtype=self.wide)
        return given.to(self.wide, copy=True).reshape(shape)

    def carried(self) -> Tensor:
        return self.inputs.x.new_zeros(self.state_shape, dtype=self.wide)


def _take(states: Tensor, index: tuple[Tensor, Tensor] | None) -> Tensor:
    """The states of the sequences that begin (or end) in a group of chunks."""
    return states[:0] if index is None else states.index_select(0, index[1])


def _put(states: Tensor, index: tuple[Tensor, Tensor] | None, new: Tensor) -> None:
    if index is not None:
        states.index_copy_(0, index[1], new)


class PlainForward(RuleForward):
    @torch.no_grad()
    def state_map(self) -> StateMap:
        inputs, chunks = self._inputs, _Chunked(self, self._rule.aligned)
        initial, final, carried = chunks.states(None), chunks.states(None), chunks.carried()
        with full_fp32_matmul(inputs.x.device.type):
            for group in chunks.table.groups:
                x, first = chunks.of(group), _take(initial, group.begin_index)
                _, carried, ended = walk(group, x, x.g.cumsum(-1), carried, first)
                _put(final, group.end_index, ended)
        sums = [x.sum(0) for x in inputs.g.to(final.dtype).flatten(0, 1).split(chunks.lengths)]
        decay, K = torch.stack(sums).exp(), chunks.state_shape[2]  # of a state, over every sequence
        return StateMap(final.flatten(1, 2), decay[..., None, None].expand(-1, -1, K, 1))

    @torch.no_grad()
    def run(
        self, initial: Tensor | None = None, *, keep: bool = True, final: bool = False
    ) -> RuleOutput:
        chunks, like = _Chunked(self, self._rule.aligned), self._inputs.x
        table = chunks.table
        walks = final or not table.are_chunks
        entering, carried = chunks.states(initial), chunks.carried()
        leaving = chunks.states(initial) if walks else entering
        rows = table.rows_like(like)
        with full_fp32_matmul(like.device.type):
            for group in table.groups:
                x, first = chunks.of(group), _take(entering, group.begin_index)
                if walks:
                    o, carried, ended = run_group(group, x, carried, first)
                    _put(leaving, group.end_index, ended)
                else:
                    o = output_of_group(x, x.g.cumsum(-1), list(first))
                table.put(rows, group, o.flatten(0, 2))
        o = in_rows(table.to_tokens(rows, like), self._rows)
        return RuleOutput(o, leaving.flatten(1, 2) if final else None, Saved())


class PlainBackward(RuleBackward):
    def _d_chunks(self, chunks: _Chunked, group: ChunkGroup) -> Tensor:
        return chunks.table.to_chunks(self._d_o, group, chunks.state_shape[:2], chunks.wide)

    @torch.no_grad()
    def d_initial(self) -> Tensor:
        chunks = _Chunked(self)
        d_final, d_initial, d_carried = chunks.states(None), chunks.states(None), chunks.carried()
        with full_fp32_matmul(self._d_o.device.type):
            for group in reversed(chunks.table.groups):
                x, d_o = chunks.of(group), self._d_chunks(chunks, group)
                d_last = _take(d_final, group.end_index)
                d_carried, d_first = walk_back(group, x, d_o, d_carried, d_last)
                _put(d_initial, group.begin_index, d_first)
        return d_initial.flatten(1, 2)

    def run(self, initial: Tensor | None = None, d_final: Tensor | None = None) -> SSDInputs:
        chunks, inputs = _Chunked(self), self._inputs
        table, entering, d_leaving = chunks.table, chunks.states(initial), chunks.states(d_final)
        rows = [table.rows_like(x) for x in inputs]
        with full_fp32_matmul(self._d_o.device.type):
            starts, d_carried = _starts(chunks, entering), chunks.carried()
            for group in reversed(table.groups):
                x, carried = chunks.of(group), starts.pop()
                first = _take(entering, group.begin_index)
                with torch.enable_grad():
                    leaves = SSDInputs(*(t.detach().requires_grad_() for t in x))
                    carried, first = (t.detach().requires_grad_() for t in (carried, first))
                    made = run_group(group, leaves, carried, first)
                d_made = self._d_chunks(chunks, group), d_carried, _take(d_leaving, group.end_index)
                *grads, d_carried = torch.autograd.grad(
                    made, (*leaves, carried), d_made, materialize_grads=True
                )
                for to, gradient, dims in zip(rows, grads, _CHUNK_DIMS, strict=True):
                    table.put(to, group, gradient.flatten(0, dims - 1))
        found = (table.to_tokens(to, like) for to, like in zip(rows, inputs, strict=True))
        return SSDInputs(*(in_rows(x, self._rows) for x in found))


@torch.no_grad()
def _starts(chunks: _Chunked, entering: Tensor) -> list[Tensor]:
    """The state that enters every group of chunks."""
    starts = [chunks.carried()]
    for group in chunks.table.groups[:-1]:
        x, first = chunks.of(group), _take(entering, group.begin_index)
        starts.append(walk(group, x, x.g.cumsum(-1), starts[-1], first)[1])
    return starts


class PlainSSD(Rule):
    """The chunk form as a rule over :class:`SSDInputs`: ``backend="reference"``."""

    name = "reference"
    batch_invariant = True
    reads_again = frozenset(SSDInputs._fields)
    forward, backward = PlainForward, PlainBackward

    def __init__(self, aligned: bool = False) -> None:
        self.aligned = aligned
