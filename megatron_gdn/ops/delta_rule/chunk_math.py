"""The chunk form of the gated delta rule on a group of chunks.

With G the running sum of g in a chunk, Gamma_ij = exp(G_i - G_j) for i >= j, B = diag(beta) and S
the state before the chunk:

    (I + A B) x  = v - exp(G) k S                A_ij = (k_i . k_j) Gamma_ij,  j < i
    o            = exp(G) q S + P B x            P_ij = (q_i . k_j) Gamma_ij,  j <= i
    S_next       = exp(G_C) S + (exp(G_C - G) k)^T B x

(Yang et al. 2024, sections 3.2-3.3; q carries the scale.) x is each token's correction: its v minus
the value that the state returns for its k. B x is written to the state. x is affine in S, and so is
the state after the chunk:

    x            = U + W S      U = (I + A B)^-1 v,          W = -(I + A B)^-1 exp(G) k
    S_next       = M S + Z      Z = (exp(G_C - G) B k)^T U,  M = exp(G_C) I + (exp(G_C - G) B k)^T W

All but S is computed for many chunks at once; the walk from state to state is one product per
chunk. Q and K are stacked, Q first, so that shared products take one launch.

Legend: n chunks of the group, G key heads, R value heads per key head, m = n * G, b = m * R,
C tokens of a chunk, K key dim, V value dim, N sequences.
"""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from ..elementwise import least_log_decay
from ..host_tables import cached_by_stream
from ..rules.chunk_table import ChunkGroup, ChunkTable
from .triangular import unit_lower_inverse


class ChunkGrads(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor


@cached_by_stream(32)
def upto(C: int, diagonal: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """``[C, C]``: ones where the column is at least ``diagonal`` past the row, else zeros."""
    with torch.inference_mode(False):
        return torch.ones(C, C, dtype=dtype, device=device).triu(diagonal)


def summed(x: Tensor, diagonal: int) -> Tensor:
    """``x @ upto(C, diagonal)``: torch's own running sum promises no order of additions on a GPU.

    As a batched product: in Megatron's batch-invariant mode ``torch.mm`` is TF32, and has no fp64.
    """
    C = x.shape[-1]
    table = upto(C, diagonal, x.dtype, x.device)
    return torch.bmm(x.view(1, -1, C), table[None]).view(x.shape)


class Chunks:
    """The chunks of one group. Tensors that do not need the state are made on first use."""

    def __init__(
        self,
        table: ChunkTable,
        group: ChunkGroup,
        q,
        k,
        v,
        g,
        beta,
        scale: float,
        set_aside: bool = False,
    ) -> None:
        wide = torch.promote_types(v.dtype, torch.float32)
        G, C = k.shape[2], table.chunk_size
        self.table, self.group, self.scale = table, group, scale
        self.key_heads, self.heads = (G,), (G, v.shape[2] // G)
        n = (group.slots.stop - group.slots.start) // C
        self.q_k = v.new_empty(n * G, 2, C, k.shape[3], dtype=wide)
        both = self.q_k.view(n, G, *self.q_k.shape[1:])
        table.to_chunks(q, group, self.key_heads, wide, out=both[:, :, 0])
        table.to_chunks(k, group, self.key_heads, wide, out=both[:, :, 1])
        self.q, self.k = self.q_k.unbind(1)
        self.q.mul_(scale)
        self.v = self._of_value_heads(v, wide)
        self.beta = self._of_value_heads(beta, wide)
        # G is summed and subtracted in fp64: after a strong decay G is in the thousands, and a
        # difference of two such fp32 numbers lacks the digits that exp() magnifies.
        g = self._of_value_heads(g, torch.float64)
        g.clamp_(min=least_log_decay(wide))  # -inf - -inf would be NaN
        self._reached = self._set_aside(g) if set_aside else None
        self._G = self._sums(g)
        self.decay_in = self._G.exp().to(wide)  # [b, C], from the chunk's start to token i
        self.decay_out = (self._G[:, -1:] - self._G).exp_().to(wide)  # from token i to its end
        if self._reached is not None:  # NaN in what is written makes the state after the chunk NaN
            reached = _per_gate(self._reached[:, -1:], g)
            self.decay_out.masked_fill_(reached, float("nan"))

    def _sums(self, g: Tensor) -> Tensor:
        """G, the running sum of g ``[b, C]`` within a chunk."""
        return summed(g, 0)

    def _set_aside(self, g: Tensor) -> Tensor:
        """Zero the tokens whose k, v, g or beta is not finite; ``[b, C]``: the tokens they reach.

        In products with triangular matrices an earlier token takes 0 times a later one's values,
        and 0 * NaN is NaN. NaN is then written where the recurrence has it. (A q that is not finite
        reaches its own output only.)
        """
        largest = [_largest(x) for x in (self.k, self.v)]
        bad_k = largest[0].mul_(0) != 0  # NaN and inf times 0 are NaN
        of_gates = g if g.dim() == 2 else g.sum(-1)
        bad = largest[1].add_(self.beta).sub_(of_gates).mul_(0) != 0
        self._per_key_head(bad).logical_or_(bad_k[:, None])
        self.k.masked_fill_(bad_k[..., None], 0)
        self.v.masked_fill_(bad[..., None], 0)
        self.beta.masked_fill_(bad, 0)
        g.masked_fill_(_per_gate(bad, g), 0)
        return bad.cumsum(-1) > 0

    def _of_value_heads(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """``[B, T, H, ...]`` -> ``[b, C, ...]``."""
        return self.table.to_chunks(x, self.group, self.heads, dtype).flatten(0, 2)

    def _per_key_head(self, x: Tensor) -> Tensor:
        """``[b, ...]`` -> ``[m, R, ...]``, a view."""
        return x.view(-1, self.heads[1], *x.shape[1:])

    @cached_property
    def gamma(self) -> Tensor:
        """exp(G_i - G_j) on and below the diagonal, else 0: ``[b, C, C]``."""
        G = self._G
        C = G.shape[-1]
        pairs = self.beta.new_empty(*G.shape, C)
        torch.sub(G[:, :, None], G[:, None, :], out=pairs)  # in fp64, rounded as it is stored
        # Masked before exp: above the diagonal the exponent is positive and may overflow. And not
        # by -inf, for which exp() takes ten times as long on a CPU.
        return pairs.tril_().exp_().tril_()

    @cached_property
    def qk_kk(self) -> Tensor:
        """q_i . k_j and k_i . k_j: ``[m, 2, C, C]``."""
        return torch.bmm(self.q_k.flatten(1, 2), self.k.mT).view(*self.q_k.shape[:3], -1)

    @cached_property
    def _P_A(self) -> Tensor:
        P_A = self.qk_kk[:, None] * self._per_key_head(self.gamma)[:, :, None]
        return _without_diagonal_of_second(P_A.flatten(0, 1))

    @property
    def P(self) -> Tensor:
        return self._P_A[:, 0]

    @property
    def A(self) -> Tensor:
        return self._P_A[:, 1]

    @cached_property
    def inverse(self) -> Tensor:
        """(I + A B)^-1."""
        return unit_lower_inverse(self.A * self.beta[:, None, :])

    @cached_property
    def _in(self) -> Tensor:
        """exp(G) q and exp(G) k: ``[b, 2, C, K]``."""
        decay = self._per_key_head(self.decay_in)[:, :, None, :, None]
        return (self.q_k[:, None] * decay).flatten(0, 1)

    def _decayed_k(self, decay: Tensor) -> Tensor:
        return (self.k[:, None] * self._per_key_head(decay)[..., None]).flatten(0, 1)

    @cached_property
    def U(self) -> Tensor:
        return torch.bmm(self.inverse, self.v)

    @cached_property
    def W(self) -> Tensor:
        k_in = self._in[:, 1]
        W = torch.empty(k_in.shape, dtype=k_in.dtype, device=k_in.device)
        return W.baddbmm_(self.inverse, k_in, beta=0, alpha=-1)

    @cached_property
    def _written_k(self) -> Tensor:
        return self._decayed_k(self.decay_out * self.beta)

    @cached_property
    def M(self) -> Tensor:
        M = torch.bmm(self._written_k.mT, self.W)
        M.diagonal(dim1=-2, dim2=-1).add_(self.decay_in[:, -1].view(len(M), -1))
        return M

    def _per_chunk(self, x: Tensor) -> Tensor:
        """``[b, ...]`` -> ``[n, G * R, ...]``."""
        return x.view(-1, self.heads[0] * self.heads[1], *x.shape[1:])

    def walk(self, carried: Tensor | None, initial: Tensor, final: Tensor) -> tuple[Tensor, Tensor]:
        """Run the states through the group.

        Args:
            carried: ``[G * R, K, V]``, the state that the chunks before left; None at the start.
            initial, final: ``[N, G * R, K, V]``, read where a sequence begins, written at its end.

        Returns:
            The state before every chunk ``[b, K, V]``, and the one after the last.
        """
        states = self._states(initial)
        torch.bmm(self._written_k.mT, self.U, out=states[1:].flatten(0, 1))
        if carried is not None:
            states[0].copy_(carried)
        # The row after a sequence's last chunk holds the initial state of the next, so final states
        # have a buffer of their own. (In ``final`` a sequence's place would decide the alignment,
        # and on a CPU that decides bits.)
        ended = None
        if self.group.end_index is not None:
            ended = states[1:].index_select(0, self.group.end_index[0])
        if self.group.begin_index is not None:
            first, sequences = self.group.begin_index
            states.index_copy_(0, first, initial.index_select(0, sequences))
        through, at = self._per_chunk(self.M).unbind(0), states.unbind(0)
        ends = {c: place for place, c in enumerate(self.group.ends)}
        for c in range(self.group.chunks):
            after = ended[ends[c]] if ended is not None and c in ends else at[c + 1]
            after.baddbmm_(through[c], at[c])
        if ended is not None and self.group.end_index is not None:
            final.index_copy_(0, self.group.end_index[1], ended)
        del self._written_k, self.v  # nobody needs them from here on
        return states[:-1].flatten(0, 1), at[self.group.chunks]

    def entering(self, initial: Tensor) -> Tensor:
        """The state before every chunk ``[b, K, V]`` where each begins a sequence."""
        states = initial.new_zeros(len(self.beta) // initial.shape[1], *initial.shape[1:])
        assert self.group.begin_index is not None
        first, sequences = self.group.begin_index
        states.index_copy_(0, first, initial.index_select(0, sequences))
        return states.flatten(0, 1)

    def _states(self, like: Tensor) -> Tensor:
        """Room for the states before and after every chunk, ``[n + 1, G * R, K, V]``."""
        return like.new_empty(len(self.beta) // like.shape[1] + 1, *like.shape[1:])

    def correction(self, S: Tensor) -> Tensor:
        """x, written over U; to be called once."""
        return self.U.baddbmm_(self.W, S)

    def output(self, S: Tensor) -> Tensor:
        written = self.correction(S).mul_(self.beta[..., None])
        o = torch.bmm(self._in[:, 0], S).baddbmm_(self.P, written)
        return (
            o if self._reached is None else o.masked_fill_(self._reached[..., None], float("nan"))
        )

    def output_gradient(self, do: Tensor) -> Tensor:
        """``[b, 2, C, V]``: do, and room for dv beside it."""
        b, C = self.beta.shape
        both = self.beta.new_empty(b, 2, C, do.shape[-1])
        to = both.view(-1, *self.heads, *both.shape[1:])[:, :, :, 0]
        self.table.to_chunks(do, self.group, self.heads, both.dtype, out=to)
        return both

    def walk_back(
        self, do: Tensor, carried: Tensor | None, d_final: Tensor, d_initial: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The reverse of :meth:`walk`, with ``do [b, C, V]`` and the gradients of its states.

        Returns:
            Three gradients: of the state after every chunk ``[b, K, V]``; of B x through the
            output of its own chunk ``[b, C, V]``; of the state before the group.
        """
        d_written = torch.bmm(self.P.mT, do)
        states = self._states(d_final)
        before = states[:-1].flatten(0, 1)
        torch.bmm(self._in[:, 0].mT, do, out=before)
        before.baddbmm_(self.W.mT, d_written * self.beta[..., None])
        # If it is None, the last chunk ends a sequence, or is empty and its gradients are not used.
        if carried is not None:
            states[-1].copy_(carried)
        through = self._per_chunk(self.M).mT.unbind(0)
        if self.group.begin_index is not None:
            first, sequences = self.group.begin_index
            d_initial.index_copy_(0, sequences, states.index_select(0, first))
        if self.group.end_index is not None:
            last, sequences = self.group.end_index
            states[1:].index_copy_(0, last, d_final.index_select(0, sequences))
        at, begins = states.unbind(0), self.group.begins
        for c in reversed(range(self.group.chunks)):
            before = d_initial[begins[c]] if c in begins else at[c]
            before.baddbmm_(through[c], at[c + 1])
        return states[1:].flatten(0, 1), d_written, at[0]

    def _of_tokens(
        self, do_dv: Tensor, S: Tensor, dS: Tensor, d_written: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Gradients of v and beta; B x; the products of do and dv with it, ``[b, 2, C, C]``."""
        beta, C = self.beta[..., None], self.beta.shape[-1]
        x = self.correction(S)
        written = x * beta
        d_written.baddbmm_(self._decayed_k(self.decay_out), dS)
        dv = do_dv[:, 1].baddbmm_(self.inverse.mT, d_written * beta, beta=0)
        # The gradient of (B x)_i, minus the share that comes through the tokens after i.
        dbeta = d_written.baddbmm_(self.A.mT, dv, alpha=-1).mul_(x).sum(-1)
        pairs = torch.bmm(do_dv.flatten(1, 2), written.mT).view(-1, 2, C, C)
        return dv, dbeta, written, pairs

    def gradients(self, do_dv: Tensor, S: Tensor, dS: Tensor, d_written: Tensor) -> ChunkGrads:
        """From do and room for dv, the states before every chunk and what walk_back returns."""
        dv, dbeta, written, pairs = self._of_tokens(do_dv, S, dS, d_written)
        pairs = _without_diagonal_of_second(pairs.mul_(self.gamma[:, None]))
        pairs = self._per_key_head(pairs)
        qk, kk = self.qk_kk[:, None].unbind(2)
        crossing = (pairs[:, :, 0] * qk).addcmul_(pairs[:, :, 1], kk, value=-1)

        decay_in = self._per_key_head(torch.stack([self.decay_in, -self.decay_in], 1))
        decay_out = self._per_key_head(self.decay_out)
        read = torch.bmm(do_dv.flatten(1, 2), S.mT).view(-1, *decay_in.shape[1:], S.shape[-2])
        kept = self._per_key_head(torch.bmm(written, dS.mT))
        dg = _dg(
            crossing=crossing.flatten(0, 1),
            read=((read * self.q_k[:, None]).sum(-1) * decay_in).sum(2).flatten(0, 1),
            written=((kept * self.k[:, None]).sum(-1) * decay_out).flatten(0, 1),
            through=(S * dS).sum((-1, -2)) * self.decay_in[:, -1],
        )
        read.mul_(decay_in[..., None])[:, :, 1].addcmul_(kept, decay_out[..., None])
        # The value heads of a key head are summed before the products, not after them.
        (dq, dk), (dqk, minus_dkk) = read.sum(1).unbind(1), pairs.sum(1).unbind(1)
        dq.baddbmm_(dqk, self.k).mul_(self.scale)
        dk.baddbmm_(minus_dkk + minus_dkk.mT, self.k, alpha=-1).baddbmm_(dqk.mT, self.q)
        return ChunkGrads(dq, dk, dv, dg, dbeta)


def _largest(x: Tensor) -> Tensor:
    """The largest absolute value of every row, or NaN. A norm takes 25 times as long on a CPU."""
    if x.is_cuda:
        return torch.linalg.vector_norm(x, float("inf"), dim=-1)
    return x.abs().amax(-1)


def _per_gate(tokens: Tensor, g: Tensor) -> Tensor:
    """A mask of tokens in a shape that masks their gates, one or several per token."""
    return tokens.view(*tokens.shape, *(1,) * (g.dim() - tokens.dim()))


def _without_diagonal_of_second(pairs: Tensor) -> Tensor:
    """``[b, 2, C, C]``: no token corrects itself."""
    pairs[:, 1].diagonal(dim1=-2, dim2=-1).zero_()
    return pairs


def _dg(crossing: Tensor, read: Tensor, written: Tensor, through: Tensor) -> Tensor:
    """Gradient of g_t: the sum over interactions of a writer before t and a reader at t or later.

    Differences of larger sums would lose accuracy under strong decay.

    Args:
        crossing: ``[b, C, C]``, reader i against writer j < i.
        read, written: ``[b, C]``, a token and the state before the chunk, or after it.
        through: ``[b]``, the state before the chunk against the state after it.
    """
    C = crossing.shape[-1]
    to_later = upto(C, 0, crossing.dtype, crossing.device)
    earlier = upto(C, 1, crossing.dtype, crossing.device)
    # Column t of the product: what reader i gets from the writers j < t. Then the readers i >= t.
    crossed = summed(crossing, 1).tril_().sum(-2)
    return crossed.addmm_(read, to_later.mT).addmm_(written, earlier).add_(through[:, None])
