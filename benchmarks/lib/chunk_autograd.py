"""The chunk rule of two keys and a written value, differentiated by autograd group by group.

With a log-decay per head or per channel:

    S_t = D_t S_{t-1} + k_t (u_t - e_t^T D_t S_{t-1})        D_t = exp(g_t)        o_t = S_t^T q_t

Gated DeltaNet and Kimi Delta Attention are e = beta k, u = beta v; Gated DeltaNet-2 is e = b k,
u = w v. In a chunk, with y_t the value that is written, and S the state before the chunk:

    (I + A) y = u - e_in S      A_ij = e_i . exp(G_i - G_j) k_j, j < i      e_in = exp(G) e
    o         = q_in S + P y    P_ij = q_i . exp(G_i - G_j) k_j, j <= i     q_in = exp(G) q
    S_next    = exp(G_C) S + k_out^T y                                      k_out = exp(G_C - G) k

Three small functions have a backward of their own: the decays of a head (no sum is a difference of
larger ones), the solve, and the walk from state to state. The rest is autograd's.

Legend: N sequences, n chunks, T tokens, G key heads, R value heads per key head, H = G R, m = n G,
b = m R, C tokens of a chunk, K key dim, V value dim.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_gdn.ops.delta_rule.chunk_math import _dg, summed, upto
from megatron_gdn.ops.delta_rule.triangular import unit_lower_inverse
from megatron_gdn.ops.elementwise import least_log_decay
from megatron_gdn.ops.rules.chunk_table import ChunkGroup, ChunkTable
from megatron_gdn.ops.switches import full_fp32_matmul


class RuleValues(NamedTuple):
    """The rule's arguments. q, k and e may have fewer heads; u, strength and g have all."""

    q: Tensor  # [m, C, K]
    k: Tensor  # [m, C, K]
    e: Tensor  # [m, C, K]
    strength: Tensor | None  # [b, C], a factor on e for each value head
    u: Tensor  # [b, C, V]
    g: Tensor  # [b, C] or [b, C, K]


def of_beta(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> RuleValues:
    """Gated DeltaNet's, and Kimi Delta Attention's."""
    return RuleValues(q, k, k, beta, beta[..., None] * v, g)


class _Decayed(torch.autograd.Function):
    """Two pairings ``[m, C, C]`` of readers and writers, decayed between them; lower triangles.

    Also exp of the sums of g ``[b, C]`` from the chunk's start and to its end.
    """

    @staticmethod
    def forward(ctx, qk: Tensor, ek: Tensor, g: Tensor) -> tuple[Tensor, ...]:
        # Summed and subtracted in fp64: a difference of two large fp32 sums lacks digits.
        G, C = summed(g.double().clamp_(min=least_log_decay(g.dtype)), 0), g.shape[1]
        gamma = g.new_empty(*G.shape, C)
        torch.sub(G[:, :, None], G[:, None, :], out=gamma)
        gamma.tril_().exp_().tril_()  # masked by 0 before exp()
        start, end = G.exp().to(g.dtype), (G[:, -1:] - G).exp_().to(g.dtype)
        of_key = gamma.view(len(qk), -1, C, C)
        P, A = ((x[:, None] * of_key).flatten(0, 1) for x in (qk, ek))
        ctx.save_for_backward(gamma, start, end, P, A)
        ctx.of_key = of_key.shape
        return P, A, start, end

    @staticmethod
    def backward(ctx, dP, dA, d_start, d_end):
        gamma, start, end, P, A = ctx.saved_tensors
        # No sum is a difference of larger ones. The walk's decay is the last of `start`.
        crossing = (dP * P).addcmul_(dA, A)
        dg = _dg(crossing, d_start * start, d_end * end, start.new_zeros(len(start)))
        d_qk, d_ek = ((x * gamma).view(ctx.of_key).sum(1) for x in (dP, dA))
        return d_qk, d_ek, dg


class _Solve(torch.autograd.Function):
    """``(I + A)^-1 x`` of two x; of ``A [b, C, C]`` what is below the diagonal."""

    @staticmethod
    def forward(ctx, A: Tensor, u: Tensor, e: Tensor) -> tuple[Tensor, Tensor]:
        inverse = unit_lower_inverse(A)
        U, W = torch.bmm(inverse, u), torch.bmm(inverse, e)
        ctx.save_for_backward(inverse, U, W)
        return U, W

    @staticmethod
    def backward(ctx, dU, dW):
        inverse, U, W = ctx.saved_tensors
        du, de = torch.bmm(inverse.mT, dU), torch.bmm(inverse.mT, dW)
        dA = torch.bmm(du, U.mT).neg_().baddbmm_(de, W.mT, alpha=-1)
        dA.diagonal(dim1=-2, dim2=-1).zero_()  # and above it what A was made of is zero
        return dA, du, de


class _Walk(torch.autograd.Function):
    """From state to state: those before every chunk, what is written, and those at the ends."""

    @staticmethod
    def forward(ctx, decay, k_out, U, W, carried, initial, group: ChunkGroup):
        H, (K, V) = carried.shape[0], carried.shape[1:]
        M = torch.bmm(k_out.mT, W).neg_()
        M.diagonal(dim1=-2, dim2=-1).add_(decay.view(len(M), -1))
        states = carried.new_empty(len(M) // H + 1, H, K, V)
        torch.bmm(k_out.mT, U, out=states[1:].flatten(0, 1))
        states[0].copy_(carried)
        final = states[:0]
        if group.end_index is not None:
            final = states[1:].index_select(0, group.end_index[0])
        if group.begin_index is not None:
            states.index_copy_(0, group.begin_index[0], initial)
        through, at = M.view(-1, H, K, K).unbind(0), states.unbind(0)
        ends = {c: place for place, c in enumerate(group.ends)}
        for c in range(group.chunks):
            (final[ends[c]] if c in ends else at[c + 1]).baddbmm_(through[c], at[c])
        S = states[:-1].flatten(0, 1)
        y = torch.baddbmm(U, W, S, alpha=-1)
        ctx.save_for_backward(k_out, W, M, S, y, decay)
        ctx.group = group
        return S, y, at[group.chunks].clone(), final

    @staticmethod
    def backward(ctx, dS, dy, d_carried, d_final):
        k_out, W, M, S, y, decay = ctx.saved_tensors
        group: ChunkGroup = ctx.group
        H, (K, V) = d_carried.shape[0], d_carried.shape[1:]
        states = S.new_empty(len(M) // H + 1, H, K, V)
        before = states[:-1].flatten(0, 1)
        torch.baddbmm(dS, W.mT, dy, alpha=-1, out=before)
        states[group.chunks].copy_(d_carried)
        d_initial = S.new_empty(0 if group.begin_index is None else len(group.begins), H, K, V)
        if group.begin_index is not None:
            torch.index_select(states, 0, group.begin_index[0], out=d_initial)
        if group.end_index is not None:
            states.index_copy_(0, group.end_index[0] + 1, d_final)
        begins = {c: place for place, c in enumerate(group.begins)}
        through, at = M.view(-1, H, K, K).mT.unbind(0), states.unbind(0)
        for c in reversed(range(group.chunks)):
            (d_initial[begins[c]] if c in begins else at[c]).baddbmm_(through[c], at[c + 1])
        after = states[1:].flatten(0, 1)
        dy = torch.baddbmm(dy, k_out, after)
        d_decay = (S * after).sum(-1)
        return (
            d_decay.sum(-1, keepdim=True) if decay.shape[-1] == 1 else d_decay,
            torch.bmm(y, after.mT), dy, torch.bmm(dy, S.mT).neg_(),
            torch.zeros_like(at[0]) if 0 in begins else at[0], d_initial, None,
        )  # fmt: skip


def _per_head(x: RuleValues, R: int) -> tuple[Tensor, ...]:
    """P, A, q_in, e_in, k_out and the decay of a chunk, of a decay per head."""
    C = x.k.shape[1]
    qk, ek = (torch.bmm(t, x.k.mT) for t in (x.q, x.e))
    P, A, start, end = _Decayed.apply(qk, ek, x.g)
    e_start = start
    if x.strength is not None:
        A, e_start = A * x.strength[..., None], start * x.strength
    q_in, e_in, k_out = (
        (t[:, None] * decay.view(-1, R, C, 1)).flatten(0, 1)
        for t, decay in ((x.q, start), (x.e, e_start), (x.k, end))
    )
    return P, A, q_in, e_in, k_out, start[:, -1:]


def _per_channel(x: RuleValues, R: int) -> tuple[Tensor, ...]:
    """The same of a decay per channel, see ``megatron_gdn.kda.rule``: halves of halves."""
    q, k, e = (t.repeat_interleave(R, 0) for t in (x.q, x.k, x.e))
    if x.strength is not None:
        e = e * x.strength[..., None]
    C, g = x.g.shape[1], x.g.clamp(min=least_log_decay(x.g.dtype))
    readers, size = torch.stack([q, e], 1), 1
    # Blocks of 1, 2, 4, .. tokens: [b, blocks, 2, size, size].
    pairs = torch.stack([(q * k).sum(-1), (e * k).sum(-1)], -1)[..., None, None]
    while size < C:
        first, second = g.unflatten(1, (-1, 2, size)).unbind(2)
        since = (upto(size, 0, g.dtype, g.device).mT @ second).exp()
        until = (upto(size, 1, g.dtype, g.device) @ first).exp()
        late = readers.unflatten(2, (-1, 2, size))[:, :, :, 1] * since[:, None]
        early = k.unflatten(1, (-1, 2, size))[:, :, 0] * until
        corner = (late @ early[:, None].mT).transpose(1, 2)
        upper, lower = pairs.unflatten(1, (-1, 2)).unbind(2)
        pairs = torch.cat([torch.cat([upper, torch.zeros_like(corner)], -1),
                           torch.cat([corner, lower], -1)], -2)  # fmt: skip
        size *= 2
    P, A = pairs[:, 0].unbind(1)
    start = (upto(C, 0, g.dtype, g.device).mT @ g).exp()
    end = (upto(C, 1, g.dtype, g.device) @ g).exp()
    return P, A, q * start, e * start, k * end, start[:, -1]


def run_group(
    group: ChunkGroup, x: RuleValues, carried: Tensor, initial: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Output ``[b, C, V]``, the state after the group, and those of sequences that end in it."""
    per_head = x.g.dim() == 2
    parts = (_per_head if per_head else _per_channel)(x, len(x.u) // len(x.k))
    P, A, q_in, e_in, k_out, decay = parts
    U, W = _Solve.apply(A, x.u, e_in)
    S, y, carried, final = _Walk.apply(decay, k_out, U, W, carried, initial, group)
    return torch.baddbmm(torch.bmm(q_in, S), P, y), carried, final


class AutogradRule(NamedTuple):
    """As :class:`ChunkedRule`; the forward also returns the state before each group of chunks."""

    lengths: tuple[int, ...]
    chunk_size: int
    scale: float
    values: Callable[..., RuleValues] = of_beta
    keep_graphs: bool = False  # compute the forward once in the backward, and hold all groups

    def _table(self, v: Tensor) -> ChunkTable:
        return ChunkTable.build(self.lengths, self.chunk_size, v.shape[2], v.device)

    def _inputs(self, table: ChunkTable, group: ChunkGroup, inputs) -> list[Tensor]:
        q, k, v, *gates = inputs
        G, H = k.shape[2], v.shape[2]
        wide = torch.promote_types(v.dtype, torch.float32)
        to = partial(table.to_chunks, group=group, dtype=wide)
        return [to(q, heads=(G,)).flatten(0, 1).mul_(self.scale), to(k, heads=(G,)).flatten(0, 1),
                *(to(t, heads=(G, H // G)).flatten(0, 2) for t in (v, *gates))]  # fmt: skip

    def forward(self, *inputs_state) -> tuple[Tensor, Tensor, list[Tensor]]:
        *inputs, state = inputs_state
        v = inputs[2]
        table, final = self._table(v), state.clone()
        rows, carried, starts = table.rows_like(v), state.new_zeros(state.shape[1:]), []
        with torch.no_grad(), full_fp32_matmul(v.device.type):
            for group in table.groups:
                starts.append(carried)
                x = self.values(*self._inputs(table, group, inputs))
                o, carried, ended = run_group(group, x, carried, _take(state, group.begin_index))
                _put(final, group.end_index, ended)
                table.put(rows, group, o)
        return table.to_tokens(rows, v), final, starts

    def backward(self, do, d_final, inputs, state, starts) -> tuple[Tensor, ...]:
        v, table = inputs[2], self._table(inputs[2])
        rows, heads = [table.rows_like(x) for x in inputs], (1, v.shape[2])
        d_initial, d_carried, held = torch.zeros_like(state), torch.zeros_like(state[0]), []

        def graph(group, start):
            leaves = [t.requires_grad_() for t in self._inputs(table, group, inputs)]
            first, start = (
                t.detach().requires_grad_() for t in (_take(state, group.begin_index), start)
            )
            with torch.enable_grad():
                made = run_group(group, self.values(*leaves), start, first)
            return made, leaves, start, first

        with full_fp32_matmul(v.device.type):
            if self.keep_graphs:
                start = starts[0]
                for group in table.groups:
                    held.append(graph(group, start))
                    start = held[-1][0][1].detach()
            for group, start in zip(reversed(table.groups), reversed(starts), strict=True):
                made, leaves, start, first = held.pop() if held else graph(group, start)
                d_o = table.to_chunks(do, group, heads, start.dtype).flatten(0, 2)
                *grads, d_carried, d_first = torch.autograd.grad(
                    made, (*leaves, start, first),
                    (d_o, d_carried, _take(d_final, group.end_index)),
                )  # fmt: skip
                del made, leaves
                grads[0].mul_(self.scale)
                for to, gradient in zip(rows, grads, strict=True):
                    table.put(to, group, gradient)
                _put(d_initial, group.begin_index, d_first)
        found = (table.to_tokens(to, like) for to, like in zip(rows, inputs, strict=True))
        return *found, d_initial


def _take(states: Tensor, index: tuple[Tensor, Tensor] | None) -> Tensor:
    return states[:0] if index is None else states.index_select(0, index[1])


def _put(states: Tensor, index: tuple[Tensor, Tensor] | None, new: Tensor) -> None:
    if index is not None:
        states.index_copy_(0, index[1], new)
