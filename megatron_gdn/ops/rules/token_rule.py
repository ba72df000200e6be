"""The recurrences of all mixers, token by token: for the tests, and for a decode step.

Each head has a state ``S [K, V]``. For each token S decays, gets one of three updates,
and is read:

    S_t = exp(g_t) S_{t-1}                        g_t is one number, or one for each row
    S_t = S_t + beta_t k_t (v_t - S_t^T k_t)^T    the delta rule
    S_t = S_t + k_t (v_t - S_t^T e_t)^T           erases with a key e
    S_t = S_t + k_t v_t^T                         erases nothing
    o_t = S_t^T q_t

R is the number of value heads per key head, H = G R.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor


def recurrence(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor | None,
    initial: Tensor | None,
    offsets: tuple[int, ...] | None = None,
    erased: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The output ``[B, T, H, V]`` and the final states ``[N, H, K, V]``;
    differentiable.

    Args:
        q, k: ``[B, T, G, K]``; R heads of v share one head of q, k. All tensors have
            one dtype.
        v: ``[B, T, H, V]``.
        g: ``[B, T, H]``, ``[B, T, H, K]`` or ``[B, T, G, K]``.
        beta: ``[B, T, H]``, for the update ``S += beta k (v - S^T k)^T``.
        erased: ``[B, T, G, K]``, for ``S += k (v - S^T erased)^T``. If ``beta`` and
            ``erased`` are None, the update is ``S += k v^T``.
        initial: ``[N, H, K, V]``; None means zeros.
        offsets: cumulative lengths of the sequences in one row; None: each row is a
            sequence.

    There must be a token.
    """
    groups, K = k.shape[2:]
    v_BTGRV = v.unflatten(2, (groups, -1))
    g_BTGRK = g.unflatten(2, (groups, -1))
    if g.dim() == 3:
        g_BTGRK = g_BTGRK[..., None]
    if beta is None:
        beta_BTGR = None
    else:
        beta_BTGR = beta.unflatten(2, (groups, -1))
    # Each entry has batch rows, their first token and their end. Sequences in different
    # batch rows are computed together; sequences that lie end to end in one row are
    # computed one after another.
    if offsets is None:
        together = [(slice(None), 0, q.shape[1])]
        rows_together = len(v)
    else:
        ends = pairwise(offsets)
        together = [
            (slice(n, n + 1), start, end) for n, (start, end) in enumerate(ends)
        ]
        rows_together = 1
    rows = slice(0, rows_together)

    outputs = []
    states = []
    for sequences, start, end in together:
        if initial is not None:
            S = initial[sequences].to(v.dtype).unflatten(1, (groups, -1))
        else:
            S = v.new_zeros((rows_together,) + v_BTGRV.shape[2:4] + (K, v.shape[3]))
        for t in range(start, end):
            q_K = q[rows, t, :, None, :, None]
            k_K = k[rows, t, :, None, :, None]
            write_K = k_K
            write_V = v_BTGRV[rows, t, :, :, None]
            S = g_BTGRK[rows, t, ..., None].exp() * S
            if beta_BTGR is not None:
                write_V = write_V - (S * k_K).sum(-2, keepdim=True)
                write_K = beta_BTGR[rows, t, :, :, None, None] * k_K
            elif erased is not None:
                e_K = erased[rows, t, :, None, :, None]
                write_V = write_V - (S * e_K).sum(-2, keepdim=True)
            S = S + write_K * write_V
            outputs.append((S * q_K).sum(-2).flatten(1, 2))
        states.append(S.flatten(1, 2))
    return torch.stack(outputs, dim=1), torch.cat(states)
