"""The chunk form of the gated delta rule on a group of chunks.

With G the running sum of g in a chunk, Gamma_ij = exp(G_i - G_j) for i >= j, and S the state before
the chunk:

    (I + L) v'   = beta (v - exp(G) k S)          L_ij = beta_i (k_i . k_j) Gamma_ij,  j < i
    o            = exp(G) q S + P v'              P_ij = (q_i . k_j) Gamma_ij,         j <= i
    S_next       = exp(G_C) S + (exp(G_C - G) k)^T v'

(Yang et al. 2024, sections 3.2-3.3; q carries the scale.) v' is what each token really writes. It
is affine in S, and so is the state after the chunk:

    v'           = U - W S      U = (I + L)^-1 beta v,    W = (I + L)^-1 beta exp(G) k
    S_next       = M S + Z      Z = (exp(G_C - G) k)^T U, M = exp(G_C) I - (exp(G_C - G) k)^T W

All but S is computed for many chunks at once; the walk from state to state is one product per
chunk. Its gradient walks back with M^T.

Legend: n chunks of the group, G key heads, R value heads per key head, C tokens of a chunk, K key
dim, V value dim, N sequences. Tensors are [n, G, 1, C, K] (query, key) or [n, G, R, C, ...].
"""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .chunk_table import ChunkGroup, ChunkTable
from .triangular import unit_lower_inverse


class ChunkGrads(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor


def add_product_(target: Tensor, a: Tensor, b: Tensor, times: float = 1) -> Tensor:
    """``target += times * a @ b`` for tensors with equal leading dimensions, in one launch."""
    product = (a.flatten(0, -3), b.flatten(0, -3))
    target.view(-1, *target.shape[-2:]).baddbmm_(*product, alpha=times)
    return target


def running_sum(x: Tensor) -> Tensor:
    """``cumsum(-1)`` over the few tokens of a chunk."""
    if not x.is_cuda:
        return x.cumsum(-1)
    # On a GPU torch's own promises no order of additions.
    return x[..., None, :].expand(*x.shape, x.shape[-1]).tril().sum(-1)


class Chunks:
    """The chunks of one group and everything that does not need the state, made when first asked.

    Args:
        inverse: ``(I + L)^-1``, when known from an earlier pass.
    """

    def __init__(
        self, table: ChunkTable, group: ChunkGroup, q, k, v, g, beta, scale: float,
        inverse: Tensor | None = None,
    ) -> None:  # fmt: skip
        wide = torch.promote_types(v.dtype, torch.float32)
        groups, repeats = k.shape[2], v.shape[2] // k.shape[2]
        heads = (groups, repeats)
        self.group, self.scale = group, scale
        self.k = table.to_chunks(k, group, (groups,), wide)[:, :, None]
        self.q = table.to_chunks(q, group, (groups,), wide)[:, :, None].mul_(scale)
        self.v = table.to_chunks(v, group, heads, wide)
        self.beta = table.to_chunks(beta, group, heads, wide)[..., None]
        # G is summed and subtracted in fp64: after a strong decay G is in the thousands, and the
        # difference of two fp32 numbers of that size has lost the digits that exp() magnifies.
        G = running_sum(table.to_chunks(g, group, heads, torch.float64))
        self.decay_in = G.exp().to(wide)[..., None]  # from the chunk's start to token i
        self.decay_out = (G[..., -1:] - G).exp().to(wide)[..., None]  # from token i to its end
        self.decay_all = G[..., -1:, None].exp().to(wide)
        self._G, self._wide = G, wide
        if inverse is not None:
            self.inverse = inverse

    @cached_property
    def gamma(self) -> Tensor:
        """exp(G_i - G_j) on and below the diagonal, else 0."""
        G = self._G
        above = torch.ones(G.shape[-1], G.shape[-1], dtype=torch.bool, device=G.device).triu(1)
        # Masked before exp: above the diagonal the exponent is positive and may overflow.
        pairs = (G[..., :, None] - G[..., None, :]).to(self._wide)
        return pairs.masked_fill_(above, float("-inf")).exp_()

    @cached_property
    def qk(self) -> Tensor:
        return self.q @ self.k.mT

    @cached_property
    def kk(self) -> Tensor:
        return self.k @ self.k.mT

    @cached_property
    def P(self) -> Tensor:
        return self.qk * self.gamma

    @cached_property
    def kk_before(self) -> Tensor:
        """(k_i . k_j) Gamma_ij below the diagonal: L without beta."""
        return (self.kk * self.gamma).tril_(-1)

    @cached_property
    def inverse(self) -> Tensor:
        """(I + L)^-1."""
        return unit_lower_inverse(self.beta * self.kk_before)

    @cached_property
    def q_in(self) -> Tensor:
        return self.decay_in * self.q

    @cached_property
    def k_in(self) -> Tensor:
        return self.decay_in * self.k

    @cached_property
    def k_out(self) -> Tensor:
        return self.decay_out * self.k

    @cached_property
    def inverse_beta(self) -> Tensor:
        """(I + L)^-1 diag(beta)."""
        return self.inverse * self.beta.mT

    @cached_property
    def U(self) -> Tensor:
        return self.inverse_beta @ self.v

    @cached_property
    def W(self) -> Tensor:
        return self.inverse_beta @ self.k_in

    @cached_property
    def M(self) -> Tensor:
        K = self.k.shape[-1]
        M = self.v.new_zeros(*self.v.shape[:3], K, K)
        M.diagonal(dim1=-2, dim2=-1).copy_(self.decay_all.squeeze(-1))
        return add_product_(M, self.k_out.mT, self.W, times=-1)

    def walk(self, carried: Tensor | None, initial: Tensor, final: Tensor) -> tuple[Tensor, Tensor]:
        """Run the states through the group.

        Args:
            carried: ``[G, R, K, V]``, the state that the chunks before left; None at the start.
            initial, final: ``[N, G, R, K, V]``, read where a sequence begins, written where it
                ends.

        Returns:
            The state before every chunk ``[n, G, R, K, V]`` and the last one.
        """
        after = (self.k_out.mT @ self.U).unbind(0)
        through, state, before = self.M.unbind(0), carried, []
        for c in range(self.group.chunks):
            if c in self.group.begins:
                state = initial[self.group.begins[c]]
            before.append(state)
            state = add_product_(after[c], through[c], state)
            if c in self.group.ends:
                final[self.group.ends[c]] = state
        before += [state] * (len(after) - len(before))
        return torch.stack(before), state

    def written(self, S: Tensor) -> Tensor:
        """v' ``[n, G, R, C, V]``."""
        return add_product_(self.U.clone(), self.W, S, times=-1)

    def output(self, S: Tensor) -> Tensor:
        return add_product_(self.q_in @ S, self.P, self.written(S))

    def walk_back(
        self, do: Tensor, carried: Tensor | None, d_final: Tensor, d_initial: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The reverse of :meth:`walk`.

        Args:
            do: ``[n, G, R, C, V]``.
            carried: gradient of the state after the group; None at the end.
            d_final, d_initial: ``[N, G, R, K, V]``, read where a sequence ends, written where it
                begins.

        Returns:
            The gradient of the state after every chunk ``[n, G, R, K, V]``, the adjoint ``a`` of
            the right side of the triangular system ``[n, G, R, C, V]``, and the gradient of the
            state before the group.
        """
        right = self.P.mT @ do
        before = self.q_in.mT @ do
        before = add_product_(before, self.W.mT, right, times=-1).unbind(0)
        through, state, after = self.M.mT.unbind(0), carried, []
        for c in reversed(range(self.group.chunks)):
            if c in self.group.ends:
                state = d_final[self.group.ends[c]]
            after.append(state)
            state = add_product_(before[c], through[c], state)
            if c in self.group.begins:
                d_initial[self.group.begins[c]] = state
        after = after[::-1]
        after += [after[-1]] * (len(before) - len(after))
        dS = torch.stack(after)
        return dS, self.inverse.mT @ add_product_(right, self.k_out, dS), state

    def gradients(self, do: Tensor, S: Tensor, dS: Tensor, a: Tensor) -> ChunkGrads:
        """From the states before every chunk and what :meth:`walk_back` returns."""
        written = self.written(S)
        dv = self.beta * a
        # What the token had to correct, v - (what the state already returns for k).
        returned = add_product_(self.k_in @ S, self.kk_before, written)
        dbeta = (a * (self.v - returned)).sum(-1)
        dqk = (do @ written.mT).mul_(self.gamma)
        minus_dkk = (dv @ written.mT).mul_(self.gamma).tril_(-1)

        q_read = (do @ S.mT).mul_(self.decay_in)
        k_read = (dv @ S.mT).mul_(-self.decay_in)
        k_written = (written @ dS.mT).mul_(self.decay_out)
        dg = _dg(
            crossing=(dqk * self.qk).addcmul_(minus_dkk, self.kk, value=-1),
            read=(self.q * q_read + self.k * k_read).sum(-1),
            written=(self.k * k_written).sum(-1),
            through=(self.decay_all * S * dS).sum((-1, -2)),
        )
        # Value heads that share a key add up before the products, not after them.
        q, k = self.q.squeeze(2), self.k.squeeze(2)
        dqk, minus_dkk = dqk.sum(2), minus_dkk.sum(2)
        dq = add_product_(q_read.sum(2), dqk, k).mul_(self.scale)
        dk = add_product_((k_read + k_written).sum(2), minus_dkk + minus_dkk.mT, k, times=-1)
        dk = add_product_(dk, dqk.mT, q)
        return ChunkGrads(dq, dk, dv, dg, dbeta)


def _dg(crossing: Tensor, read: Tensor, written: Tensor, through: Tensor) -> Tensor:
    """Gradient of the per-token log-decay from the interactions it scales.

    g_t multiplies every interaction between a writer before t and a reader at t or later. Summing
    exactly those, instead of differences of sums that contain the others too, keeps full relative
    accuracy when decay is so strong that almost nothing crosses.

    Args:
        crossing: ``[..., C, C]``, reader i against writer j; entries with j >= i are ignored.
        read: ``[..., C]``, token i reading the state from before the chunk.
        written: ``[..., C]``, the state after the chunk receiving what token j wrote.
        through: ``[...]``, the state before the chunk against the state after it.
    """
    earlier = crossing.new_ones(crossing.shape[-2:]).triu(1)
    # Column t of the product: what reader i gets from the writers j < t. Then the readers i >= t.
    crossed = (crossing @ earlier).tril_().sum(-2)
    earlier_writers = F.pad(running_sum(written)[..., :-1], (1, 0))
    later_readers = running_sum(read.flip(-1)).flip(-1)
    return crossed + later_readers + earlier_writers + through[..., None]
