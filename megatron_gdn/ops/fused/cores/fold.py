"""Chaining the affine maps ``S_out = through @ S_in + local`` of the parts of each sequence.

All in fp32, one batched product per place in the sequence.

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


def _start(like: Tensor, parts: Parts, given: Tensor | None) -> Tensor:
    """``[N, H, K, V]`` to be overwritten: a copy of what is given, or zeros."""
    if given is None:
        return like.new_zeros(len(parts.sequences) - 1, *like.shape[1:])
    return given.to(like.dtype, copy=True)


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
    (opening, _), *rest = parts.steps
    chain = torch.cat([local[opening], through[opening]], dim=-1)
    for part, sequence in rest:
        longer = _product(through[part], chain[sequence])
        longer[..., :V] += local[part]
        chain.index_copy_(0, sequence, longer)
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
    state = _start(local, parts, initial)
    entering = torch.empty_like(local)
    for part, sequence in parts.steps:
        before = state[sequence]
        entering.index_copy_(0, part, before)
        state.index_copy_(0, sequence, _product(through[part], before, local[part]))
    return entering


def _back(
    d_local: Tensor, through: Tensor, parts: Parts, d_final: Tensor | None
) -> tuple[Tensor, Tensor]:
    state = _start(d_local, parts, d_final)
    leaving = torch.empty_like(d_local)
    for part, sequence in reversed(parts.steps):
        after = state[sequence]
        leaving.index_copy_(0, part, after)
        back = through[part].transpose(-1, -2)
        state.index_copy_(0, sequence, _product(back, after, d_local[part]))
    return leaving, state


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
    return _back(d_local, through, parts, d_final)[0]


def initial_gradients(d_local: Tensor, through: Tensor | None, parts: Parts) -> Tensor:
    """The gradient of the initial states, ``[N, H, K, V]``, when the final states get none."""
    return d_local if parts.are_sequences else _back(d_local, through, parts, None)[1]
