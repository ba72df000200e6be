"""Computes a group of chunks of a linear-attention rule in plain torch; autograd
differentiates it.

The log-decay g is per head or per channel. A token writes the value u under the key k,
and erases the value of the state S under the key e (Mamba2 erases nothing):

    S_t = D_t S_{t-1} + k_t (u_t - e_t^T D_t S_{t-1})    D_t = exp(g_t)  o_t = S_t^T q_t

A chunk is computed by matrix products. G_t is the sum of g from the chunk's start, y_t
the value that token t writes after erasing, and S the state before the chunk:

    (I + A) y = u - e_in S      A_ij = e_i . exp(G_i - G_j) k_j, j < i   e_in = exp(G) e
    o         = q_in S + P y    P_ij = q_i . exp(G_i - G_j) k_j, j <= i  q_in = exp(G) q
    S_next    = exp(G_C) S + k_out^T y                                   k_out = exp(G_C - G) k

(Yang et al. 2024, sections 3.2-3.3.) y and S_next, the state after the chunk, are
affine in S:

    y         = U + W S         U = (I + A)^-1 u,      W = -(I + A)^-1 e_in
    S_next    = M S + Z         Z = k_out^T U,         M = exp(G_C) I + k_out^T W

Legend: n chunks of the group, C tokens of a chunk, G key heads, H value heads, m = n G,
b = n H.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..autograd import first_derivative_only, run_saving_inputs
from ..elementwise import least_log_decay
from ..host_tables import cached_by_stream
from ..rules.chunk_table import ChunkGroup
from .triangular import unit_lower_inverse


class Values(NamedTuple):
    """Inputs of `run_group` for a group's tokens, in fp32 (fp64 if the rule's inputs
    are fp64)."""

    q: Tensor  # [m, C, K]
    k: Tensor  # [m, C, K]
    e: Tensor | None  # [m, C, K]; None: nothing is erased
    u: Tensor  # [b, C, V]
    # [b, C], [b, C, K], or [m, C, K] if a key head's value heads share one decay
    g: Tensor
    strength: Tensor | None = None  # [b, C], each value head's factor on e
    skip: Tensor | None = None  # [b, C, V], added to the output


class _Products(NamedTuple):
    """The matrices of a group that do not depend on states; names as in the module's
    docstring."""

    P: Tensor | None  # [b, C, C]; P and q_in are None if no output is asked for
    # [b, C, C], read only below the diagonal; None, as e_in, if e is None
    A: Tensor | None
    q_in: Tensor | None  # [b, C, K]
    e_in: Tensor | None  # [b, C, K]
    k_out: Tensor  # [b, C, K]
    decay: Tensor  # [b, 1 or K, 1], exp(G_C), the decay of the state over the chunk


def run_group(
    group: ChunkGroup,
    x: Values,
    carried: Tensor | None,
    initial: Tensor,
    *,
    output: bool = True,
    pass_states: bool = True,
    set_aside: bool = False,
) -> tuple[Tensor | None, Tensor | None, Tensor]:
    """Return the output ``[b, C, V]``, the state after the group, and its sequences'
    final states.

    Args:
        carried: ``[H, K, V]``, the state after the previous group; None for the first
            group.
        initial: initial states of the sequences that begin in the group.
        pass_states: False if every chunk is a whole sequence and no final state is
            wanted.
        set_aside: keep NaN and inf of a token out of the outputs of earlier tokens; not
            possible with gradients.
    """
    reached = None
    if set_aside:
        x, reached = _zero_nonfinite_tokens(x)
    P, A, q_in, e_in, k_out, decay = (
        _products_per_head if x.g.dim() == 2 else _products_per_channel
    )(x, output)
    if reached is not None:  # NaN in k_out makes the state after the chunk NaN
        k_out = k_out.masked_fill_(reached[:, -1:, None], float("nan"))
    S, y, carried, final = _SolveAndPassStates.apply(
        A, x.u, e_in, k_out, decay, carried, initial, group, pass_states
    )
    if P is None or q_in is None:
        return None, carried, final
    o = torch.baddbmm(torch.bmm(q_in, S), P, y)
    if x.skip is not None:
        o = o + x.skip
    if reached is not None:
        o = o.masked_fill_(reached[..., None], float("nan"))
    return o, carried, final


def _zero_nonfinite_tokens(x: Values) -> tuple[Values, Tensor]:
    """Zero the tokens whose k, e, u, g or strength is not finite, in place.

    The second result, bool ``[b, C]``, is True from the first zeroed token of a chunk
    on. In a product with a triangular matrix, 0 times a later token's NaN would make an
    earlier output NaN. A q that is not finite is not changed, since only its own
    token's output depends on it.
    """
    g = x.g.clamp(min=least_log_decay(x.g.dtype))  # -inf is legal
    # x * 0 is NaN if x is NaN or inf, so x * 0 != 0 finds the numbers that are not
    # finite.
    bad_key = _largest(x.k) * 0 != 0
    of_keys = len(g) < len(x.u)
    if x.e is not None and x.e is not x.k:
        bad_key |= _largest(x.e) * 0 != 0
    odd = _largest(x.u)
    if of_keys:
        bad_key |= g.sum(-1) * 0 != 0
    else:
        odd.sub_(g if g.dim() == 2 else g.sum(-1))
    if x.strength is not None:
        odd.add_(x.strength)
    bad = odd.mul_(0) != 0
    bad.unflatten(0, (len(bad_key), -1)).logical_or_(bad_key[:, None])

    e = None if x.e is x.k else x.e
    of_g = g, bad_key if of_keys else bad
    for t, out in ((x.k, bad_key), (e, bad_key), (x.u, bad), of_g, (x.strength, bad)):
        if t is not None:
            t.masked_fill_(out.view(out.shape + (1,) * (t.dim() - 2)), 0)
    return x._replace(g=g), bad.cumsum(-1) > 0


def _largest(x: Tensor) -> Tensor:
    """The largest absolute value (or NaN) of each row; ``vector_norm`` is slow on a
    CPU."""
    if x.is_cuda:
        return torch.linalg.vector_norm(x, float("inf"), dim=-1)
    return x.abs().amax(-1)


@cached_by_stream(32)
def ones_from_diagonal(
    C: int, diagonal: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """A matrix ``[C, C]`` with ones where column - row >= ``diagonal``, else zeros."""
    with torch.inference_mode(False):
        return torch.ones(C, C, dtype=dtype, device=device).triu(diagonal)


def sum_to_diagonal(x: Tensor, diagonal: int) -> Tensor:
    """Column i of the result is the sum of the columns j of ``x`` with i - j >=
    ``diagonal``.

    A batched product computes the sums: on a GPU ``cumsum`` has no fixed order, and
    Megatron's batch-invariant mode replaces ``mm`` by a kernel with TF32 precision.
    """
    C = x.shape[-1]
    table = ones_from_diagonal(C, diagonal, x.dtype, x.device)
    return torch.bmm(x.view(1, -1, C), table[None]).view(x.shape)


class _Decays(torch.autograd.Function):
    """Returns exp(G), exp(G_C - G) and each of ``pairs`` times exp(G_i - G_j); G =
    cumsum(g).

    g is ``[b, C]``. Each of ``pairs`` ``[m, C, C]`` holds the products of k_j with q_i
    or with e_i; decayed they are lower triangles ``[b, C, C]``. The backward never
    subtracts two large sums.
    """

    @staticmethod
    def forward(ctx, g: Tensor, *pairs: Tensor) -> tuple[Tensor, ...]:
        # Sums and differences of g are in fp64: after a strong decay G is in the
        # thousands, and the difference of two fp32 numbers of this size lacks the
        # digits that exp() magnifies. g is clamped, since (-inf) - (-inf) would be NaN.
        G = sum_to_diagonal(g.double().clamp(min=least_log_decay(g.dtype)), 0)
        start = G.exp().to(g.dtype)
        end = (G[:, -1:] - G).exp_().to(g.dtype)
        if not pairs:
            return start, end
        b, C = g.shape
        gamma = g.new_empty(b, C, C)  # exp(G_i - G_j)
        # subtracts in fp64, then rounds
        torch.sub(G[:, :, None], G[:, None, :], out=gamma)
        # The exponent is masked before exp, since above the diagonal it is positive and
        # exp may overflow. The mask is 0 and not -inf: exp(-inf) takes ten times as
        # long on a CPU.
        gamma.tril_().exp_().tril_()
        decayed = [
            (x[:, None] * gamma.view(len(x), -1, C, C)).flatten(0, 1) for x in pairs
        ]
        ctx.save_for_backward(gamma, start, end, *decayed)
        ctx.of_keys = (len(pairs[0]), -1, C, C)
        return start, end, *decayed

    @staticmethod
    @first_derivative_only
    def backward(ctx, d_start: Tensor, d_end: Tensor, *d_decayed: Tensor):
        """``d_start``, ``d_end``: the gradients of exp(G) and of exp(G_C - G).

        The gradient of g_t sums over the pairs of a key before t and a query at t or
        later.
        """
        gamma, start, end, *decayed = ctx.saved_tensors
        crossing = d_decayed[0] * decayed[0]
        for d, x in zip(d_decayed[1:], decayed[1:], strict=True):
            crossing.addcmul_(d, x)
        # Element (i, t) of sum_to_diagonal sums over keys j < t; sum(-2) over queries i
        # >= t.
        dg = sum_to_diagonal(crossing, 1).tril_().sum(-2)
        C = gamma.shape[-1]
        dtype = gamma.dtype
        device = gamma.device
        dg.addmm_(d_start * start, ones_from_diagonal(C, 0, dtype, device).mT)
        dg.addmm_(d_end * end, ones_from_diagonal(C, 1, dtype, device))
        return dg, *((d * gamma).view(ctx.of_keys).sum(1) for d in d_decayed)


def _products_per_head(x: Values, output: bool) -> _Products:
    """The products if g is per head; value heads of a key head share the products q
    k^T, e k^T."""
    m, C, _ = x.k.shape
    b = len(x.g)
    queries = [t for t in (x.q if output else None, x.e) if t is not None]
    start, end, *pairs = _Decays.apply(x.g, *(torch.bmm(t, x.k.mT) for t in queries))
    P = pairs[0] if output else None
    A = None
    e_start = start
    if x.e is not None:
        A = pairs[-1]
        if x.strength is not None:
            A = A * x.strength[..., None]
            e_start = start * x.strength

    def of_heads(t: Tensor, decay: Tensor) -> Tensor:
        """``t [m, C, K]``, repeated for a key head's value heads, times their
        ``decay [b, C]``."""
        return (t[:, None] * decay.view(m, -1, C, 1)).view(b, C, -1)

    return _Products(
        P,
        A,
        of_heads(x.q, start) if output else None,
        None if x.e is None else of_heads(x.e, e_start),
        of_heads(x.k, end),
        start[:, -1:, None],
    )


def _products_per_channel(x: Values, output: bool) -> _Products:
    """The products if g is per channel (Kimi Team, "Kimi Linear", 2025).

    exp(-G_j) alone would overflow, since G reaches -320 in a chunk with fast gates. So
    a chunk is cut into halves, and every half again, down to single tokens. One matrix
    product multiplies the queries i of a second half by the keys j of the first half,
    whose last token is r:

        exp(G_i - G_j) = exp(G_i - G_r) exp(G_r - G_j)         both exponents are <= 0
    """

    def of_heads(t: Tensor | None, count: int) -> Tensor | None:
        if t is None or len(t) == count:
            return t
        return t.repeat_interleave(count // len(t), 0)

    q, k, e = (of_heads(t, len(x.g)) for t in (x.q, x.k, x.e))
    assert q is not None and k is not None
    if e is not None and x.strength is not None:
        e = e * x.strength[..., None]
    g = x.g.clamp(min=least_log_decay(x.g.dtype))
    made = [t for t in (q if output else None, e) if t is not None]
    P = A = None
    if made:
        # The halves' tensors take twice the memory of P and A, so the backward makes
        # them again.
        pairs = run_saving_inputs(_decayed_products, torch.stack(made, 2), k, g).unbind(
            2
        )
        P, A = pairs[0] if output else None, None if e is None else pairs[-1]
    start = _sum_tokens(g, 0, earlier=True).exp()
    end = _sum_tokens(g, 1, earlier=False).exp()
    q_in = q * start if output else None
    e_in = None if e is None else e * start
    made = P, A, q_in, e_in, k * end, start[:, -1, :, None]
    return _Products._make(of_heads(t, len(x.u)) for t in made)


def _decayed_products(queries: Tensor, k: Tensor, g: Tensor) -> Tensor:
    """Products ``[b, C, r, C]`` of keys k and ``queries [b, C, r, K]`` (q, e or both),
    decayed."""
    b, C, r, K = queries.shape
    # Products within blocks of `size` tokens, [blocks, size, r, size]; `size` doubles
    # from 1 to C.
    pairs = (queries * k[:, :, None]).sum(-1).view(-1, 1, r, 1)
    size = 1
    while size < C:
        first, second = g.view(-1, 2, size, K).unbind(1)
        late = (
            queries.view(-1, 2, size, r, K)[:, 1]
            * _sum_tokens(second, 0, earlier=True).exp()[:, :, None]
        )
        early = (
            k.view(-1, 2, size, K)[:, 0] * _sum_tokens(first, 1, earlier=False).exp()
        )
        corner = torch.bmm(late.flatten(1, 2), early.mT).view(-1, size, r, size)
        upper, lower = pairs.view(-1, 2, size, r, size).unbind(1)
        pairs = torch.cat([F.pad(upper, (0, size)), torch.cat([corner, lower], -1)], 1)
        size *= 2
    return pairs.view(b, C, r, C)


def _sum_tokens(g: Tensor, least_distance: int, *, earlier: bool) -> Tensor:
    """Row i of the result is the sum of the rows j of ``g [b, m, K]`` on one side of i.

    Rows j <= i - ``least_distance`` are summed if ``earlier``, else j >= i +
    ``least_distance``.
    """
    m = g.shape[1]
    table = ones_from_diagonal(m, least_distance, g.dtype, g.device).expand(
        len(g), m, m
    )
    return torch.bmm(table.mT if earlier else table, g)


def _minus_bmm(x: Tensor, y: Tensor) -> Tensor:
    return x.new_empty(x.shape[:2] + y.shape[2:]).baddbmm_(x, y, beta=0, alpha=-1)


class _SolveAndPassStates(torch.autograd.Function):
    """Pass states from chunk to chunk; return states before chunks, y, last state,
    final states."""

    @staticmethod
    def forward(
        ctx,
        A,
        u,
        e_in,
        k_out,
        decay,
        carried,
        initial,
        group: ChunkGroup,
        pass_states: bool,
    ):
        """Solve (I + A) y = u - e_in S in every chunk; then S_next is decay S + k_out^T
        y."""
        H, K, V = initial.shape[1:]
        y = u
        states = u.new_empty(len(u) // H + 1, H, K, V)
        inverse = W = None
        through = decay
        if A is not None:
            inverse = unit_lower_inverse(A)
            y, W = torch.bmm(inverse, u), _minus_bmm(inverse, e_in)
        if pass_states:
            torch.bmm(k_out.mT, y, out=states[1:].flatten(0, 1))
            if W is not None:
                through = torch.bmm(k_out.mT, W)
                through.diagonal(dim1=-2, dim2=-1).add_(decay[..., 0])
            of_heads = through.unflatten(0, (-1, H))
            S, carried, final = group.walk(of_heads, states, carried, initial)
        else:
            S = states[:-1].zero_()
            final = initial[:0]
            assert group.beginnings is not None
            S.index_copy_(0, group.beginnings.chunks, initial)
        S = S.flatten(0, 1)
        if W is not None:
            y = y.baddbmm_(W, S)
        ctx.save_for_backward(inverse, W, k_out, through, S, y)
        ctx.group = group
        ctx.heads = H
        ctx.shape_of_decay = decay.shape
        return S, y, carried, final

    @staticmethod
    @first_derivative_only
    def backward(ctx, dS, dy, d_carried, d_final):
        """``dS``, ``d_carried``: gradients of the states before chunks and after the
        group."""
        inverse, W, k_out, through, S, y = ctx.saved_tensors
        states = S.new_empty((len(S) // ctx.heads + 1,) + d_carried.shape)
        if W is None:
            states[:-1].flatten(0, 1).copy_(dS)
        else:
            torch.baddbmm(dS, W.mT, dy, out=states[:-1].flatten(0, 1))
            through = through.mT
        of_heads = through.unflatten(0, (-1, ctx.heads))
        after, d_carried, d_initial = ctx.group.walk(
            of_heads, states, d_carried, d_final, back=True
        )
        if not ctx.needs_input_grad[5]:
            d_carried = None
        if not any(ctx.needs_input_grad[:5]):  # only the states need a gradient
            return (None,) * 5 + (d_carried, d_initial, None, None)
        after = after.flatten(0, 1)
        du = torch.baddbmm(dy, k_out, after)
        dA = None
        de_in = None
        dk_out = torch.bmm(y, after.mT)
        if inverse is not None:
            du = torch.bmm(inverse.mT, du)
            # dA is not zero above the diagonal, but its product with the decays is zero
            # there.
            dA = _minus_bmm(du, y.mT)
            de_in = _minus_bmm(du, S.mT)
            dA.diagonal(dim1=-2, dim2=-1).zero_()
        d_decay = (S * after).sum(-1, keepdim=True)
        if d_decay.shape != ctx.shape_of_decay:
            d_decay = d_decay.sum(1, keepdim=True)
        return dA, du, de_in, dk_out, d_decay, d_carried, d_initial, None, None
