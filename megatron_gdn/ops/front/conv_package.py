"""The convolution of a plain front by the package causal-conv1d, for a GPU without Triton.

Legend: B batch, S tokens, C channels, W taps.
"""

from __future__ import annotations

import os
from functools import cache, partial
from importlib import import_module
from importlib.util import find_spec

import torch
from torch import Tensor

from .. import conv
from ..documents import Documents
from ..obstacles import installed_version, version_tuple

_OLDEST = (1, 6)  # the first whose backward can add in a fixed order
_INSTALL = 'pip install "megatron-gdn[conv1d]"'
_FIXED_ORDER = "CAUSAL_CONV1D_DETERMINISTIC"  # the package reads it in every backward


def why_not_conv_package(
    device: str, dtype: torch.dtype, taps: int, widths: tuple[int, ...], aligned: bool = False
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
    if aligned:
        return "causal-conv1d was not seen to keep a token's bits, which batch_invariant_mode asks"
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


def _convolution(
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


# As the plain function, where :func:`why_not_conv_package` has no objection.
convolve_rows = partial(conv.convolve_rows, convolution=_convolution)
