"""The chunk form of the gated delta rule in plain torch, forward and backward.

Inside a chunk everything is a matrix product; only the state at chunk boundaries is computed one
chunk after the other (:mod:`.chunk_math` has the equations). The backward, in closed form, computes
the forward again, so no tensor of size T * C outlives either pass. Every reduction has a fixed
order, so results repeat bit for bit.

On documents in fixed buffers the device alone knows which chunks end sequences. Every chunk is then
walked, also those without tokens at the end; the others have the same sums and products.

Legend: N sequences (in fixed buffers empty ones keep their states), n chunks, C tokens of a chunk,
T tokens, G key heads, R value heads per key head, H = G * R, K key dim, V value dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..autograd import first_derivative_only, uncompiled
from ..documents import Documents
from ..elementwise import l2norm
from ..rules import chunk_table
from ..rules.chunk_table import ChunkGroup, ChunkTable, chunks_at_once
from ..static_documents import StaticDocuments
from ..switches import full_fp32_matmul
from .base import check_rule_inputs
from .chunk_math import ChunkGrads, Chunks


class _Places(NamedTuple):
    """Tables of all n chunks, filled up to whole groups on a GPU."""

    slot: Tensor  # int64 [T], the slot of each token
    token: Tensor  # int64 [n * C], the token in each slot; empty slots repeat the last token
    empty: Tensor  # bool [n * C]
    sequence: Tensor  # int64 [n]
    begins: Tensor  # bool [n], whether the chunk is the first of its sequence
    ends: Tensor  # bool [n], whether it is the last
    first: Tensor  # int64 [N], the first chunk of a sequence
    last: Tensor  # int64 [N]
    filled: Tensor  # bool [N], whether it has tokens


@dataclass(frozen=True, eq=False)
class StaticChunkGroup(ChunkGroup):
    """Consecutive chunks, some without tokens; ``begins`` and ``ends`` of the base stay empty."""

    sequence: Tensor  # int64 [n]
    begin: Tensor  # bool [n], whether a sequence begins with the chunk
    end: Tensor
    first: (
        Tensor  # int64 [N], the first chunk of a sequence, counted in the group and clamped to it
    )
    last: Tensor
    first_here: Tensor  # bool [N, 1, 1, 1], whether that chunk is in the group
    last_here: Tensor


def static_chunk_table(documents: StaticDocuments, C: int, heads: int) -> ChunkTable:
    """The table of these documents; made once, and written again by every fill."""
    at_once = chunks_at_once(heads)
    key = (ChunkTable, C, at_once)
    if key in documents.plans:
        return documents.plans[key]
    n = documents.most_chunks(C)
    padded = -(-n // at_once) * at_once if chunk_table.fills_up(documents.device) else n
    places = documents.table(("places", C, padded), lambda these: _places(these, C, padded))
    groups = []
    for start in range(0, padded, at_once):
        stop = min(start + at_once, padded)
        slots = slice(start * C, stop * C)
        first, last, first_here, last_here = documents.table(
            ("ends in group", C, start, stop),
            lambda these, start=start, stop=stop, places=places: _in_group(places, start, stop),
        )
        chunks = slice(start, stop)
        group = StaticChunkGroup(
            slots, places.token[slots], places.empty[slots], tokens=None, slot=None, begins={},
            ends={}, begin_index=None, end_index=None, chunks=stop - start,
            sequence=places.sequence[chunks], begin=places.begins[chunks], end=places.ends[chunks],
            first=first, last=last, first_here=first_here, last_here=last_here,
        )  # fmt: skip
        groups.append(group)
    table = ChunkTable(C, documents.sequences, tuple(groups), places.slot)
    documents.plans[key] = table
    return table


def _places(documents: StaticDocuments, C: int, padded: int) -> _Places:
    offsets, indices = documents.chunks(C)
    offset, starts = offsets.long(), documents.cu_seqlens.long()
    missing = padded - len(indices)
    sequence, place = torch.nn.functional.pad(indices.long(), (0, 0, 0, missing)).unbind(1)
    number = torch.arange(padded, device=documents.device)
    real = number < offset[-1]
    sequence = torch.where(real, sequence, documents.sequences - 1)
    token = (starts[sequence] + place * C)[:, None] + torch.arange(C, device=documents.device)
    document_T = documents.document_T()
    return _Places(
        slot=offset[document_T] * C + documents.position_T,
        token=token.clamp(max=documents.total_tokens - 1).flatten(),
        empty=(~real[:, None] | (token >= starts[sequence + 1][:, None])).flatten(),
        sequence=sequence,
        begins=real & (number == offset[sequence]),
        ends=real & (number + 1 == offset[sequence + 1]),
        first=offset[:-1],
        last=offset[1:] - 1,
        filled=offset[1:] > offset[:-1],
    )


def _in_group(places: _Places, start: int, stop: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    def here(chunk: Tensor) -> Tensor:
        return (places.filled & (chunk >= start) & (chunk < stop)).view(-1, 1, 1, 1)

    first, last = (
        (chunk - start).clamp(0, stop - start - 1) for chunk in (places.first, places.last)
    )
    return first, last, here(places.first), here(places.last)


class StaticChunks(Chunks):
    """The chunks of a :class:`StaticChunkGroup`."""

    group: StaticChunkGroup

    def walk(self, carried: Tensor | None, initial: Tensor, final: Tensor) -> tuple[Tensor, Tensor]:
        group = self.group
        after = self._states(initial)[1:]
        torch.bmm(self._written_k.mT, self.U, out=after.flatten(0, 1))
        through = self._per_chunk(self.M)
        before = initial.index_select(0, group.sequence)  # read where a sequence begins
        S = torch.zeros_like(initial[0]) if carried is None else carried
        for c in range(group.chunks):
            S = before[c].copy_(torch.where(group.begin[c], before[c], S))
            S = after[c].baddbmm_(through[c], S)
        final.copy_(torch.where(group.last_here, after.index_select(0, group.last), final))
        del self._written_k, self.v  # nobody needs them from here on
        return before.flatten(0, 1), S

    def walk_back(
        self, do: Tensor, carried: Tensor | None, d_final: Tensor, d_initial: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        group = self.group
        d_written = torch.bmm(self.P.mT, do)
        before = self._states(d_final)[:-1]
        flat = before.flatten(0, 1)
        torch.bmm(self._in[:, 0].mT, do, out=flat)
        flat.baddbmm_(self.W.mT, d_written * self.beta[..., None])
        through = self._per_chunk(self.M).mT
        after = d_final.index_select(0, group.sequence)
        dS = torch.zeros_like(d_final[0]) if carried is None else carried
        for c in reversed(range(group.chunks)):
            dS = after[c].copy_(torch.where(group.end[c], after[c], dS))
            dS = before[c].baddbmm_(through[c], dS)
        begun = before.index_select(0, group.first)
        d_initial.copy_(torch.where(group.first_here, begun, d_initial))
        return after.flatten(0, 1), d_written, dS


class ChunkedRule(NamedTuple):
    """The rule over sequences of known lengths, as two plain calls without autograd.

    A token that is not finite (NaN or inf in k, v, g, beta) makes the outputs of its head NaN from
    itself on; those before keep their bits. A log-decay may be -inf. Finite numbers whose products
    overflow inside a chunk may change its earlier outputs, and all gradients of the sequence.
    """

    lengths: tuple[int, ...] | StaticDocuments
    chunk_size: int
    scale: float  # factor on the output
    aligned: bool = False  # the forward's groups have one size on a CPU too, see ..aligned
    # Of an ordinary group, and in fixed buffers.
    kinds: tuple[type[Chunks], type[StaticChunks]] = (Chunks, StaticChunks)

    def zero_state(self, k: Tensor, v: Tensor) -> Tensor:
        """``[N, G, R, K, V]`` in the dtype that the rule computes in."""
        (groups, K), lengths = k.shape[2:], self.lengths
        count = lengths.sequences if isinstance(lengths, StaticDocuments) else len(lengths)
        wide = torch.promote_types(v.dtype, torch.float32)
        return v.new_zeros(count, groups, v.shape[2] // groups, K, v.shape[3], dtype=wide)

    def _table(self, v: Tensor, aligned: bool = False) -> ChunkTable:
        if isinstance(self.lengths, StaticDocuments):
            return static_chunk_table(self.lengths, self.chunk_size, v.shape[2])
        return ChunkTable.build(self.lengths, self.chunk_size, v.shape[2], v.device, aligned)

    def chunks(self, table: ChunkTable, group: ChunkGroup, *inputs, set_aside: bool = False):
        kind = self.kinds[isinstance(group, StaticChunkGroup)]
        return kind(table, group, *inputs, scale=self.scale, set_aside=set_aside)

    def forward(
        self, q, k, v, g, beta, state: Tensor, last: bool = True, output: bool = True
    ) -> tuple[Tensor, Tensor]:
        """Output ``[B, T, H, V]`` and final states ``[N, G, R, K, V]``, each if it is asked for."""
        table = self._table(v, self.aligned and output)
        walks = last or not table.are_chunks
        rows = table.rows_like(v) if output else v
        final, carried = _copy(state) if walks else state, None
        ends = state.flatten(1, 2), final.flatten(1, 2)
        with full_fp32_matmul(v.device.type):
            for group in table.groups:
                x = self.chunks(table, group, q, k, v, g, beta, set_aside=output)
                S, carried = x.walk(carried, *ends) if walks else (x.entering(ends[0]), None)
                if output:
                    table.put(rows, group, x.output(S))
        return table.to_tokens(rows, v) if output else rows, final

    def state_gradient(self, do, d_final, q, k, v, g, beta) -> Tensor:
        """The gradient of the initial states, as :meth:`backward` returns it; reads no state."""
        table = self._table(v)
        d_initial, d_carried = _copy(d_final), None
        d_ends = d_final.flatten(1, 2), d_initial.flatten(1, 2)
        with full_fp32_matmul(v.device.type):
            for group in reversed(table.groups):
                x = self.chunks(table, group, q, k, v, g, beta)
                *_, d_carried = x.walk_back(x.output_gradient(do)[:, 0], d_carried, *d_ends)
        return d_initial

    def backward(self, do, d_final, q, k, v, g, beta, state: Tensor) -> tuple[Tensor, ...]:
        """Gradients of q, k, v, g, beta and the initial states.

        The walk forward keeps some 0.36 MiB per chunk and head of 128 x 128 for the walk back.
        """
        table = self._table(v)
        inputs = (q, k, v, g, beta)
        d_final = d_final.to(state.dtype)
        d_initial, final = _copy(d_final), state.new_empty(state.shape)
        ends = state.flatten(1, 2), final.flatten(1, 2)
        d_ends = d_final.flatten(1, 2), d_initial.flatten(1, 2)
        rows = ChunkGrads(*(table.rows_like(x) for x in inputs))
        kept, carried, d_carried = [], None, None
        with full_fp32_matmul(v.device.type):
            for group in table.groups:
                x = self.chunks(table, group, *inputs)
                S, carried = x.walk(carried, *ends)
                kept.append((x, S))
            while kept:
                x, S = kept.pop()
                do_dv = x.output_gradient(do)
                dS, d_written, d_carried = x.walk_back(do_dv[:, 0], d_carried, *d_ends)
                for to, gradient in zip(rows, x.gradients(do_dv, S, dS, d_written), strict=True):
                    table.put(to, x.group, gradient)
        return *(table.to_tokens(x, like) for x, like in zip(rows, inputs, strict=True)), d_initial


def _copy(state: Tensor) -> Tensor:
    return state.clone(memory_format=torch.contiguous_format)


class _ChunkRule(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, g, beta, state, rule: ChunkedRule):
        ctx.save_for_backward(q, k, v, g, beta, state)
        ctx.rule = rule
        return rule.forward(q, k, v, g, beta, state)

    @staticmethod
    @first_derivative_only
    def backward(ctx, do, dfinal):
        return *ctx.rule.backward(do, dfinal, *ctx.saved_tensors), None


@uncompiled  # Dynamo fails on its guards, and its tables are cached by value
def torch_chunk_gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    chunk_size: int = 64,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    *,
    scale: float | None = None,
    cu_seqlens: Tensor | Sequence[int] | Documents | None = None,
) -> tuple[Tensor, Tensor | None]:
    """The gated delta rule in chunks, in plain torch: deterministic, and runs everywhere.

    Computes in fp32 (fp64 for fp64 input). The backward recomputes, so a call keeps its inputs and
    nothing else. A second derivative is refused.

    Args, returns and errors: as :func:`megatron_gdn.ops.gated_delta_rule`. ``chunk_size``, tokens
    per chunk, changes rounding, speed and memory, not the result.
    """
    documents = check_rule_inputs(query, key, value, g, beta, initial_state, cu_seqlens)
    if chunk_size < 1:
        raise ValueError(f"chunk_size={chunk_size} must be at least 1; 64 is usual.")
    if use_qk_l2norm_in_kernel:
        query, key = l2norm(query), l2norm(key)
    factor = key.shape[-1] ** -0.5 if scale is None else scale
    lengths = (key.shape[1],) * key.shape[0] if documents is None else documents.lengths
    rule = ChunkedRule(lengths, chunk_size, factor)
    state = rule.zero_state(key, value)
    if initial_state is not None:
        state = initial_state.to(state.dtype).reshape(state.shape)
    output, final = _ChunkRule.apply(query, key, value, g, beta, state, rule)
    return output, final.flatten(1, 2) if output_final_state else None
