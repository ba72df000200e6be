"""The chunk form of the gated delta rule in plain torch, forward and backward.

A sequence is cut into chunks of C tokens. Inside a chunk everything is a matrix product; only the
state S at chunk boundaries is computed one chunk after the other. With G the running sum of g in
the chunk, Gamma_ij = exp(G_i - G_j) for i >= j, and S the state before the chunk:

    (I + L) v'   = beta (v - exp(G) k S)          L_ij = beta_i (k_i . k_j) Gamma_ij,  j < i
    o            = scale (exp(G) q S + P v')      P_ij = (q_i . k_j) Gamma_ij,         j <= i
    S_next       = exp(G_C) S + (exp(G_C - G) k)^T v'

(Yang et al. 2024, sections 3.2-3.3.) v' is what each token really writes. The backward below is in
closed form, so nothing of size T * C outlives either pass: it keeps the inputs and computes the
rest again. Every reduction has a fixed order, so results repeat bit for bit.

Legend: N sequences, n chunks, G key heads, R value heads per key head, C tokens of a chunk, K key
dim, V value dim. Chunk tensors are [n, G, C, K] (query, key) or [n, G, R, C, ...] (the rest), so
query and key are never repeated for the value heads that share them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from .checks import check_rule_inputs
from .documents import Documents
from .norm import l2norm


@dataclass(frozen=True, eq=False)
class _ChunkTable:
    """Where the tokens of N sequences sit in chunks, ordered for the scan over states.

    Sequences are taken longest first, and chunks are ordered by their place in the sequence: the
    first chunk of every sequence, then the second of all that have one, and so on. A step of the
    scan is then one slice of chunks, and the sequences still running are a leading slice too.

    Attributes:
        token: int64 ``[n * C]``, the token in each slot; empty slots hold the number of tokens.
        slot: int64 ``[tokens]``, the inverse.
        steps: for each step of the scan, its slice of chunks.
        order: int64 ``[N]``, which sequence stands at each place, longest first.
    """

    chunk_size: int
    token: Tensor
    slot: Tensor
    steps: tuple[slice, ...]
    order: Tensor

    @staticmethod
    @lru_cache(maxsize=32)
    def build(lengths: tuple[int, ...], chunk_size: int, device: torch.device) -> _ChunkTable:
        length_N = torch.tensor(lengths, dtype=torch.int64)
        start_N = length_N.cumsum(0) - length_N
        total = int(length_N.sum())
        chunks_N = (length_N + chunk_size - 1) // chunk_size
        order_N = torch.sort(chunks_N, descending=True, stable=True).indices

        starts, ends, steps, first = [], [], [], 0
        for step in range(int(chunks_N.max())):
            running = order_N[chunks_N[order_N] > step]
            starts.append(start_N[running] + step * chunk_size)
            ends.append(start_N[running] + length_N[running])
            steps.append(slice(first, first + len(running)))
            first += len(running)

        if steps:
            token = torch.cat(starts)[:, None] + torch.arange(chunk_size)
            token = torch.where(token < torch.cat(ends)[:, None], token, total).flatten()
        else:
            token = torch.zeros(0, dtype=torch.int64)
        slot = torch.zeros(total + 1, dtype=torch.int64)
        slot[token] = torch.arange(token.numel())
        return _ChunkTable(
            chunk_size, token.to(device), slot[:total].to(device), tuple(steps), order_N.to(device)
        )

    def to_chunks(self, x: Tensor, heads: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """``[B, T, H]`` or ``[B, T, H, D]`` -> ``[n, *heads, C]`` or ``[n, *heads, C, D]``.

        Empty slots are zero, which makes them tokens that write nothing and do not decay.
        """
        rows = x.flatten(0, 1).to(dtype)
        rows = torch.cat([rows, rows.new_zeros(1, *rows.shape[1:])])[self.token]
        return rows.view(-1, self.chunk_size, *heads, *rows.shape[2:]).movedim(1, 1 + len(heads))

    def to_tokens(self, chunks: Tensor, like: Tensor) -> Tensor:
        """The inverse of :meth:`to_chunks`, in the shape and dtype of ``like``."""
        heads = like.shape[2]
        rows = chunks.movedim(-2 if like.dim() == 4 else -1, 1).reshape(
            self.token.numel(), heads, *like.shape[3:]
        )
        return rows[self.slot].view(like.shape).to(like.dtype)


@dataclass(eq=False)
class _Chunks:
    """The chunked inputs and everything that does not need the state."""

    q: Tensor
    k: Tensor
    v: Tensor
    beta: Tensor
    decay_in: Tensor  # exp(G_i): from the chunk's start to token i
    decay_out: Tensor  # exp(G_C - G_i): from token i to the chunk's end
    decay_all: Tensor  # exp(G_C)
    gamma: Tensor  # exp(G_i - G_j) on and below the diagonal, else 0
    qk: Tensor  # q_i . k_j
    kk: Tensor  # k_i . k_j
    L: Tensor

    @classmethod
    def build(cls, table: _ChunkTable, q, k, v, g, beta, scale: float) -> _Chunks:
        wide = torch.promote_types(v.dtype, torch.float32)
        groups, repeats = k.shape[2], v.shape[2] // k.shape[2]
        q, k = (table.to_chunks(x, (groups,), wide) for x in (q, k))
        v, beta = (table.to_chunks(x, (groups, repeats), wide) for x in (v, beta))
        # G is summed and subtracted in fp64: after a strong decay G is in the thousands, and the
        # difference of two fp32 numbers of that size has lost the digits that exp() magnifies.
        G = table.to_chunks(g, (groups, repeats), torch.float64).cumsum(-1)
        pairs = (G[..., :, None] - G[..., None, :]).to(wide)
        above = torch.ones(pairs.shape[-2:], dtype=torch.bool, device=pairs.device).triu(1)
        # Masked before exp: above the diagonal the exponent is positive and may overflow.
        gamma = pairs.masked_fill(above, float("-inf")).exp()
        kk = (k @ k.transpose(-1, -2))[:, :, None]
        qk = (q @ k.transpose(-1, -2))[:, :, None] * scale
        return cls(
            q=q[:, :, None] * scale,
            k=k[:, :, None],
            v=v,
            beta=beta[..., None],
            decay_in=G.exp().to(wide)[..., None],
            decay_out=(G[..., -1:] - G).exp().to(wide)[..., None],
            decay_all=G[..., -1:, None].exp().to(wide),
            gamma=gamma,
            qk=qk,
            kk=kk,
            L=(beta[..., None] * kk * gamma).tril(-1),
        )

    def solve(self, right: Tensor) -> Tensor:
        """``(I + L)^-1 right``."""
        return torch.linalg.solve_triangular(self.L, right, upper=False, unitriangular=True)

    def solve_transposed(self, right: Tensor) -> Tensor:
        """``(I + L)^-T right``."""
        return torch.linalg.solve_triangular(
            self.L.transpose(-1, -2), right, upper=True, unitriangular=True
        )

    def scan(self, steps: tuple[slice, ...], state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Run the states through all chunks.

        Args:
            state: ``[N, G, R, K, V]``, sequences in the table's order.

        Returns:
            The state before every chunk ``[n, G, R, K, V]``, what every token writes (v')
            ``[n, G, R, C, V]``, and the final states ``[N, G, R, K, V]``.
        """
        V = self.v.shape[-1]
        solved = self.solve(torch.cat([self.v, self.decay_in * self.k], dim=-1) * self.beta)
        before = self.v.new_empty(self.v.shape[0], *state.shape[1:])
        written = torch.empty_like(self.v)
        final = state.clone()
        for step in steps:
            running = slice(0, step.stop - step.start)
            before[step] = final[running]
            written[step] = solved[step, ..., :V] - solved[step, ..., V:] @ final[running]
            final[running] = (
                self.decay_all[step] * final[running]
                + (self.decay_out[step] * self.k[step]).transpose(-1, -2) @ written[step]
            )
        return before, written, final

    def scan_back(
        self, steps: tuple[slice, ...], do: Tensor, dfinal: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The reverse of :meth:`scan`.

        Args:
            do: ``[n, G, R, C, V]``.
            dfinal: gradient of the final states, ``[N, G, R, K, V]``.

        Returns:
            The gradient of the state after every chunk ``[n, G, R, K, V]``, the adjoint ``a`` of
            the right side of the triangular system ``[n, G, R, C, V]``, and the gradient of the
            initial states ``[N, G, R, K, V]``.
        """
        V = do.shape[-1]
        from_output = (self.qk * self.gamma).transpose(-1, -2) @ do
        solved = self.solve_transposed(torch.cat([from_output, self.decay_out * self.k], dim=-1))
        dafter = do.new_empty(do.shape[0], *dfinal.shape[1:])
        adjoint = torch.empty_like(do)
        dstate = dfinal.clone()
        for step in reversed(steps):
            running = slice(0, step.stop - step.start)
            dafter[step] = dstate[running]
            adjoint[step] = solved[step, ..., :V] + solved[step, ..., V:] @ dstate[running]
            dstate[running] = (
                self.decay_all[step] * dstate[running]
                + (self.decay_in[step] * self.q[step]).transpose(-1, -2) @ do[step]
                - (self.decay_in[step] * self.k[step]).transpose(-1, -2)
                @ (self.beta[step] * adjoint[step])
            )
        return dafter, adjoint, dstate


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
    readers = crossing.tril(-1).flip(-2).cumsum(-2).flip(-2)  # sum over i >= t, for every j
    earlier_writers = F.pad(written.cumsum(-1)[..., :-1], (1, 0))
    return (
        readers.tril(-1).sum(-1)
        + read.flip(-1).cumsum(-1).flip(-1)
        + earlier_writers
        + through[..., None]
    )


class ChunkedRule(NamedTuple):
    """The rule over sequences of known lengths, as two plain calls without autograd.

    Attributes:
        table: where the tokens sit in chunks.
        scale: factor on the output.
    """

    table: _ChunkTable
    scale: float

    @classmethod
    def over(
        cls, lengths: tuple[int, ...], chunk_size: int, scale: float, device: torch.device
    ) -> ChunkedRule:
        return cls(_ChunkTable.build(lengths, chunk_size, device), scale)

    def zero_state(self, k: Tensor, v: Tensor) -> Tensor:
        """``[N, G, R, K, V]`` in the dtype that the rule computes in."""
        groups, K = k.shape[2:]
        wide = torch.promote_types(v.dtype, torch.float32)
        sequences = len(self.table.order)
        return v.new_zeros(sequences, groups, v.shape[2] // groups, K, v.shape[3], dtype=wide)

    def forward(self, q, k, v, g, beta, state: Tensor) -> tuple[Tensor, Tensor]:
        """Output ``[B, T, H, V]`` and final states ``[N, G, R, K, V]`` in the table's order."""
        with torch.autocast(v.device.type, enabled=False):
            x = _Chunks.build(self.table, q, k, v, g, beta, self.scale)
            before, written, final = x.scan(self.table.steps, state)
            o = (x.decay_in * x.q) @ before + (x.qk * x.gamma) @ written
        return self.table.to_tokens(o, v), final

    def backward(self, do, dfinal, q, k, v, g, beta, state: Tensor) -> tuple[Tensor, ...]:
        """Gradients of q, k, v, g, beta and the initial states."""
        table = self.table
        with torch.autocast(v.device.type, enabled=False):
            x = _Chunks.build(table, q, k, v, g, beta, self.scale)
            S, written, _ = x.scan(table.steps, state)
            do = table.to_chunks(do, x.v.shape[1:3], x.v.dtype)
            dS, a, dinitial = x.scan_back(table.steps, do, dfinal.to(x.v.dtype))

            dv = x.beta * a
            # What the token had to correct, v - (what the state already returns for k).
            error = x.v - x.decay_in * (x.k @ S) - (x.kk * x.gamma).tril(-1) @ written
            dbeta = (a * error).sum(-1)
            dqk = (do @ written.transpose(-1, -2)) * x.gamma
            dkk = (-(dv @ written.transpose(-1, -2)) * x.gamma).tril(-1)

            q_read = x.decay_in * (do @ S.transpose(-1, -2))
            k_read = -x.decay_in * (dv @ S.transpose(-1, -2))
            k_written = x.decay_out * (written @ dS.transpose(-1, -2))
            dq = (q_read + dqk @ x.k).sum(2) * self.scale
            dk = k_read + dkk @ x.k + dkk.transpose(-1, -2) @ x.k
            dk = (dk + dqk.transpose(-1, -2) @ x.q + k_written).sum(2)
            dg = _dg(
                crossing=dqk * x.qk + dkk * x.kk,
                read=(x.q * q_read + x.k * k_read).sum(-1),
                written=(x.k * k_written).sum(-1),
                through=(x.decay_all * S * dS).sum((-1, -2)),
            )
            gradients = zip((dq, dk, dv, dg, dbeta), (q, k, v, g, beta), strict=True)
            return *(table.to_tokens(d, like) for d, like in gradients), dinitial


class _ChunkRule(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, g, beta, state, rule: ChunkedRule):
        ctx.save_for_backward(q, k, v, g, beta, state)
        ctx.rule = rule
        return rule.forward(q, k, v, g, beta, state)

    @staticmethod
    @once_differentiable
    def backward(ctx, do, dfinal):
        return *ctx.rule.backward(do, dfinal, *ctx.saved_tensors), None


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

    Computes in fp32 (fp64 for fp64 input); sequences of any length, packed documents included.
    The backward recomputes, so a call keeps its inputs and nothing else. Double backward is not
    supported.

    Args:
        chunk_size: tokens per chunk; changes rounding, speed and memory, not the result.
        query, key, ..., cu_seqlens: as in :func:`megatron_gdn.ops.gated_delta_rule`.

    Returns and errors: as :func:`megatron_gdn.ops.gated_delta_rule`.
    """
    documents = check_rule_inputs(query, key, value, g, beta, initial_state, cu_seqlens)
    if chunk_size < 1:
        raise ValueError(f"chunk_size={chunk_size} must be at least 1; 64 is usual.")
    if use_qk_l2norm_in_kernel:
        query, key = l2norm(query), l2norm(key)
    scale = key.shape[-1] ** -0.5 if scale is None else scale
    lengths = (key.shape[1],) * key.shape[0] if documents is None else documents.lengths
    rule = ChunkedRule.over(lengths, chunk_size, scale, key.device)
    state = rule.zero_state(key, value)
    if initial_state is not None:
        state = initial_state.to(state.dtype).reshape(state.shape)[rule.table.order]
    output, final = _ChunkRule.apply(query, key, value, g, beta, state, rule)
    if not output_final_state:
        return output, None
    place = torch.argsort(rule.table.order)
    return output, final[place].flatten(1, 2)
