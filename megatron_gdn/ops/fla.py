"""The one file that imports flash-linear-attention (fla); everything here needs a GPU.

fla >= 0.5 hands the rule to FlashQLA by itself where that is installed and fits (SM90 and newer,
K = V = 128, bf16 or fp16).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

import torch
from torch import Tensor

from .checks import check_rule_inputs
from .documents import Documents

INSTALL_HINT = 'pip install "megatron-gdn[fla]"'


def _version_tuple(text: str) -> tuple[int, ...]:
    numbers = []
    for part in text.split("+")[0].split(".")[:3]:
        digits = "".join(c for c in part if c.isdigit())
        numbers.append(int(digits or 0))
    return tuple(numbers)


@cache
def why_not_fla(device: torch.device | None = None) -> str | None:
    """Why fla's kernels cannot train on this machine, and the fix; None when they can."""
    if find_spec("fla") is None:
        return f"flash-linear-attention is not installed ({INSTALL_HINT})"
    if not torch.cuda.is_available():
        return "flash-linear-attention needs a GPU and torch sees none"
    try:
        triton = _version_tuple(version("triton"))
    except PackageNotFoundError:
        return "flash-linear-attention needs triton, which is not installed"
    hopper = torch.cuda.get_device_capability(device)[0] == 9
    if hopper and (3, 4, 0) <= triton < (3, 7, 1) and find_spec("tilelang") is None:
        # fla issue 640: the Triton backward computes wrong dg and db there; fla itself raises.
        return (
            f"Triton {'.'.join(map(str, triton))} miscompiles fla's backward on Hopper; install "
            f"tilelang, or Triton 3.7.1 or newer"
        )
    return None


def fla_chunk_gated_delta_rule(
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
    """fla's ``chunk_gated_delta_rule`` under this package's signature.

    Raises:
        ValueError: shapes; states asked for or given while some documents are empty.
        ImportError: fla is not installed.
    """
    documents = check_rule_inputs(query, key, value, g, beta, initial_state, cu_seqlens)
    try:
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule
    except ImportError as error:
        raise ImportError(f"backend 'fla' needs flash-linear-attention: {INSTALL_HINT}") from error
    boundaries = {}
    if documents is not None:
        if 0 in documents.lengths and (initial_state is not None or output_final_state):
            raise ValueError(
                "backend 'fla' has no states for empty documents; remove the repeated offsets "
                "from cu_seqlens, or use backend='reference'."
            )
        boundaries = {
            "cu_seqlens": documents.cu_seqlens,
            "cu_seqlens_cpu": documents.cu_seqlens_cpu,
        }
    return chunk_gated_delta_rule(
        query,
        key,
        value,
        g,
        beta,
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        chunk_size=chunk_size,
        **boundaries,
    )
