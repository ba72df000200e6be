"""Chaining the affine maps ``S_out = through @ S_in + local`` of the parts of each sequence.

Legend: N sequences, P parts, H value heads, K key dim, V value dim.
"""

from __future__ import annotations

from torch import Tensor

from .chains import IDENTITY, follow
from .parts import Parts


def compose(local: Tensor, through: Tensor, parts: Parts) -> tuple[Tensor, Tensor]:
    """The maps of whole sequences from those of their parts.

    Args:
        local: ``[P, H, K, V]`` fp32.
        through: ``[P, H, K, K]`` fp32.

    Returns:
        ``local`` ``[N, H, K, V]`` and ``through`` ``[N, H, K, K]``. If some sequence is cut, they
        are views of one ``[N, H, K, V + K]`` tensor.
    """
    if parts.are_sequences:
        return local, through
    (_, H, K, V), N = local.shape, len(parts.whole.chains)
    whole = local.new_empty(N, H, K, V + K)
    follow(local, through, parts.whole, whole, IDENTITY)
    return whole[..., :V], whole[..., V:]


def entering_states(
    local: Tensor, through: Tensor, parts: Parts, initial: Tensor | None
) -> Tensor | None:
    """The state that enters every part, ``[P, H, K, V]``; None if all are zero.

    Args:
        initial: ``[N, H, K, V]`` fp32, the states that enter the sequences; None is zero.
    """
    if parts.are_sequences:
        return None if initial is None else initial.contiguous()
    initial = None if initial is None else initial.to(local.dtype).contiguous()
    return follow(local, through, parts.entering, local.new_empty(local.shape), initial)


def leaving_gradients(
    d_local: Tensor | None, through: Tensor | None, parts: Parts, d_final: Tensor | None
) -> Tensor | None:
    """The gradient of the state that leaves every part, ``[P, H, K, V]``; None: all are zero.

    Follows ``dS_in = through^T dS_out + d_local`` from the last part of a sequence to its first.

    Args:
        d_local: ``[P, H, K, V]`` fp32; like ``through``, read only if some sequence is cut.
        through: ``[P, H, K, K]`` fp32.
        d_final: ``[N, H, K, V]`` fp32, the gradient of the final states; None is zero.
    """
    if parts.are_sequences:
        return None if d_final is None else d_final.contiguous()
    assert d_local is not None and through is not None
    d_final = None if d_final is None else d_final.to(d_local.dtype).contiguous()
    return follow(d_local, through.mT, parts.leaving, d_local.new_empty(d_local.shape), d_final)


def initial_gradients(d_local: Tensor, through: Tensor | None, parts: Parts) -> Tensor:
    """The gradient of the initial states, ``[N, H, K, V]``, if that of the final states is 0."""
    if parts.are_sequences:
        return d_local
    assert through is not None
    out = d_local.new_empty(len(parts.opening.chains), *d_local.shape[1:])
    return follow(d_local, through.mT, parts.opening, out)
