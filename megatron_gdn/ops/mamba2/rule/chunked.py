"""The chunk form of the SSD recurrence in plain torch, one group of chunks at a time.

With s_t the sum of g from the first token of a chunk to t, S the state that enters the chunk:

    o_t   = sum_{u <= t} exp(s_t - s_u) (C_t . B_u) dt_u x_u  +  exp(s_t) S^T C_t  +  D x_t
    S_out = exp(s_last) S  +  sum_u exp(s_last - s_u) B_u (dt_u x_u)^T

Inside a chunk everything is a matrix product; the states at chunk boundaries follow one another.
Every exponent is <= 0, so nothing overflows; those of u > t are masked before exp().

Legend: n chunks, T tokens of a chunk, G groups, R heads per group, H = G R, K state dim, V head
dim, N sequences.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...rules.chunk_table import ChunkGroup, ChunkTable
from .base import SSDInputs, wide_dtype


class GroupInputs(NamedTuple):
    """The inputs of one group of chunks, in fp32 (fp64 for fp64)."""

    x: Tensor  # [n, G, R, T, V]
    B: Tensor  # [n, G, T, K]
    C: Tensor  # [n, G, T, K]
    dt: Tensor  # [n, G, R, T]
    g: Tensor  # [n, G, R, T]
    D: Tensor  # [n, G, R, T, 1 or V]


class Ends(NamedTuple):
    """States at the ends of a group of chunks."""

    carried: Tensor  # [G, R, K, V], after the last chunk
    final: Tensor  # [e, G, R, K, V], of the e sequences that end in the group


def group_inputs(table: ChunkTable, group: ChunkGroup, inputs: SSDInputs) -> GroupInputs:
    """Tokens to chunks; empty slots are zero: they write nothing and do not decay."""
    G, heads = inputs.B.shape[2], inputs.x.shape[2]
    grouped, wide = (G, heads // G), wide_dtype(inputs.x)

    def chunks(rows: Tensor, kinds: tuple[int, ...]) -> Tensor:
        return table.to_chunks(rows, group, kinds, wide)

    return GroupInputs(
        chunks(inputs.x, grouped), chunks(inputs.B, (G,)), chunks(inputs.C, (G,)),
        chunks(inputs.dt, grouped), chunks(inputs.g, grouped), chunks(inputs.D, grouped),
    )  # fmt: skip


def written(x: GroupInputs, sums: Tensor) -> Tensor:
    """``[n, G, R, K, V]``: what each chunk adds to the state that leaves it."""
    weight = (sums[..., -1:] - sums).exp() * x.dt
    return x.B.mT[:, :, None] @ (weight[..., None] * x.x)


def walk(
    group: ChunkGroup, decay: Tensor, local: Tensor, carried: Tensor, initial: Tensor
) -> tuple[list[Tensor], Ends]:
    """The states that enter the chunks, chunk after chunk.

    Args:
        decay: ``[n, G, R, 1, 1]``.
        local: from :func:`written`.
        carried: the state that the group before left.
        initial: ``[b, G, R, K, V]``, of the b sequences that begin in the group.
    """
    state, entering, final = carried, [], []
    begins = {chunk: place for place, chunk in enumerate(group.begins)}
    for chunk in range(group.chunks):
        if chunk in begins:
            state = initial[begins[chunk]]
        entering.append(state)
        state = decay[chunk] * state + local[chunk]
        if chunk in group.ends:
            final.append(state)
    return entering, Ends(state, torch.stack(final) if final else initial[:0])


def walk_back(
    group: ChunkGroup, decay: Tensor, d_entering: Tensor, d_carried: Tensor, d_final: Tensor
) -> Ends:
    """The transpose of :func:`walk`: gradients of ``carried`` and ``initial``.

    Args:
        d_entering: ``[n, G, R, K, V]``, of the states that enter the chunks.
        d_carried: of the state that the group leaves.
        d_final: ``[e, G, R, K, V]``.
    """
    ends = {chunk: place for place, chunk in enumerate(group.ends)}
    d_initial: list[Tensor] = []
    for chunk in reversed(range(group.chunks)):
        if chunk in ends:
            d_carried = d_final[ends[chunk]]
        d_carried = decay[chunk] * d_carried + d_entering[chunk]
        if chunk in group.begins:
            d_initial.insert(0, d_carried)
            d_carried = torch.zeros_like(d_carried)
    return Ends(d_carried, torch.stack(d_initial) if d_initial else d_final[:0])


def states_of_group(group: ChunkGroup, x: GroupInputs, carried: Tensor, initial: Tensor) -> Ends:
    """The states alone, without an output."""
    sums = x.g.cumsum(-1)
    _, ends = walk(group, sums[..., -1:, None].exp(), written(x, sums), carried, initial)
    return ends


def state_gradients_of_group(
    group: ChunkGroup, x: GroupInputs, d_o: Tensor, d_carried: Tensor, d_final: Tensor
) -> Ends:
    """The gradients of the states that enter, which depend on no state.

    Args:
        d_o: ``[n, G, R, T, V]``.
    """
    sums = x.g.cumsum(-1)
    d_entering = x.C.mT[:, :, None] @ (sums.exp()[..., None] * d_o)
    return walk_back(group, sums[..., -1:, None].exp(), d_entering, d_carried, d_final)


def run_group(
    group: ChunkGroup, x: GroupInputs, carried: Tensor, initial: Tensor
) -> tuple[Tensor, Ends]:
    """Output ``[n, G, R, T, V]`` and states of one group of chunks; differentiable."""
    sums = x.g.cumsum(-1)
    entering, ends = walk(group, sums[..., -1:, None].exp(), written(x, sums), carried, initial)
    return output_of_group(x, sums, entering), ends


def output_of_group(x: GroupInputs, sums: Tensor, entering: list[Tensor]) -> Tensor:
    """``[n, G, R, T, V]``.

    Args:
        sums: of g, within each chunk.
        entering: the states that enter the chunks; none for the empty chunks at the end.
    """
    empty = [torch.zeros_like(entering[0])] * (x.x.shape[0] - len(entering))
    # Masked before exp(), by 0: for -inf it takes ten times as long on a CPU. A token's decay to
    # itself is exp(0) and has no gradient. As a difference of sums it would add the largest terms
    # of the gradient of g twice, with opposite signs.
    decay = (sums[..., :, None] - sums[..., None, :]).tril(-1).exp().tril()
    scores = (x.C @ x.B.mT)[:, :, None] * decay
    inside = scores @ (x.dt[..., None] * x.x)
    before = (sums.exp()[..., None] * x.C[:, :, None]) @ torch.stack([*entering, *empty])
    return inside + before + x.D * x.x
