"""One token of many Mamba2 sequences whose states lie in slots, in two launches (Triton).

The plain twin is :func:`megatron_gdn.ops.generation.step.decode`. No context calls it yet.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from ..kernels.tiles import block_dim
from ..layout import Layout
from .front_triton import sizes_of
from .rule.base import UNLIMITED
from .step_kernels import mamba2_state_step_kernel, prepare_mamba2_step_kernel

_BLOCK_V = 32  # columns of a state for one program: enough programs for a batch of one


def mamba2_step_slots(
    rows: Tensor,
    conv_weight: Tensor,
    conv_bias: Tensor | None,
    A_log: Tensor,
    dt_bias: Tensor,
    D: Tensor,
    history: Tensor,
    state: Tensor,
    slots: Tensor,
    layout: Layout,
    *,
    dt_limit: tuple[float, float] = UNLIMITED,
) -> Tensor:
    """The output of one token of each sequence, with D's skip; updates the slots.

    The host does not wait for the device, and nothing depends on values on the host. So the call
    can be captured in a CUDA graph: a replay reads rows and slots anew.

    Args:
        rows: ``[N, P]``, z | x | B | C | dt, columns adjacent.
        conv_weight, conv_bias: ``[C, 1, W]``, W >= 2, ``[C]`` or None.
        A_log, dt_bias: ``[H]``.
        D: ``[H]`` or ``[H V]``.
        history: ``[M, C, W - 1]`` in the dtype of ``rows``, contiguous; written.
        state: ``[M, H, K, V]`` fp32, contiguous; written.
        slots: int64 ``[N]``, all different.

    Returns:
        ``[N, 1, H, V]`` fp32.
    """
    N = rows.shape[0]
    H, G, V, K = sizes_of(layout)
    wide = {"dtype": torch.float32, "device": rows.device}
    x, o = (torch.empty(N, H, V, **wide) for _ in range(2))
    B, C = (torch.empty(N, G, K, **wide) for _ in range(2))
    dt, g = (torch.empty(N, H, **wide) for _ in range(2))
    shape = {"H": H, "G": G, "V": V, "K": K, "BLOCK_K": block_dim(K)}
    prepare_mamba2_step_kernel[(H + 2 * G + 1, N)](
        rows[:, layout.conv_columns.start :], conv_weight, conv_bias, A_log, dt_bias, history,
        slots, x, B, C, dt, g, rows.stride(0), *dt_limit,
        W=conv_weight.shape[-1], BLOCK_V=block_dim(V), BLOCK_H=block_dim(H),
        HAS_BIAS=conv_bias is not None, num_warps=1, **shape,
    )  # fmt: skip
    block_v = min(_BLOCK_V, block_dim(V))
    mamba2_state_step_kernel[(triton.cdiv(V, block_v), H, N)](
        x, B, C, dt, g, D, state, slots, o,
        BLOCK_V=block_v, D_OF_CHANNELS=D.numel() != H, num_warps=4, **shape,
    )  # fmt: skip
    return o[:, None]
