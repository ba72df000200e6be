"""Causal depthwise convolution with SiLU, in plain torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .autograd import output_without_tokens, run_saving_inputs, uncompiled
from .documents import Documents, require_one_row
from .elementwise import silu
from .front.history import History, history_of, last_rows


def _pre_activation(
    x_BTC: Tensor, weight_CW: Tensor, bias_C: Tensor | None, position_T: Tensor | None
) -> Tensor:
    """The convolution with bias, before the activation: ``[B, T, C]`` in fp32 (fp64).

    ``position_T``: each token's number in its document, from 0; None: each batch row is
    one document.
    """
    wide = torch.promote_types(x_BTC.dtype, torch.float32)
    tokens = x_BTC.shape[1]
    past = weight_CW.shape[1] - 1
    padded_BTC = F.pad(x_BTC.to(wide), (0, 0, past, 0))
    pre_BTC: Any = 0
    for tap in range(past + 1):
        distance = past - tap  # the tap reads the token ``distance`` tokens before
        x_BTC = padded_BTC[:, tap : tap + tokens]
        if position_T is not None and distance:
            other_document = position_T < distance
            x_BTC = x_BTC.masked_fill(other_document[:, None], 0)
        pre_BTC = pre_BTC + x_BTC * weight_CW[:, tap].to(wide)
    if bias_C is None:
        return pre_BTC
    return pre_BTC + bias_C.to(wide)


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = "silu",
    *,
    cu_seqlens: Tensor | Sequence[int] | Documents | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Causal depthwise convolution along the sequence, then SiLU.

        y[t, c] = silu( bias[c] + sum_w weight[c, w] * x[t - (W - 1) + w, c] )

    Before the start of a sequence x is zero, or ``initial_state``; no value and no
    gradient crosses a document boundary. Sums are in fp32 (fp64 for fp64 input) and
    rounded once. The result is deterministic. Autograd saves only the arguments, since
    the backward computes the convolution again.

    Args:
        x: ``[B, T, C]``, any float dtype, any strides.
        weight: ``[C, W]``.
        bias: ``[C]`` or None.
        activation: ``"silu"``, ``"swish"`` (the same function) or None (no activation).
        cu_seqlens: cumulative lengths of packed documents (then B must be 1).
        initial_state: ``[N, C, W]``, the last W inputs before each sequence (N = B, or
            the number of documents). The oldest of the W inputs is never read.
        output_final_state: also return the last W inputs of each sequence,
            ``[N, C, W]``.

    Returns:
        ``y`` (``[B, T, C]`` in ``x.dtype``) and the final state or None.

    Raises:
        ValueError: shapes that do not fit, packed input with B > 1, an unknown
            activation.
    """
    if activation not in ("silu", "swish", None):
        raise ValueError(
            f"unknown activation {activation!r}; use 'silu', 'swish' or None."
        )
    if x.dim() != 3 or weight.dim() != 2 or weight.shape[0] != x.shape[2]:
        raise ValueError(
            f"causal_conv1d takes x [B, T, C] and weight [C, W], got {tuple(x.shape)} "
            f"and {tuple(weight.shape)}."
        )
    documents = None
    if cu_seqlens is not None:
        require_one_row(x.shape[0], f"x of shape {tuple(x.shape)}")
        documents = Documents.from_cu_seqlens(cu_seqlens, x.shape[1], device=x.device)
    if documents is None:
        sequences = x.shape[0]
    else:
        sequences = len(documents.lengths)
    shape = (sequences,) + weight.shape
    taps = weight.shape[1]
    if initial_state is None:
        before = x.new_zeros(shape)
        history = None
    elif tuple(initial_state.shape) != shape:
        raise ValueError(
            f"initial_state must be [N, C, W] = {shape}, got "
            f"{tuple(initial_state.shape)}."
        )
    else:
        before = initial_state.to(x.dtype)
        if taps > 1:
            history = history_of(before[..., 1:], documents, x.shape[1])
        else:
            history = None
    y = convolve_rows(x, weight, bias, documents, history, activation=activation)
    if output_final_state:
        final = last_rows(x.transpose(0, 1), before, documents)
    else:
        final = None
    return y, final


@uncompiled  # if Dynamo compiled this function, x would get no gradient
def convolve_rows(
    x_BSC: Tensor,
    weight_CW: Tensor,
    bias_C: Tensor | None,
    documents: Documents | None,
    history: History | None,
    activation: str | None = "silu",
) -> Tensor:
    """The convolution and ``activation`` of each batch row, ``[B, S, C]``.

    ``documents`` are the boundaries in every batch row, ``history`` the rows before
    each sequence (None: zeros). Autograd saves no intermediate tensor: the backward
    computes them again.
    """
    position_T = None
    if documents is not None:
        position_T = documents.position_T
    rows_before = None
    if history is not None:
        rows_before = history.rows
    if not x_BSC.numel():
        return output_without_tokens(
            x_BSC, weight_CW, bias_C, rows_before, width=x_BSC.shape[2]
        )

    def convolved(
        x: Tensor, weight: Tensor, bias: Tensor | None, rows_before: Tensor | None
    ) -> Tensor:
        """The result ``[B, S, C]`` for these tensors; autograd can differentiate it.

        The first W - 1 tokens of each sequence also read ``rows_before``;
        ``add_lead_in_to`` adds this part of the convolution.
        """
        y = _pre_activation(x, weight, bias, position_T)
        if history is not None:
            assert rows_before is not None
            y = history._replace(rows=rows_before).add_lead_in_to(y, weight)
        if activation:
            y = silu(y)
        return y.to(x.dtype)

    return run_saving_inputs(convolved, x_BSC, weight_CW, bias_C, rows_before)
