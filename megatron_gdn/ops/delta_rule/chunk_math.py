"""A group of chunks of a linear-attention rule in plain torch, for autograd.

The log-decay g is per head or per channel. A token erases from the state S the value
that its key e reads (Mamba2 erases nothing), and writes the value u under its key k:

    S_t = D_t S_{t-1} + k_t (u_t - e_t^T D_t S_{t-1})    D_t = exp(g_t)  o_t = S_t^T q_t

A chunk is computed by matrix products. G_t is the sum of g from the chunk's start to
token t, y_t is u_t without the erased value, and S is the state before the chunk:

    (I + A) y = u - e_in S      A_ij = e_i . exp(G_i - G_j) k_j, j < i   e_in = exp(G) e
    o         = q_in S + P y    P_ij = q_i . exp(G_i - G_j) k_j, j <= i  q_in = exp(G) q
    S_next    = exp(G_C) S + k_out^T y       k_out = exp(G_C - G) k

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


class ChunkValues(NamedTuple):
    """The tokens' values in a group of chunks, as the module's docstring names them.

    They are fp32 (fp64 if the rule's inputs are fp64).
    """

    q: Tensor  # [m, C, K]
    k: Tensor  # [m, C, K]
    # [m, C, K]; None: nothing is erased, which no rule with g per channel asks for
    e: Tensor | None
    u: Tensor  # [b, C, V]
    # [b, C], [b, C, K], or [m, C, K] if a key head's value heads share one decay
    g: Tensor
    strength: Tensor | None = None  # [b, C], a factor on e, per value head
    skip: Tensor | None = None  # [b, C, V], added to the output


class _Products(NamedTuple):
    """The matrices of a group that do not depend on states; names as in the module's
    docstring."""

    P: Tensor | None  # [b, C, C]; None if no output is asked for
    A: Tensor | None  # [b, C, C], read only below the diagonal; None if e is None
    q_in: Tensor | None  # [b, C, K]; None if no output is asked for
    e_in: Tensor | None  # [b, C, K]; None if e is None
    k_out: Tensor  # [b, C, K]
    decay: Tensor  # [b, 1 or K, 1], exp(G_C), the decay of the state over the chunk


def run_group(
    group: ChunkGroup,
    x: ChunkValues,
    carried: Tensor | None,
    initial: Tensor,
    *,
    output: bool = True,
    pass_states: bool = True,
    isolate_nonfinite: bool = False,
) -> tuple[Tensor | None, Tensor | None, Tensor]:
    """Run the rule over one group of chunks.

    Args:
        carried: ``[H, K, V]``, the state after the previous group; None for the first
            group.
        initial: ``[., H, K, V]``, the initial states of the sequences that begin in the
            group.
        output: whether the output is computed.
        pass_states: False if every chunk is a whole sequence and the caller reads no
            final states.
        isolate_nonfinite: keep NaN and inf of a token out of the outputs of earlier
            tokens. This overwrites ``x``, so autograd cannot differentiate it.

    Returns:
        The output ``[b, C, V]`` or None, the state after the group, and the final
        states of the sequences that end in the group.
    """
    has_nan = None
    if isolate_nonfinite:
        x, has_nan = _zero_nonfinite_tokens(x)
    if x.g.dim() == 2:
        products = _products_per_head(x, output)
    else:
        products = _products_per_channel(x, output)
    k_out = products.k_out
    if has_nan is not None:  # NaN in k_out makes the state after the chunk NaN
        k_out = k_out.masked_fill_(has_nan[:, -1:, None], float("nan"))
    S, y, carried, final = _SolveAndPassStates.apply(
        products.A,
        x.u,
        products.e_in,
        k_out,
        products.decay,
        carried,
        initial,
        group,
        pass_states,
    )
    if products.P is None:
        return None, carried, final
    assert products.q_in is not None
    o = torch.baddbmm(torch.bmm(products.q_in, S), products.P, y)
    if x.skip is not None:
        o = o + x.skip
    if has_nan is not None:
        o = o.masked_fill_(has_nan[..., None], float("nan"))
    return o, carried, final


def _zero_nonfinite_tokens(x: ChunkValues) -> tuple[ChunkValues, Tensor]:
    """Zero the tokens whose k, e, u, g or strength is not finite, in place.

    The second result, bool ``[b, C]``, is True at the first zeroed token of a chunk and
    at all later tokens of the chunk: the caller must set their outputs to NaN. The
    zeros are needed, since in a product with a triangular matrix 0 times a later
    token's NaN would make an earlier output NaN. q and ``skip`` are not changed: only
    their own token's output depends on them.
    """
    g = x.g.clamp(min=least_log_decay(x.g.dtype))  # -inf is legal
    # x * 0 is NaN if x is NaN or inf, so x * 0 != 0 finds the numbers that are not
    # finite.
    bad_key = _largest_per_row(x.k) * 0 != 0  # bool [m, C]
    g_per_key_head = len(g) < len(x.u)
    if x.e is not None and x.e is not x.k:
        bad_key |= _largest_per_row(x.e) * 0 != 0
    # a sum of one number per input is not finite if an input is not finite
    checked_sum = _largest_per_row(x.u)
    if g_per_key_head:
        bad_key |= g.sum(-1) * 0 != 0
    elif g.dim() == 2:
        checked_sum.sub_(g)
    else:
        checked_sum.sub_(g.sum(-1))
    if x.strength is not None:
        checked_sum.add_(x.strength)
    bad = checked_sum.mul_(0) != 0  # bool [b, C]
    # a bad token of a key head is bad in each of the head's value heads
    bad.unflatten(0, (len(bad_key), -1)).logical_or_(bad_key[:, None])

    _zero_tokens(x.k, bad_key)
    if x.e is not None and x.e is not x.k:
        _zero_tokens(x.e, bad_key)
    _zero_tokens(x.u, bad)
    _zero_tokens(g, bad_key if g_per_key_head else bad)
    if x.strength is not None:
        _zero_tokens(x.strength, bad)
    return x._replace(g=g), bad.cumsum(-1) > 0


def _zero_tokens(x: Tensor, selected: Tensor) -> None:
    """Set ``x [., C, ...]`` to zero, in place, at the tokens of ``selected [., C]``."""
    x.masked_fill_(selected.view(selected.shape + (1,) * (x.dim() - 2)), 0)


def _largest_per_row(x: Tensor) -> Tensor:
    """The largest absolute value (or NaN) of each row: ``[m, C]`` from
    ``x [m, C, D]``."""
    if x.is_cuda:
        return torch.linalg.vector_norm(x, float("inf"), dim=-1)
    return x.abs().amax(-1)  # on a CPU vector_norm is slow


@cached_by_stream(32)
def ones_from_diagonal(
    C: int, diagonal: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """A matrix ``[C, C]`` with ones where column - row >= ``diagonal``, else zeros.

    It is not an inference tensor, since a later call may be under autograd.
    """
    with torch.inference_mode(False):
        return torch.ones(C, C, dtype=dtype, device=device).triu(diagonal)


def sum_to_diagonal(x: Tensor, diagonal: int) -> Tensor:
    """Column i of the result is the sum of the columns j of ``x [..., C]`` with i - j
    >= ``diagonal``.

    A batched product computes the sums: on a GPU ``cumsum`` has no fixed order, and
    Megatron's batch-invariant mode replaces ``mm`` by a kernel with TF32 precision.
    """
    C = x.shape[-1]
    ones_CC = ones_from_diagonal(C, diagonal, x.dtype, x.device)
    return torch.bmm(x.view(1, -1, C), ones_CC[None]).view(x.shape)


class _Decays(torch.autograd.Function):
    """From g ``[b, C]``, with G = cumsum(g): exp(G), exp(G_C - G), and the decayed
    ``pairs``.

    ``pairs`` are tensors ``[m, C, C]``. Element (i, j) of a matrix is q_i . k_j in one
    tensor and e_i . k_j in the other (q, e, k, m: the module's docstring). The decayed
    element is this element times exp(G_i - G_j), in a lower triangle ``[b, C, C]``. The
    backward never subtracts two large sums.
    """

    @staticmethod
    def forward(ctx, g: Tensor, *pairs: Tensor) -> tuple[Tensor, ...]:
        """Return exp(G) and exp(G_C - G), each ``[b, C]``, then the decayed pairs, each
        ``[b, C, C]``. The b / m value heads of a key head share one matrix of each of
        ``pairs``."""
        # Sums and differences of g are in fp64: after a strong decay G is in the
        # thousands, and the difference of two such fp32 numbers lacks the digits that
        # exp() magnifies. g is clamped, since (-inf) - (-inf) would be NaN.
        G = sum_to_diagonal(g.double().clamp(min=least_log_decay(g.dtype)), 0)
        start = G.exp().to(g.dtype)
        end = (G[:, -1:] - G).exp_().to(g.dtype)
        if not pairs:
            # Only state maps without an erase lack pairs, and they have no backward.
            return start, end
        b, C = g.shape
        decay = g.new_empty(b, C, C)  # exp(G_i - G_j)
        # subtracts in fp64, then rounds
        torch.sub(G[:, :, None], G[:, None, :], out=decay)
        # Above the diagonal the exponent is positive, and exp may overflow. So the
        # exponent is set to 0 before exp, and the result to 0 after it. (The exponent
        # is not set to -inf, since exp(-inf) takes ten times as long on a CPU.)
        decay.tril_().exp_().tril_()
        decayed = [
            (x[:, None] * decay.view(len(x), -1, C, C)).flatten(0, 1) for x in pairs
        ]
        ctx.save_for_backward(decay, start, end, *decayed)
        ctx.shape_per_key_head = (len(pairs[0]), -1, C, C)
        return start, end, *decayed

    @staticmethod
    @first_derivative_only
    def backward(ctx, d_start: Tensor, d_end: Tensor, *d_decayed: Tensor):
        """The gradients of g and ``pairs`` from the gradients of the forward's results,
        in the order of these results.

        The gradient of g_t sums over all keys before t and all queries at t or later,
        since g_t is in the decay between these tokens.
        """
        decay, start, end, *decayed = ctx.saved_tensors
        # the gradient of G_i - G_j, [b, C, C]
        d_exponent = d_decayed[0] * decayed[0]
        for d, x in zip(d_decayed[1:], decayed[1:], strict=True):
            d_exponent.addcmul_(d, x)
        # Element (i, t) of sum_to_diagonal sums over keys j < t; sum(-2) over queries i
        # >= t.
        dg = sum_to_diagonal(d_exponent, 1).tril_().sum(-2)
        C = decay.shape[-1]
        dtype = decay.dtype
        device = decay.device
        dg.addmm_(d_start * start, ones_from_diagonal(C, 0, dtype, device).mT)
        dg.addmm_(d_end * end, ones_from_diagonal(C, 1, dtype, device))
        return dg, *((d * decay).view(ctx.shape_per_key_head).sum(1) for d in d_decayed)


def _products_per_head(x: ChunkValues, output: bool) -> _Products:
    """The products if g is per head; P and q_in are computed only if ``output``.

    The value heads of a key head share the products q k^T and e k^T.
    """
    m, C, _ = x.k.shape
    b = len(x.g)
    queries = []
    if output:
        queries.append(x.q)
    if x.e is not None:
        queries.append(x.e)
    # start: exp(G), the decay from the chunk's start; end: exp(G_C - G), to its end
    start, end, *pairs = _Decays.apply(x.g, *(torch.bmm(t, x.k.mT) for t in queries))

    def times_decay(t: Tensor, decay: Tensor) -> Tensor:
        """``t [m, C, K]``, repeated for a key head's value heads, times their
        ``decay [b, C]``."""
        return (t[:, None] * decay.view(m, -1, C, 1)).view(b, C, -1)

    # Autograd adds the gradients of ``start`` in the order of these operations, so
    # another order would change bits.
    A = None
    e_start = start
    if x.e is not None:
        A = pairs[-1]
        if x.strength is not None:
            A = A * x.strength[..., None]
            e_start = start * x.strength
    P = None
    q_in = None
    if output:
        P = pairs[0]
        q_in = times_decay(x.q, start)
    e_in = None
    if x.e is not None:
        e_in = times_decay(x.e, e_start)
    return _Products(P, A, q_in, e_in, times_decay(x.k, end), start[:, -1:, None])


def _products_per_channel(x: ChunkValues, output: bool) -> _Products:
    """The products if g is per channel (Kimi Team, "Kimi Linear", 2025).

    exp(-G_j) alone would overflow, since G reaches -320 in a chunk with fast gates. So
    a chunk is cut into halves, and each half again, down to single tokens. One matrix
    product multiplies the queries i of a second half by the keys j of the first half.
    If r is the last token of the first half,

        exp(G_i - G_j) = exp(G_i - G_r) exp(G_r - G_j)         both exponents are <= 0
    """

    def repeated(t: Tensor | None, count: int) -> Tensor | None:
        """``t [m, ...]`` as ``[count, ...]``: each key head is repeated for its value
        heads. None stays None."""
        if t is None or len(t) == count:
            return t
        return t.repeat_interleave(count // len(t), 0)

    q = repeated(x.q, len(x.g))
    k = repeated(x.k, len(x.g))
    e = repeated(x.e, len(x.g))
    assert q is not None and k is not None and e is not None
    if x.strength is not None:
        e = e * x.strength[..., None]
    g = x.g.clamp(min=least_log_decay(x.g.dtype))
    queries = [q, e] if output else [e]
    # The halves' tensors take twice the memory of P and A, so the backward makes them
    # again.
    products = run_saving_inputs(_decayed_products, torch.stack(queries, 2), k, g)
    pairs = products.unbind(2)
    start = _sum_tokens(g, 0, earlier=True).exp()  # exp(G)
    end = _sum_tokens(g, 1, earlier=False).exp()  # exp(G_C - G)
    per_g_head = _Products(
        P=pairs[0] if output else None,
        A=pairs[-1],
        q_in=q * start if output else None,
        e_in=e * start,
        k_out=k * end,
        decay=start[:, -1, :, None],
    )
    return _Products._make(repeated(t, len(x.u)) for t in per_g_head)


def _decayed_products(queries: Tensor, k: Tensor, g: Tensor) -> Tensor:
    """The decayed products ``[b, C, r, C]`` of queries i and keys j <= i.

    ``queries [b, C, r, K]`` are q, e or both (r is 1 or 2), ``k`` and ``g`` are
    ``[b, C, K]``. The result is 0 for j > i.
    """
    b, C, r, K = queries.shape
    # ``pairs`` are the products within blocks of ``size`` tokens, [blocks, size, r,
    # size]. ``size`` doubles from 1 to C: the products of two neighbouring blocks are
    # upper (the first block's), lower (the second's) and corner (between the two).
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
    ones_mm = ones_from_diagonal(m, least_distance, g.dtype, g.device)
    if earlier:
        ones_mm = ones_mm.mT
    return torch.bmm(ones_mm.expand(len(g), m, m), g)


def _minus_bmm(x: Tensor, y: Tensor) -> Tensor:
    """``-x @ y`` for batches of matrices, in one launch."""
    return x.new_empty(x.shape[:2] + y.shape[2:]).baddbmm_(x, y, beta=0, alpha=-1)


class _SolveAndPassStates(torch.autograd.Function):
    """Solves (I + A) y = u - e_in S in each chunk, and passes S from chunk to chunk.

    The results are the states before chunks ``[b, K, V]``, y ``[b, C, V]``, the state
    after the group and the final states of the sequences that end in the group.
    """

    @staticmethod
    def forward(
        ctx,
        A: Tensor | None,
        u: Tensor,
        e_in: Tensor | None,
        k_out: Tensor,
        decay: Tensor,
        carried: Tensor | None,
        initial: Tensor,
        group: ChunkGroup,
        pass_states: bool,
    ):
        """Solve and pass the states, with the letters of the module's docstring.

        ``A`` is ``[b, C, C]``, ``u [b, C, V]``, ``e_in`` and ``k_out [b, C, K]``,
        ``decay [b, 1 or K, 1]``. ``A`` and ``e_in`` are None if nothing is erased. The
        other arguments are those of :func:`run_group`.
        """
        H, K, V = initial.shape[1:]
        y = u
        # [n + 1, H, K, V], in the form that ``group.pass_states`` takes
        states = u.new_empty(len(u) // H + 1, H, K, V)
        inverse = W = None
        through = decay
        if A is not None:
            inverse = unit_lower_inverse(A)
            assert e_in is not None
            y = torch.bmm(inverse, u)  # U; W S is added below
            W = _minus_bmm(inverse, e_in)
        if pass_states:
            torch.bmm(k_out.mT, y, out=states[1:].flatten(0, 1))  # Z
            if W is not None:  # M
                through = torch.bmm(k_out.mT, W)
                through.diagonal(dim1=-2, dim2=-1).add_(decay[..., 0])
            through_nH = through.unflatten(0, (-1, H))
            S, carried, final = group.pass_states(through_nH, states, carried, initial)
        else:  # every chunk starts from the initial state of its sequence, or is empty
            S = states[:-1].zero_()
            final = initial[:0]  # not read
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
        """The gradients of the inputs from the gradients of the forward's results:
        ``dS`` of the states before chunks, ``dy`` of y, ``d_carried`` of the state
        after the group, ``d_final`` of the final states."""
        inverse, W, k_out, through, S, y = ctx.saved_tensors
        # as in the forward, but gradients, which pass from the last chunk to the first
        states = S.new_empty((len(S) // ctx.heads + 1,) + d_carried.shape)
        if W is None:
            states[:-1].flatten(0, 1).copy_(dS)
        else:
            torch.baddbmm(dS, W.mT, dy, out=states[:-1].flatten(0, 1))
            through = through.mT
        through_nH = through.unflatten(0, (-1, ctx.heads))
        # ``after``: the gradient of the state after each chunk
        after, d_carried, d_initial = ctx.group.pass_states(
            through_nH, states, d_carried, d_final, back=True
        )
        if not ctx.needs_input_grad[5]:  # ``carried``
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
            # Above the diagonal dA is not zero, but its product with the decays is zero
            # there.
            dA = _minus_bmm(du, y.mT)
            de_in = _minus_bmm(du, S.mT)
            dA.diagonal(dim1=-2, dim2=-1).zero_()
        d_decay = (S * after).sum(-1, keepdim=True)
        if d_decay.shape != ctx.shape_of_decay:  # the rows of a state share one decay
            d_decay = d_decay.sum(1, keepdim=True)
        return dA, du, de_in, dk_out, d_decay, d_carried, d_initial, None, None
