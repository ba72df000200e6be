"""Chaining the affine maps ``S_out = through @ S_in + local`` of the parts of each sequence.

One batched product per place in the sequence, all in full fp32.

Legend: N sequences, P parts, H value heads, K key dim, V value dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...fp32_matmul import full_fp32_matmul
from .parts import Parts


def _product(through: Tensor, state: Tensor, add: Tensor | None = None) -> Tensor:
    """``through @ state + add``, batched over all but the last two dims."""
    a, b = through.flatten(0, 1), state.flatten(0, 1)
    with full_fp32_matmul(a.device.type):
        out = torch.bmm(a, b) if add is None else torch.baddbmm(add.flatten(0, 1), a, b)
    return out.view(*state.shape[:2], *out.shape[1:])


def compose(local: Tensor, through: Tensor, parts: Parts) -> tuple[Tensor, Tensor]:
    """The maps of whole sequences from those of their parts.

    Args:
        local: ``[P, H, K, V]`` fp32.
        through: ``[P, H, K, K]`` fp32.

    Returns:
        ``local`` ``[N, H, K, V]`` and ``through`` ``[N, H, K, K]``.
    """
    if parts.are_sequences:
        return local, through
    V = local.shape[-1]
    chain = torch.cat([local[parts.opening], through[parts.opening]], dim=-1)
    for part, _, sequence in parts.links:
        longer = _product(through[part], chain if sequence is None else chain[sequence])
        longer[..., :V] += local[part]
        chain = longer if sequence is None else chain.index_copy_(0, sequence, longer)
    return chain[..., :V].contiguous(), chain[..., V:].contiguous()


def entering_states(
    local: Tensor, through: Tensor, parts: Parts, initial: Tensor | None
) -> Tensor | None:
    """The state that enters every part, ``[P, H, K, V]``; None where all of them are zero.

    Args:
        initial: ``[N, H, K, V]`` fp32, what enters the sequences; None is zero.
    """
    if parts.are_sequences:
        return None if initial is None else initial.contiguous()
    entering = torch.empty_like(local)
    _put(entering, parts.opening, initial)
    for part, previous, _ in parts.links:
        state = _product(through[previous], entering[previous], local[previous])
        entering.index_copy_(0, part, state)
    return entering


def _put(states: Tensor, index: Tensor, given: Tensor | None) -> None:
    if given is None:
        states.index_fill_(0, index, 0.0)
    else:
        states.index_copy_(0, index, given.to(states.dtype))


def leaving_gradients(
    d_local: Tensor | None, through: Tensor | None, parts: Parts, d_final: Tensor | None
) -> Tensor | None:
    """The gradient of the state that leaves every part, ``[P, H, K, V]``; None: all are zero.

    Follows ``dS_in = through^T dS_out + d_local`` from the last part of a sequence to its first.

    Args:
        d_local: ``[P, H, K, V]`` fp32; like ``through``, not read where no sequence is cut.
        through: ``[P, H, K, K]`` fp32.
        d_final: ``[N, H, K, V]`` fp32, the gradient of the final states; None is zero.
    """
    if parts.are_sequences:
        return None if d_final is None else d_final.contiguous()
    leaving = torch.empty_like(d_local)
    _put(leaving, parts.closing, d_final)
    for part, previous, _ in reversed(parts.links):
        d_state = _product(through[part].transpose(-1, -2), leaving[part], d_local[part])
        leaving.index_copy_(0, previous, d_state)
    return leaving


def initial_gradients(d_local: Tensor, through: Tensor | None, parts: Parts) -> Tensor:
    """The gradient of the initial states, ``[N, H, K, V]``, when the final states get none."""
    if parts.are_sequences:
        return d_local
    leaving, first = leaving_gradients(d_local, through, parts, None), parts.opening
    return _product(through[first].transpose(-1, -2), leaving[first], d_local[first])
