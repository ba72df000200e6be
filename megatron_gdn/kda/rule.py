"""The rules of Kimi Delta Attention: the gated delta rule with a decay per channel.

(Kimi Team, "Kimi Linear", 2025; :mod:`..ops.rules.token_rule`.) With G_i [K] the running sum of g
in a chunk, only interactions of its tokens differ from :mod:`..ops.delta_rule.chunk_math`:

    A_ij = sum_c k_ic k_jc exp(G_ic - G_jc),  j < i        P_ij likewise with q_i,  j <= i

They are no product of two matrices: exp(G_i) times exp(-G_j) overflows, since a fast gate sums to
-320 in a chunk. So a chunk is cut in halves. A reader i of the second half meets a writer j of the
first half across the boundary r between them:

    exp(G_i - G_j) = exp(G_i - G_r) exp(G_r - G_j)         both exponents are <= 0

which is a product of two matrices. Both halves are cut again, down to single tokens. The gradient
of g_t sums what crosses t: the readers at t or later in a second half, the writers before t in a
first half. No term is added and subtracted, so strong decay costs no digits.

Legend: b chunks and heads, C tokens of a chunk, K key dim, m tokens of a half, h pairs of halves,
R value heads per key head.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from ..ops.delta_rule.base import RuleInputs
from ..ops.delta_rule.chunk import StaticChunks
from ..ops.delta_rule.chunk_math import ChunkGrads, Chunks, upto
from ..ops.delta_rule.plain import PlainRule
from ..ops.documents import Documents
from ..ops.obstacles import FLA_IS_TIMED, why_not_fla
from ..ops.rules.base import in_one_row, in_rows
from ..ops.rules.choice import Choice, Kernels, choose
from ..ops.rules.token_rule import recurrence
from ..ops.state_maps.state_map import StateShape
from .cudnn import CudnnKDA, why_not_cudnn
from .fla import FlaKDA, why_not_callable


class _Halves(NamedTuple):
    """All pairs of neighbouring halves of one size."""

    size: int
    since: Tensor  # [b, h, m, K], the decay from the boundary to a reader
    until: Tensor  # [b, h, m, K], the decay from a writer to the boundary

    def second(self, x: Tensor) -> Tensor:
        """``[..., C, K]`` -> ``[..., h, m, K]``, a view."""
        return x.unflatten(-2, (-1, 2, self.size)).select(-3, 1)

    def first(self, x: Tensor) -> Tensor:
        return x.unflatten(-2, (-1, 2, self.size)).select(-3, 0)

    def corners(self, pairs: Tensor) -> Tensor:
        """Readers against writers: ``[b, 2, C, C]`` -> ``[b, 2, m, m, h]``, a view."""
        cut = (-1, 2, self.size)
        return pairs.unflatten(3, cut).unflatten(2, cut)[:, :, :, 1, :, :, 0].diagonal(0, 2, 4)


class PerChannel(Chunks):
    """What differs from :class:`Chunks` if g is ``[B, T, H, K]``."""

    def _sums(self, g: Tensor) -> Tensor:
        return upto(g.shape[1], 0, g.dtype, g.device).mT @ g

    @cached_property
    def _of_heads(self) -> Tensor:
        """q and k of every value head: ``[b, 2, C, K]``."""
        repeats = self.heads[1]
        if repeats == 1:
            return self.q_k
        return self.q_k[:, None].expand(-1, repeats, -1, -1, -1).flatten(0, 1)

    def _halves(self) -> Iterator[_Halves]:
        size, wide = self._G.shape[1] // 2, self.beta.dtype
        while size:
            first, second = self._G.unflatten(1, (-1, 2, size)).unbind(2)
            boundary = first[:, :, -1:]
            yield _Halves(
                size, (second - boundary).exp_().to(wide), (boundary - first).exp_().to(wide)
            )
            size //= 2

    @cached_property
    def _P_A(self) -> Tensor:
        q_k, C = self._of_heads, self._G.shape[1]
        q, k = q_k.unbind(1)
        pairs = q_k.new_zeros(*q_k.shape[:2], C, C)
        pairs[:, 0].diagonal(dim1=-2, dim2=-1).copy_((q * k).sum(-1))
        for halves in self._halves():
            readers = halves.second(q_k) * halves.since[:, None]
            writers = halves.first(k) * halves.until
            halves.corners(pairs).copy_((readers @ writers[:, None].mT).permute(0, 1, 3, 4, 2))
        return pairs

    @cached_property
    def _in(self) -> Tensor:
        return self._of_heads * self.decay_in[:, None]

    def _decayed_k(self, decay: Tensor) -> Tensor:
        return self._of_heads[:, 1] * decay

    @cached_property
    def _written_k(self) -> Tensor:
        return self._decayed_k(self.decay_out * self.beta[..., None])

    def gradients(self, do_dv: Tensor, S: Tensor, dS: Tensor, d_written: Tensor) -> ChunkGrads:
        dv, dbeta, written, pairs = self._of_tokens(do_dv, S, dS, d_written)
        q_k = self._of_heads
        (q, k), C = q_k.unbind(1), q_k.shape[2]
        pairs[:, 1].neg_()
        # The states before and after the chunk.
        read = torch.bmm(do_dv.flatten(1, 2), S.mT).view(q_k.shape)
        read[:, 1].neg_()
        d_q_k = read * self.decay_in[:, None]
        kept = torch.bmm(written, dS.mT) * self.decay_out
        dg = upto(C, 0, q.dtype, q.device) @ (d_q_k * q_k).sum(1)
        dg.add_(upto(C, 1, q.dtype, q.device).mT @ (kept * k))
        dg.add_(((S * dS).sum(-1) * self.decay_in[:, -1])[:, None])
        dk = d_q_k[:, 1].add_(kept)
        # A token's own key: nothing decays between them.
        own = pairs[:, 0].diagonal(dim1=-2, dim2=-1)[..., None]
        d_q_k[:, 0].addcmul_(own, k)
        dk.addcmul_(own, q)
        for halves in self._halves():
            readers = halves.second(q_k) * halves.since[:, None]
            writers = halves.first(k) * halves.until
            d_pairs = halves.corners(pairs).permute(0, 1, 4, 2, 3)
            d_readers = (d_pairs @ writers[:, None]).mul_(halves.since[:, None])
            d_writers = (d_pairs.mT @ readers).sum(1).mul_(halves.until)
            halves.second(d_q_k).add_(d_readers)
            halves.first(dk).add_(d_writers)
            later = upto(halves.size, 0, q.dtype, q.device)
            earlier = upto(halves.size, 1, q.dtype, q.device).mT
            halves.second(dg).add_(later @ (d_readers * halves.second(q_k)).sum(1))
            halves.first(dg).add_(earlier @ (d_writers * halves.first(k)))
        dq, dk = self._per_key_head(d_q_k).sum(1).unbind(1)
        return ChunkGrads(dq * self.scale, dk, dv, dg, dbeta)


class StaticPerChannel(PerChannel, StaticChunks):
    """The same on documents in fixed buffers."""


class PlainKDA(PlainRule):
    """The chunk form in plain torch (:mod:`.rule`) as a rule: ``backend="reference"``."""

    kinds = PerChannel, StaticPerChannel


def recurrent_kda(
    inputs: RuleInputs, documents: Documents | None = None, initial: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Token by token, in fp32 (fp64 for fp64); see :func:`..ops.rules.token_rule.recurrence`.

    ``documents``: all batch rows end to end; None when a row is one sequence.
    """
    rows, dtype = inputs.v.shape[:2], inputs.v.dtype
    offsets = None if documents is None else documents.filled_offsets
    inputs = inputs if documents is None else in_one_row(inputs)
    q, k, v, g, beta = (x.to(torch.promote_types(dtype, torch.float32)) for x in inputs)
    q, k = (x.repeat_interleave(v.shape[2] // x.shape[2], dim=2) for x in (q, k))
    o, final = recurrence(q * k.shape[-1] ** -0.5, k, v, g, beta, initial, offsets)
    return in_rows(o.to(dtype), rows), final


def choose_kda(
    backend: str,
    state: StateShape,
    lower_bound: float | None,
    device: torch.device,
    dtype: torch.dtype,
    deterministic: bool = False,
    *,
    aligned: bool = False,
) -> Choice:
    """The rule of a Kimi Delta Attention, from dtype, device and installed packages alone.

    Args:
        backend: ``"fla"``, ``"cudnn"`` (cudnn-frontend's kernels for Hopper, by this name alone),
            ``"reference"`` (plain torch) or ``"auto"``, fla where it runs.
        lower_bound: of the log-decay. From -5 on fla takes faster kernels; cuDNN takes no other.
        deterministic, aligned: see :func:`..ops.rules.choice.choose`, which has the errors too.
    """
    K, V = state.rows, state.columns
    kernels = {
        "fla": Kernels(
            lambda: why_not_fla(device, dtype, K, why_not_callable),
            lambda: FlaKDA(lower_bound), "fla runs here", FLA_IS_TIMED,
        ),
        "cudnn": Kernels(
            lambda: why_not_cudnn(device, dtype, K, V, lower_bound), CudnnKDA,
            unsteady="cuDNN cuts a sequence into pieces by the number of all sequences",
            by_name=True,
        ),
    }  # fmt: skip
    return choose(
        backend, "Kimi Delta Attention", kernels, PlainKDA,
        device=device, deterministic=deterministic, aligned=aligned,
    )  # fmt: skip
