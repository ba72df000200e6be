"""Chaining the affine maps ``S_out = through @ S_in + local`` of the parts of each sequence.

One batched product per place in the sequence, or per link where sequences are few: then nothing
needs to be gathered. All in full fp32.

Legend: N sequences, P parts, H value heads, K key dim, V value dim.
"""

from __future__ import annotations

from itertools import pairwise

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
    if parts.chains is not None:
        whole = _compose_few(local, through, parts.chains)
        return whole[..., :V], whole[..., V:]
    chain = torch.cat([local[parts.opening], through[parts.opening]], dim=-1)
    for part, _, sequence in parts.links:
        longer = _product(through[part], chain if sequence is None else chain[sequence])
        longer[..., :V].add_(local[part])
        chain = longer if sequence is None else chain.index_copy_(0, sequence, longer)
    return chain[..., :V].contiguous(), chain[..., V:].contiguous()


def _compose_few(local: Tensor, through: Tensor, chains: tuple[range, ...]) -> Tensor:
    """``[N, H, K, V + K]``, local beside through."""
    V, K = local.shape[-1], through.shape[-1]
    whole = local.new_empty(len(chains), *local.shape[1:3], V + K)
    locals_P, throughs_P = local.unbind(), through.unbind()
    with full_fp32_matmul(local.device.type):
        for parts, out in zip(chains, whole.unbind(), strict=True):
            first, *others = parts
            pair = [locals_P[first], throughs_P[first]]
            chain = torch.cat(pair, dim=-1) if others else torch.cat(pair, dim=-1, out=out)
            for part in others:
                made = {"out": out} if part == parts[-1] else {}
                chain = torch.bmm(throughs_P[part], chain, **made)
                chain[..., :V].add_(locals_P[part])  # `+=` would copy the sum onto itself
    return whole


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
    if parts.chains is not None:
        locals_P, throughs_P, states_P = local.unbind(), through.unbind(), entering.unbind()
        with full_fp32_matmul(local.device.type):
            for before, after in (link for chain in parts.chains for link in pairwise(chain)):
                torch.baddbmm(
                    locals_P[before], throughs_P[before], states_P[before], out=states_P[after]
                )
        return entering
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
    if parts.chains is not None:
        locals_P, throughs_P, grads_P = d_local.unbind(), through.mT.unbind(), leaving.unbind()
        with full_fp32_matmul(d_local.device.type):
            for after, before in (link for chain in parts.chains for link in pairwise(chain[::-1])):
                torch.baddbmm(
                    locals_P[after], throughs_P[after], grads_P[after], out=grads_P[before]
                )
        return leaving
    for part, previous, _ in reversed(parts.links):
        d_state = _product(through[part].transpose(-1, -2), leaving[part], d_local[part])
        leaving.index_copy_(0, previous, d_state)
    return leaving


def initial_gradients(d_local: Tensor, through: Tensor | None, parts: Parts) -> Tensor:
    """The gradient of the initial states, ``[N, H, K, V]``, when the final states get none."""
    if parts.are_sequences:
        return d_local
    if parts.chains is not None:
        return _initial_gradients_of_few(d_local, through, parts.chains)
    leaving, first = leaving_gradients(d_local, through, parts, None), parts.opening
    return _product(through[first].transpose(-1, -2), leaving[first], d_local[first])


def _initial_gradients_of_few(
    d_local: Tensor, through: Tensor, chains: tuple[range, ...]
) -> Tensor:
    """Nothing enters the last part's gradient but its own."""
    grads = d_local.new_empty(len(chains), *d_local.shape[1:])
    locals_P, throughs_P = d_local.unbind(), through.mT.unbind()
    with full_fp32_matmul(d_local.device.type):
        for parts, out in zip(chains, grads.unbind(), strict=True):
            *others, last = parts
            grad = locals_P[last] if others else out.copy_(locals_P[last])
            for part in reversed(others):
                made = {"out": out} if part == parts[0] else {}
                grad = torch.baddbmm(locals_P[part], throughs_P[part], grad, **made)
    return grads
