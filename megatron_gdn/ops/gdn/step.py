"""One token of many sequences whose states lie in slots, in two launches (Triton).

The plain twin is :func:`megatron_gdn.ops.generation.step.decode`. No context calls it yet.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from ..gates import largest_beta
from ..kernels.tiles import block_dim
from .sizes import HeadSizes
from .step_kernels import prepare_step_kernel, state_step_kernel

_BLOCK_V = 32  # columns of a state for one program: enough programs for a batch of one


def step_slots(
    rows: Tensor,
    conv_weight: Tensor,
    conv_bias: Tensor | None,
    A_log: Tensor,
    dt_bias: Tensor,
    history: Tensor,
    state: Tensor,
    slots: Tensor,
    sizes: HeadSizes,
    *,
    normalise_qk: bool = True,
    allow_neg_eigval: bool = False,
    eps: float = 1e-6,
) -> Tensor:
    """The delta rule's output for one token of each sequence; updates the slots.

    The host does not wait for the device, and nothing depends on values on the host. So the call
    can be captured in a CUDA graph: a replay reads rows and slots anew.

    Args:
        rows: ``[N, P]``, columns adjacent.
        conv_weight, conv_bias: ``[C, 1, W]``, ``[C]`` or None.
        A_log, dt_bias: ``[H]``.
        history: ``[M, C, W - 1]`` in the dtype of ``rows``, contiguous; written.
        state: ``[M, H, K, V]`` fp32, contiguous; written.
        slots: int64 ``[N]``, all different.

    Returns:
        ``[N, 1, H, V]`` fp32.
    """
    N = rows.shape[0]
    G, H, K, V = sizes
    wide = {"dtype": torch.float32, "device": rows.device}
    q, k = (torch.empty(N, G, K, **wide) for _ in range(2))
    v, o = (torch.empty(N, H, V, **wide) for _ in range(2))
    g, beta = (torch.empty(N, H, **wide) for _ in range(2))
    taps = conv_weight.shape[-1]
    prepare_step_kernel[(2 * G + H + 1, N)](
        rows, conv_weight, conv_bias, A_log, dt_bias, history, slots,
        q, k, v, g, beta, rows.stride(0), eps, largest_beta(allow_neg_eigval),
        G=G, H=H, K=K, V=V, W=taps,
        BLOCK_K=block_dim(K), BLOCK_V=block_dim(V), BLOCK_H=block_dim(H),
        HAS_BIAS=conv_bias is not None, NORMALISE=normalise_qk, num_warps=1,
    )  # fmt: skip
    block_v = min(_BLOCK_V, block_dim(V))
    state_step_kernel[(triton.cdiv(V, block_v), H, N)](
        q, k, v, g, beta, state, slots, o, K**-0.5,
        G=G, H=H, K=K, V=V, BLOCK_K=block_dim(K), BLOCK_V=block_v, num_warps=4,
    )  # fmt: skip
    return o[:, None]
