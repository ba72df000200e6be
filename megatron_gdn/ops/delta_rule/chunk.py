"""The chunk form of the gated delta rule in plain torch, forward and backward.

Inside a chunk everything is a matrix product; only the state at chunk boundaries is computed one
chunk after the other (:mod:`.chunk_math` has the equations). The backward, in closed form, computes
the forward again, so no tensor of size T * C outlives either pass. Every reduction has a fixed
order, so results repeat bit for bit.

Legend: N sequences, n chunks, T tokens, G key heads, R value heads per key head, H = G * R, K key
dim, V value dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..autograd import first_derivative_only, uncompiled
from ..documents import Documents
from ..elementwise import l2norm
from ..fp32_matmul import full_fp32_matmul
from ..rules.chunk_table import ChunkGroup, ChunkTable
from ..static_documents import StaticDocuments
from .base import check_rule_inputs
from .chunk_math import ChunkGrads, Chunks
from .static_chunks import StaticChunkGroup, StaticChunks, static_chunk_table


class ChunkedRule(NamedTuple):
    """The rule over sequences of known lengths, as two plain calls without autograd.

    A token that is not finite (NaN or inf in k, v, g, beta) makes the outputs of its head NaN from
    itself on; those before keep their bits. A log-decay may be -inf. Finite numbers whose products
    overflow inside a chunk may change its earlier outputs, and all gradients of the sequence.

    Attributes:
        lengths: of sequences; or documents in fixed buffers, where empty ones keep their states.
        scale: factor on the output.
        aligned: the forward computes groups of one size on a CPU too, see :mod:`..aligned`.
        kinds: the chunks of an ordinary group, and those in fixed buffers.
    """

    lengths: tuple[int, ...] | StaticDocuments
    chunk_size: int
    scale: float
    aligned: bool = False
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
        return kind(table, group, *inputs, self.scale, set_aside)

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
