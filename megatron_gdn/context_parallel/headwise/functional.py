"""The head exchange under Megatron's names: functions of a tensor and a group.

Legend: S tokens of the whole sequence, s = S / cp tokens on one rank, B batch, D the exchanged
width, d = D / cp.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor

from ...ops.documents import one_document
from ..layouts import SequenceLayout
from .exchange import Exchange, to_heads, to_sequence
from .scheme import share_of_parameter
from .shares import HeadShares


def _check_dimensions(name: str, tensor: Tensor, seq_dim: int, head_dim: int) -> None:
    if tensor.dim() != 3 or seq_dim != 0 or head_dim not in (-1, 2):
        raise ValueError(
            f"{name} exchanges a [sequence, batch, heads] tensor with seq_dim=0 and head_dim=-1 "
            f"or 2, got shape {tuple(tensor.shape)}, seq_dim={seq_dim}, head_dim={head_dim}."
        )


def _even_shares(name: str, width: int, sections: Sequence[int] | None, cp_size: int) -> HeadShares:
    """Every section split evenly among ``cp_size`` ranks."""
    sections = [width] if sections is None else list(sections)
    if sum(sections) != width or any(section % cp_size for section in sections):
        raise ValueError(
            f"{name}: sections {sections} must add up to the width {width} and each be a multiple "
            f"of the context-parallel size {cp_size}."
        )
    return HeadShares.even(cp_size, sections)


def _layout_of(balanced: bool) -> SequenceLayout:
    """Zigzag if it is to be undone; else contiguous, whose rank order is the sequence order."""
    return SequenceLayout.ZIGZAG if balanced else SequenceLayout.CONTIGUOUS


def tensor_a2a_cp2hp(
    tensor: Tensor,
    seq_dim: int,
    head_dim: int,
    cp_group: dist.ProcessGroup,
    split_sections: Sequence[int] | None = None,
    undo_attention_load_balancing: bool = True,
) -> Tensor:
    """All-to-all from context parallel to hidden parallel: ``[s, B, D] -> [S, B, d]``.

    Rank r receives the r-th of cp equal shares of every section, for all tokens.

    Args:
        tensor: ``[s, B, D]``.
        seq_dim: 0.
        head_dim: -1 or 2.
        cp_group: the ranks that share the sequence.
        split_sections: widths of the sections of D, each split by itself (query heads among
            all ranks, then key heads, ...); None treats D as one section.
        undo_attention_load_balancing: return tokens in sequence order, undoing the zigzag of one
            sequence of S tokens; if False, rank 0's tokens come first, then rank 1's, ...

    Returns:
        ``[S, B, d]``. One collective, forward and backward, however many sections there are.

    Raises:
        ValueError: another dimension order, sections that do not divide, or S not a multiple of
            ``2 * cp`` when the zigzag is to be undone.

    Source: the contract of ``megatron.core.ssm.gated_delta_net.tensor_a2a_cp2hp``.
    """
    cp_size = cp_group.size()
    if cp_size == 1:
        return tensor
    _check_dimensions("tensor_a2a_cp2hp", tensor, seq_dim, head_dim)
    shares = _even_shares("tensor_a2a_cp2hp", tensor.shape[2], split_sections, cp_size)
    cut = one_document(tensor.shape[0] * cp_size, tensor.device)
    layout = _layout_of(undo_attention_load_balancing)
    return to_heads(tensor, Exchange.of(cp_group, shares, cut, layout, tensor))


def tensor_a2a_hp2cp(
    tensor: Tensor,
    seq_dim: int,
    head_dim: int,
    cp_group: dist.ProcessGroup,
    split_sections: Sequence[int] | None = None,
    redo_attention_load_balancing: bool = True,
) -> Tensor:
    """All-to-all from hidden parallel to context parallel: ``[S, B, d] -> [s, B, D]``.

    The inverse of :func:`tensor_a2a_cp2hp`, whose sections are cp times as wide.

    Args:
        tensor: ``[S, B, d]``.
        split_sections: widths of the sections of **d**, as they are in ``tensor``: those given to
            :func:`tensor_a2a_cp2hp`, each divided by cp. None treats d as one section.
        redo_attention_load_balancing: ``tensor`` is in sequence order and the result is a zigzag
            share of it; otherwise ``tensor`` already holds rank 0's tokens, rank 1's, ...

    Returns:
        ``[s, B, D]``.

    Raises:
        ValueError: another dimension order, sections that do not add up to d, or S not a multiple
            of cp (of ``2 * cp`` when the zigzag is to be redone).

    Source: the contract of ``megatron.core.ssm.gated_delta_net.tensor_a2a_hp2cp``.
    """
    cp_size = cp_group.size()
    if cp_size == 1:
        return tensor
    _check_dimensions("tensor_a2a_hp2cp", tensor, seq_dim, head_dim)
    S, _, d = tensor.shape
    if S % cp_size:
        raise ValueError(
            f"tensor_a2a_hp2cp: {S} tokens cannot be shared by {cp_size} ranks; the length must "
            f"be a multiple of {cp_size}."
        )
    sections = [d] if split_sections is None else list(split_sections)
    if sum(sections) != d:
        meant = " They are the widths before the exchange." if sum(sections) == d * cp_size else ""
        raise ValueError(
            f"tensor_a2a_hp2cp: sections {sections} must add up to {d}, the width of the tensor on "
            f"this rank.{meant} Give the widths that a rank holds: those given to "
            f"tensor_a2a_cp2hp, each divided by the context-parallel size {cp_size}."
        )
    shares = HeadShares.even(cp_size, [section * cp_size for section in sections])
    layout = _layout_of(redo_attention_load_balancing)
    cut = one_document(S, tensor.device)
    return to_sequence(tensor, Exchange.of(cp_group, shares, cut, layout, tensor))


def get_parameter_local_cp(
    param: Tensor,
    dim: int,
    cp_group: dist.ProcessGroup,
    split_sections: Sequence[int] | None = None,
) -> Tensor:
    """This rank's share of a parameter whose ``dim`` is split by heads.

    Gradients flow into the whole parameter, at the rows of this rank's heads. Their sum over the
    group, which Megatron's data-parallel reduction takes, equals the gradient of a run on one rank.

    Args:
        param: the whole parameter.
        dim: the dimension that holds the heads.
        cp_group: the context-parallel group.
        split_sections: widths of the sections of ``dim``, each split by itself.

    Returns:
        A view of ``param`` for one section, else a new tensor.

    Raises:
        ValueError: a section is not a multiple of the group's size.
    """
    if cp_group.size() == 1:
        return param
    width, cp_size = param.shape[dim], cp_group.size()
    shares = _even_shares("get_parameter_local_cp", width, split_sections, cp_size)
    return share_of_parameter(param, dim, shares, cp_group.rank())
