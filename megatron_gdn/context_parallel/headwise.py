"""Headwise (hidden-parallel) context parallelism: trade the sequence split for a head split.

An all-to-all turns "a share of the tokens, all heads" into "all tokens, a share of the heads", so
the convolution and the recurrence run over whole sequences; the inverse follows them.

Legend: S tokens of the whole sequence, s = S / cp tokens on one rank, B batch, D the exchanged
width (a projection row of one tensor-parallel rank, say), d = D / cp.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
import torch.distributed as dist
from torch import Tensor

from ..dims import GDNDims
from ..ops import Documents
from .zigzag import SequenceLayout, inverse, rank_order_of_sequence


class _AllToAll(torch.autograd.Function):
    """Block r of dimension 0 goes to rank r; with equal blocks that is its own inverse."""

    @staticmethod
    def forward(ctx, blocks: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        received = torch.empty_like(blocks, memory_format=torch.contiguous_format)
        dist.all_to_all_single(received, blocks.contiguous(), group=group)
        return received

    @staticmethod
    def backward(ctx, grad: Tensor):
        return _AllToAll.apply(grad, ctx.group), None


class _Reorder(torch.autograd.Function):
    """``x[gather]`` along dimension 0 for a permutation, whose gradient is the inverse gather."""

    @staticmethod
    def forward(ctx, x: Tensor, gather: Tensor, inverse_gather: Tensor) -> Tensor:
        ctx.orders = gather, inverse_gather
        return x.index_select(0, gather)

    @staticmethod
    def backward(ctx, grad: Tensor):
        gather, inverse_gather = ctx.orders
        return _Reorder.apply(grad, inverse_gather, gather), None, None


@lru_cache(maxsize=16)
def _orders(
    lengths: tuple[int, ...], cp_size: int, layout: SequenceLayout, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Gather indices that undo and redo the layout; built once per micro-batch, not per layer."""
    undo = rank_order_of_sequence(lengths, cp_size, layout)
    return undo.to(device), inverse(undo).to(device)


def _check_exchange(name: str, tensor: Tensor, seq_dim: int, head_dim: int) -> None:
    if tensor.dim() != 3 or seq_dim != 0 or head_dim not in (-1, 2):
        raise ValueError(
            f"{name} exchanges a [sequence, batch, heads] tensor with seq_dim=0 and head_dim=-1 "
            f"or 2, got shape {tuple(tensor.shape)}, seq_dim={seq_dim}, head_dim={head_dim}."
        )


def _check_sections(
    name: str, width: int, sections: Sequence[int] | None, cp_size: int
) -> list[int]:
    """The share of each section that one rank gets."""
    sections = [width] if sections is None else list(sections)
    if sum(sections) != width or any(section % cp_size for section in sections):
        raise ValueError(
            f"{name}: sections {sections} must add up to the width {width} and each be a multiple "
            f"of the context-parallel size {cp_size}."
        )
    return [section // cp_size for section in sections]


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
        split_sections: widths of the sections of D, each shared out by itself (query heads among
            all ranks, then key heads, ...); None treats D as one section.
        undo_attention_load_balancing: return tokens in sequence order, undoing the zigzag of one
            sequence of S tokens; otherwise they come as rank 0's, rank 1's, ...

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
    _check_exchange("tensor_a2a_cp2hp", tensor, seq_dim, head_dim)
    s, B, D = tensor.shape
    shares = _check_sections("tensor_a2a_cp2hp", D, split_sections, cp_size)
    sections = tensor.split([share * cp_size for share in shares], dim=-1)
    blocks = torch.cat([x.unflatten(-1, (cp_size, -1)) for x in sections], dim=-1)
    gathered = _AllToAll.apply(blocks.movedim(2, 0), cp_group).flatten(0, 1)
    if undo_attention_load_balancing:
        undo, redo = _orders((s * cp_size,), cp_size, SequenceLayout.ZIGZAG, tensor.device)
        gathered = _Reorder.apply(gathered, undo, redo)
    return gathered


def tensor_a2a_hp2cp(
    tensor: Tensor,
    seq_dim: int,
    head_dim: int,
    cp_group: dist.ProcessGroup,
    split_sections: Sequence[int] | None = None,
    redo_attention_load_balancing: bool = True,
) -> Tensor:
    """All-to-all from hidden parallel to context parallel: ``[S, B, d] -> [s, B, D]``.

    The inverse of :func:`tensor_a2a_cp2hp` with the same arguments.

    Args:
        tensor: ``[S, B, d]``.
        split_sections: widths of the sections of **D** (the result's), as given to
            :func:`tensor_a2a_cp2hp`.
        redo_attention_load_balancing: ``tensor`` is in sequence order and the result shall be a
            zigzag share of it; otherwise ``tensor`` already holds rank 0's tokens, rank 1's, ...

    Returns:
        ``[s, B, D]``.

    Raises:
        ValueError: as :func:`tensor_a2a_cp2hp`, or S not a multiple of cp.

    Source: the contract of ``megatron.core.ssm.gated_delta_net.tensor_a2a_hp2cp``.
    """
    cp_size = cp_group.size()
    if cp_size == 1:
        return tensor
    _check_exchange("tensor_a2a_hp2cp", tensor, seq_dim, head_dim)
    S, B, d = tensor.shape
    if S % cp_size:
        raise ValueError(
            f"tensor_a2a_hp2cp: {S} tokens cannot be shared by {cp_size} ranks; the length must "
            f"be a multiple of {cp_size}."
        )
    shares = _check_sections("tensor_a2a_hp2cp", d * cp_size, split_sections, cp_size)
    if redo_attention_load_balancing:
        undo, redo = _orders((S,), cp_size, SequenceLayout.ZIGZAG, tensor.device)
        tensor = _Reorder.apply(tensor, redo, undo)
    blocks = _AllToAll.apply(tensor.unflatten(0, (cp_size, -1)), cp_group)
    sections = blocks.movedim(0, 2).split(shares, dim=-1)
    return torch.cat([x.flatten(-2) for x in sections], dim=-1)


def get_parameter_local_cp(
    param: Tensor,
    dim: int,
    cp_group: dist.ProcessGroup,
    split_sections: Sequence[int] | None = None,
) -> Tensor:
    """This rank's share of a parameter whose ``dim`` is split by heads.

    Gradients flow into the whole parameter, at the rows of this rank's heads; summed over the
    group (which Megatron's data-parallel reduction does) they are the gradient on one rank.

    Args:
        param: the whole parameter.
        dim: the dimension that holds the heads.
        cp_group: the context-parallel group.
        split_sections: widths of sections of ``dim`` to be shared out one by one.

    Returns:
        A view of ``param`` for one section, else a new tensor.

    Raises:
        ValueError: a section is not a multiple of the group's size.
    """
    cp_size, cp_rank = cp_group.size(), cp_group.rank()
    if cp_size == 1:
        return param
    shares = _check_sections("get_parameter_local_cp", param.shape[dim], split_sections, cp_size)
    sections = param.split([share * cp_size for share in shares], dim=dim)
    mine = [
        section.narrow(dim, cp_rank * share, share)
        for section, share in zip(sections, shares, strict=True)
    ]
    return mine[0] if len(mine) == 1 else torch.cat(mine, dim=dim)


class SingleRank:
    """The scheme for sequences that one rank holds whole: nothing to exchange."""

    size = 1
    moves_rows = False

    def __init__(self, dims: GDNDims) -> None:
        self.dims = dims

    def open(self, proj_SBP: Tensor, documents: Documents | None) -> Tensor:
        return proj_SBP

    def close(self, mixed_SBV: Tensor, documents: Documents | None) -> Tensor:
        return mixed_SBV

    def local(self, param: Tensor, sections: Sequence[int] | None = None) -> Tensor:
        return param

    def local_positions(self, tokens: int, documents: Documents | None) -> range | Tensor:
        return range(tokens)

    def split(self, proj_SBP: Tensor, documents: Documents | None) -> None:
        """No sequence goes on elsewhere."""


class Headwise:
    """Hidden-parallel context parallelism over ``group`` for one tensor-parallel rank's heads.

    Args:
        dims: sizes on one tensor-parallel rank.
        group: the context-parallel group.
        layout: how the ranks' tokens were cut from the sequence.

    ``dims`` of the object are the sizes inside the exchange, on one rank.

    Raises:
        ValueError: the heads cannot be split over the group.
    """

    name = "headwise"
    moves_rows = True

    def __init__(self, dims: GDNDims, group: dist.ProcessGroup, layout: SequenceLayout) -> None:
        self.size = group.size()
        self.dims = dims.shard(self.size, over="context_parallel_size")
        self._sections = dims.layout.sections
        self._group = group
        self._layout = layout

    def _lengths(self, tokens: int, documents: Documents | None) -> tuple[int, ...]:
        return (tokens,) if documents is None else documents.lengths

    def open(self, proj_SBP: Tensor, documents: Documents | None) -> Tensor:
        """``[s, B, P] -> [S, B, P / cp]``, tokens in sequence order."""
        lengths = self._lengths(proj_SBP.shape[0] * self.size, documents)
        undo, redo = _orders(lengths, self.size, self._layout, proj_SBP.device)
        gathered = tensor_a2a_cp2hp(proj_SBP, 0, -1, self._group, self._sections, False)
        return _Reorder.apply(gathered, undo, redo)

    def close(self, mixed_SBV: Tensor, documents: Documents | None) -> Tensor:
        """``[S, B, V / cp] -> [s, B, V]``, the inverse of :meth:`open` for the mixer's output."""
        lengths = self._lengths(mixed_SBV.shape[0], documents)
        undo, redo = _orders(lengths, self.size, self._layout, mixed_SBV.device)
        return tensor_a2a_hp2cp(
            _Reorder.apply(mixed_SBV, redo, undo), 0, -1, self._group, None, False
        )

    def local(self, param: Tensor, sections: Sequence[int] | None = None) -> Tensor:
        """This rank's share of a parameter, see :func:`get_parameter_local_cp`."""
        return get_parameter_local_cp(param, 0, self._group, sections)

    def local_positions(self, tokens: int, documents: Documents | None) -> Tensor:
        """Which of the ``tokens`` sequence positions this rank holds, in its order."""
        lengths = self._lengths(tokens, documents)
        redo = _orders(lengths, self.size, self._layout, torch.device("cpu"))[1]
        return redo.chunk(self.size)[self._group.rank()]

    def split(self, proj_SBP: Tensor, documents: Documents | None) -> None:
        """No sequence goes on elsewhere."""
