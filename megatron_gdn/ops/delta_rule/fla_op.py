"""flash-linear-attention's (fla's) public function under this package's name; it needs a GPU.

fla hands the rule to FlashQLA by itself where that is installed and fits (SM90 and newer,
K = V = 128, bf16 or fp16).
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..documents import Documents
from .checks import check_rule_inputs
from .obstacles import FLA_INSTALL_HINT


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
        raise ImportError(
            f"backend 'fla' needs flash-linear-attention: {FLA_INSTALL_HINT}"
        ) from error
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
