"""Causal depthwise convolution with SiLU over packed or unpacked sequences, in plain torch.

Legend: B batch, T tokens, C channels, W taps, N sequences (B of them, or the packed documents).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from .autograd import first_derivative_only, uncompiled
from .documents import Documents, require_one_row
from .elementwise import sigmoid, silu
from .front.history import History

# x [B, T, C], weight [C, W], bias [C] or None, documents or None, activation or None -> y.
type Convolution = Callable[[Tensor, Tensor, Tensor | None, Documents | None, str | None], Tensor]


def _delayed(x_BTC: Tensor, delay: int, position_T: Tensor | None) -> Tensor:
    """``x`` moved ``delay`` tokens later; nothing crosses the start of a sequence."""
    if delay == 0:
        return x_BTC
    moved_BTC = F.pad(x_BTC[:, : max(x_BTC.shape[1] - delay, 0)], (0, 0, delay, 0))
    moved_BTC = moved_BTC[:, : x_BTC.shape[1]]
    if position_T is None:
        return moved_BTC
    return moved_BTC.masked_fill((position_T < delay)[:, None], 0)


def _advanced(y_BTC: Tensor, advance: int, position_T: Tensor | None) -> Tensor:
    """The transpose of :func:`_delayed`: token t receives what token t + advance sent back."""
    if advance == 0:
        return y_BTC
    if position_T is not None:
        y_BTC = y_BTC.masked_fill((position_T < advance)[:, None], 0)
    return F.pad(y_BTC[:, advance:], (0, 0, 0, min(advance, y_BTC.shape[1])))


class _CausalConv(torch.autograd.Function):
    """Saves its input only: the pre-activation is computed again in the backward."""

    @staticmethod
    def _pre_activation(x_BTC, weight_CW, bias_C, position_T) -> Tensor:
        wide = torch.promote_types(x_BTC.dtype, torch.float32)
        taps = weight_CW.shape[1]
        pre_BTC: Any = 0
        for tap in range(taps):
            delayed_BTC = _delayed(x_BTC.to(wide), taps - 1 - tap, position_T)
            pre_BTC = pre_BTC + delayed_BTC * weight_CW[:, tap].to(wide)
        return pre_BTC if bias_C is None else pre_BTC + bias_C.to(wide)

    @staticmethod
    def forward(ctx, x_BTC, weight_CW, bias_C, activation, position_T):
        ctx.save_for_backward(x_BTC, weight_CW, bias_C, position_T)
        ctx.activation = activation
        pre_BTC = _CausalConv._pre_activation(x_BTC, weight_CW, bias_C, position_T)
        return (silu(pre_BTC) if activation else pre_BTC).to(x_BTC.dtype)

    @staticmethod
    @first_derivative_only
    def backward(ctx, dy_BTC):
        x_BTC, weight_CW, bias_C, position_T = ctx.saved_tensors
        wide = torch.promote_types(x_BTC.dtype, torch.float32)
        dpre_BTC = dy_BTC.to(wide)
        if ctx.activation:
            pre_BTC = _CausalConv._pre_activation(x_BTC, weight_CW, bias_C, position_T)
            sigmoid_BTC = sigmoid(pre_BTC)
            dpre_BTC = dpre_BTC * sigmoid_BTC * (1 + pre_BTC * (1 - sigmoid_BTC))

        taps = weight_CW.shape[1]
        products = (
            _advanced(dpre_BTC, taps - 1 - tap, position_T) * weight_CW[:, tap].to(wide)
            for tap in range(taps)
        )
        dx_BTC = cast(Tensor, sum(products)).to(x_BTC.dtype)
        dweight_CW = torch.stack(
            [
                (dpre_BTC * _delayed(x_BTC.to(wide), taps - 1 - tap, position_T)).sum((0, 1))
                for tap in range(taps)
            ],
            dim=1,
        ).to(weight_CW.dtype)
        dbias_C = None if bias_C is None else dpre_BTC.sum((0, 1)).to(bias_C.dtype)
        return dx_BTC, dweight_CW, dbias_C, None, None


def _with_history(
    x_BTC: Tensor, state_NCW: Tensor, documents: Documents | None
) -> tuple[Tensor, Documents | None, Tensor]:
    """Put the last W - 1 remembered inputs in front of every sequence.

    Returns the longer buffer, its boundaries, and the indices ``[T]`` of the original tokens.
    """
    history_NHC = state_NCW[..., 1:].transpose(1, 2).to(x_BTC.dtype)
    extra = history_NHC.shape[1]
    if documents is None:
        tokens = torch.arange(x_BTC.shape[1], device=x_BTC.device) + extra
        return torch.cat([history_NHC, x_BTC], dim=1), None, tokens
    pieces, tokens, start = [], [], 0
    for index, piece in enumerate(x_BTC[0].split(documents.lengths)):
        pieces += [history_NHC[index], piece]
        tokens.append(torch.arange(piece.shape[0], device="cpu") + start + extra)
        start += extra + piece.shape[0]
    offsets = [offset + index * extra for index, offset in enumerate(documents.offsets)]
    longer = Documents(tuple(offsets), documents.device)
    return torch.cat(pieces)[None], longer, torch.cat(tokens).to(x_BTC.device)


def _last_inputs(x_BTC: Tensor, documents: Documents | None, taps: int) -> Tensor:
    """The last ``taps`` inputs of every sequence, zeros where it is shorter: ``[N, C, W]``."""
    sequences = x_BTC if documents is None else x_BTC[0].split(documents.lengths)
    last = []
    for sequence_TC in sequences:
        tail_TC = sequence_TC[max(sequence_TC.shape[0] - taps, 0) :]
        last.append(F.pad(tail_TC, (0, 0, taps - tail_TC.shape[0], 0)).T)
    return torch.stack(last)


@uncompiled  # Dynamo would replace the backward by one that gives x no gradient
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

    x is zero (or ``initial_state``) before the start of a sequence: nothing crosses a document
    boundary, in either direction. Sums are in fp32 (fp64 for fp64 input) and rounded once.
    Deterministic; of the activations, only ``x`` is saved for the backward.

    Args:
        x: ``[B, T, C]``, any float dtype, any strides.
        weight: ``[C, W]``.
        bias: ``[C]`` or None.
        activation: ``"silu"`` (or its other name ``"swish"``) or None.
        cu_seqlens: cumulative lengths of packed documents (then B must be 1).
        initial_state: ``[N, C, W]``, the last W inputs before each sequence (N = B, or the number
            of documents). The oldest of the W is never read.
        output_final_state: also return the last W inputs of each sequence, ``[N, C, W]``.

    Returns:
        ``y`` (``[B, T, C]`` in ``x.dtype``) and the final state or None.

    Raises:
        ValueError: shapes that do not fit, packed input with B > 1, an unknown activation.
    """
    if activation not in ("silu", "swish", None):
        raise ValueError(f"unknown activation {activation!r}; use 'silu', 'swish' or None.")
    if x.dim() != 3 or weight.dim() != 2 or weight.shape[0] != x.shape[2]:
        raise ValueError(
            f"causal_conv1d takes x [B, T, C] and weight [C, W], got {tuple(x.shape)} and "
            f"{tuple(weight.shape)}."
        )
    documents = None
    if cu_seqlens is not None:
        require_one_row(x.shape[0], f"x of shape {tuple(x.shape)}")
        documents = Documents.from_cu_seqlens(cu_seqlens, x.shape[1], device=x.device)
    channels, taps = weight.shape
    source, boundaries, tokens = x, documents, None
    if initial_state is not None:
        sequences = x.shape[0] if documents is None else len(documents.lengths)
        if tuple(initial_state.shape) != (sequences, channels, taps):
            raise ValueError(
                f"initial_state must be [N, C, W] = {(sequences, channels, taps)}, got "
                f"{tuple(initial_state.shape)}."
            )
        source, boundaries, tokens = _with_history(x, initial_state, documents)
    position_T = None if boundaries is None else boundaries.position_T
    y = _CausalConv.apply(source, weight, bias, activation is not None, position_T)
    if tokens is not None:
        y = y.index_select(1, tokens)
    final_state = _last_inputs(source, boundaries, taps) if output_final_state else None
    return y, final_state


def _convolution(
    x_BSC: Tensor,
    weight_CW: Tensor,
    bias_C: Tensor | None,
    documents: Documents | None,
    activation: str | None,
) -> Tensor:
    if documents is None:
        return causal_conv1d(x_BSC, weight_CW, bias_C, activation)[0]
    rows = [
        causal_conv1d(x, weight_CW, bias_C, activation, cu_seqlens=documents)[0]
        for x in x_BSC.split(1)
    ]
    return torch.cat(rows)


def convolve_rows(
    x_BSC: Tensor,
    weight_CW: Tensor,
    bias_C: Tensor | None,
    documents: Documents | None,
    history: History | None = None,
    convolution: Convolution = _convolution,
) -> Tensor:
    """conv + SiLU; documents, if any, have the same boundaries in every row."""
    if history is None:
        return convolution(x_BSC, weight_CW, bias_C, documents, "silu")
    x_wide = x_BSC.to(torch.promote_types(x_BSC.dtype, torch.float32))
    pre_BSC = convolution(x_wide, weight_CW, bias_C, documents, None)
    return silu(history.added_to(pre_BSC, weight_CW)).to(x_BSC.dtype)
