"""Causal depthwise convolution with SiLU, in plain torch or by the package causal-conv1d."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from .autograd import first_derivative_only, uncompiled
from .documents import Documents, require_one_row
from .elementwise import sigmoid, silu
from .front.history import History, history_of, last_rows
from .obstacles import installed_version, version_tuple

_OLDEST = (1, 6)  # the first causal-conv1d whose backward can add in a fixed order
_INSTALL = 'pip install "megatron-gdn[conv1d]"'
_FIXED_ORDER = "CAUSAL_CONV1D_DETERMINISTIC"  # the package reads it in every backward

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
    sequences = x.shape[0] if documents is None else len(documents.lengths)
    history = None
    if initial_state is None:
        before = x.new_zeros(sequences, channels, taps) if output_final_state else None
    else:
        if tuple(initial_state.shape) != (sequences, channels, taps):
            raise ValueError(
                f"initial_state must be [N, C, W] = {(sequences, channels, taps)}, got "
                f"{tuple(initial_state.shape)}."
            )
        before = initial_state.to(x.dtype)
        history = history_of(before[..., 1:], documents, x.shape[1]) if taps > 1 else None
    y = convolve_rows(x, weight, bias, documents, history, activation=activation)
    if not output_final_state or before is None:
        return y, None
    return y, last_rows(x.transpose(0, 1), before, documents)


def plain_convolution(
    x_BSC: Tensor,
    weight_CW: Tensor,
    bias_C: Tensor | None,
    documents: Documents | None,
    activation: str | None,
) -> Tensor:
    position_T = None if documents is None else documents.position_T
    return _CausalConv.apply(x_BSC, weight_CW, bias_C, activation is not None, position_T)


def package_convolution(
    x_BSC: Tensor,
    weight_CW: Tensor,
    bias_C: Tensor | None,
    documents: Documents | None,
    activation: str | None,
) -> Tensor:
    """Its backward adds in a fixed order: this sets ``CAUSAL_CONV1D_DETERMINISTIC=1``."""
    from causal_conv1d import causal_conv1d_fn  # pyright: ignore[reportMissingImports]

    os.environ.setdefault(_FIXED_ORDER, "1")
    index_BS = None
    if documents is not None:
        first_S = documents.position_T == 0
        index_BS = first_S.cumsum(0, dtype=torch.int32).expand(x_BSC.shape[0], -1)
    # Channels lie side by side, as the package wants them for packed rows.
    y_BCS = causal_conv1d_fn(
        x_BSC.contiguous().transpose(1, 2), weight_CW.contiguous(), bias_C,
        seq_idx=index_BS, activation=activation,
    )  # fmt: skip
    y_BSC = y_BCS.transpose(1, 2)
    if y_BSC.requires_grad:
        y_BSC.register_hook(torch.Tensor.contiguous)  # it refuses gradients of other strides
    return y_BSC


@uncompiled  # Dynamo would replace the backward by one that gives x no gradient
def convolve_rows(
    x_BSC: Tensor,
    weight_CW: Tensor,
    bias_C: Tensor | None,
    documents: Documents | None,
    history: History | None = None,
    convolution: Convolution = plain_convolution,
    activation: str | None = "silu",
) -> Tensor:
    """conv + SiLU; documents, if any, have the same boundaries in every row."""
    if history is None:
        return convolution(x_BSC, weight_CW, bias_C, documents, activation)
    x_wide = x_BSC.to(torch.promote_types(x_BSC.dtype, torch.float32))
    pre_BSC = convolution(x_wide, weight_CW, bias_C, documents, None)
    pre_BSC = history.added_to(pre_BSC, weight_CW)
    return (silu(pre_BSC) if activation else pre_BSC).to(x_BSC.dtype)


def why_not_conv_package(
    device: str, dtype: torch.dtype, taps: int, widths: tuple[int, ...]
) -> str | None:
    """Why causal-conv1d cannot convolve sections of these widths; None if it can."""
    if device != "cuda":
        return f"causal-conv1d runs on a GPU, not on {device}"
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"causal-conv1d computes in fp32, not in {dtype}"
    if not 2 <= taps <= 4:
        return f"causal-conv1d takes 2 to 4 taps, not {taps}"
    if any(width % 8 for width in widths):
        return f"causal-conv1d takes channels in eights, not {list(widths)}"
    if os.environ.get(_FIXED_ORDER, "1")[:1] == "0":
        return f"{_FIXED_ORDER}=0 lets causal-conv1d add in another order every time; unset it"
    return _why_not_installed()


@cache
def _why_not_installed() -> str | None:
    if find_spec("causal_conv1d") is None:
        return f"causal-conv1d is not installed ({_INSTALL})"
    installed = installed_version("causal-conv1d")
    if installed is None or version_tuple(installed)[:2] < _OLDEST:
        return (
            f"causal-conv1d {installed or 'without a version'} adds gradients in another order "
            f"every time; install 1.6 or newer ({_INSTALL})"
        )
    try:
        import_module("causal_conv1d")
    except (ImportError, OSError) as error:  # built for another torch
        return f"causal-conv1d cannot be imported: {error}"
    return None
