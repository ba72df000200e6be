"""Shape checks shared by every implementation of the gated delta rule."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ...documents import Documents, require_one_row
from ..sizes import require_even_groups


def check_rule_inputs(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | Sequence[int] | Documents | None,
) -> Documents | None:
    """Check the arguments of :func:`megatron_gdn.ops.gated_delta_rule`.

    Returns:
        The resolved document boundaries, or None when the input is not packed.

    Raises:
        ValueError: says which shape was expected and which was given.
    """
    if key.dim() != 4 or value.dim() != 4:
        raise ValueError(
            f"key and value must be [B, T, heads, dim], got {tuple(key.shape)} and "
            f"{tuple(value.shape)}."
        )
    B, T, key_heads, K = key.shape
    value_heads, V = value.shape[2:]
    expected = {
        "query": (query, (B, T, key_heads, K)),
        "value": (value, (B, T, value_heads, V)),
        "g": (g, (B, T, value_heads)),
        "beta": (beta, (B, T, value_heads)),
    }
    for name, (tensor, shape) in expected.items():
        if tuple(tensor.shape) != shape:
            raise ValueError(
                f"{name} must have shape {shape} to fit key {tuple(key.shape)} and value "
                f"{tuple(value.shape)}, got {tuple(tensor.shape)}."
            )
    require_even_groups(key_heads, value_heads)
    documents = None
    if cu_seqlens is not None:
        require_one_row(B, f"key of shape {tuple(key.shape)}")
        documents = Documents.from_cu_seqlens(cu_seqlens, T, device=key.device)
    sequences = B if documents is None else len(documents.lengths)
    state_shape = (sequences, value_heads, K, V)
    if initial_state is not None and tuple(initial_state.shape) != state_shape:
        raise ValueError(
            f"initial_state must be [N, value heads, K, V] = {state_shape}, got "
            f"{tuple(initial_state.shape)}."
        )
    return documents
