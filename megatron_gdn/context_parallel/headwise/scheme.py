"""Headwise (hidden-parallel) context parallelism: trade the sequence split for a head split.

An exchange turns "a share of the tokens, all heads" into "all tokens, a share of the heads", so
the convolution and the recurrence run over whole sequences; the inverse follows them.

Legend: S tokens of the whole sequence, s = S / cp tokens on one rank, B batch, D the exchanged
width, d = D / cp; P width of a projection row of one tensor-parallel rank, p of one rank's heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
import torch.distributed as dist
from torch import Tensor

from ...dims import GDNDims
from ...ops import Documents
from ...ops.host_tables import to_device
from ..layouts import SequenceLayout
from .exchange import Exchange, limits, to_heads, to_sequence
from .route import positions
from .shares import HeadShares


def _check_exchange(name: str, tensor: Tensor, seq_dim: int, head_dim: int) -> None:
    if tensor.dim() != 3 or seq_dim != 0 or head_dim not in (-1, 2):
        raise ValueError(
            f"{name} exchanges a [sequence, batch, heads] tensor with seq_dim=0 and head_dim=-1 "
            f"or 2, got shape {tuple(tensor.shape)}, seq_dim={seq_dim}, head_dim={head_dim}."
        )


def _even_shares(name: str, width: int, sections: Sequence[int] | None, cp_size: int) -> HeadShares:
    """Every section shared out evenly among ``cp_size`` ranks."""
    sections = [width] if sections is None else list(sections)
    if sum(sections) != width or any(section % cp_size for section in sections):
        raise ValueError(
            f"{name}: sections {sections} must add up to the width {width} and each be a multiple "
            f"of the context-parallel size {cp_size}."
        )
    return HeadShares.even(cp_size, sections)


def _layout_of(balanced: bool) -> SequenceLayout:
    """Rank order is sequence order to ranks that hold contiguous pieces."""
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
    shares = _even_shares("tensor_a2a_cp2hp", tensor.shape[2], split_sections, cp_size)
    lengths, layout = (tensor.shape[0] * cp_size,), _layout_of(undo_attention_load_balancing)
    return to_heads(tensor, Exchange.of(cp_group, shares, lengths, layout, tensor))


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
    S, _, d = tensor.shape
    if S % cp_size:
        raise ValueError(
            f"tensor_a2a_hp2cp: {S} tokens cannot be shared by {cp_size} ranks; the length must "
            f"be a multiple of {cp_size}."
        )
    shares = _even_shares("tensor_a2a_hp2cp", d * cp_size, split_sections, cp_size)
    layout = _layout_of(redo_attention_load_balancing)
    return to_sequence(tensor, Exchange.of(cp_group, shares, (S,), layout, tensor))


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
    if cp_group.size() == 1:
        return param
    name, width = "get_parameter_local_cp", param.shape[dim]
    shares = _even_shares(name, width, split_sections, cp_group.size())
    return _share_of_parameter(param, dim, shares, cp_group.rank())


def _share_of_parameter(param: Tensor, dim: int, shares: HeadShares, rank: int) -> Tensor:
    """The rows that ``rank`` holds, a view for one section; gradients reach just those rows."""
    mine = [param.narrow(dim, piece.whole, piece.width) for piece in shares.pieces(rank)]
    return mine[0] if len(mine) == 1 else torch.cat(mine, dim=dim)


class _OwnRows(torch.autograd.Function):
    """Distinct rows of a parameter: one pass, and the gradient of all sections another."""

    @staticmethod
    def forward(ctx, param: Tensor, rows: Tensor) -> Tensor:
        # Kept on ctx: the table is shared, and one made in inference mode could not be saved.
        ctx.shape, ctx.rows = param.shape, rows
        return param.index_select(0, rows)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return grad.new_zeros(ctx.shape).index_copy_(0, ctx.rows, grad), None


@lru_cache(maxsize=16)
def _own_rows(shares: HeadShares, rank: int, device: torch.device) -> Tensor:
    columns = [range(piece.whole, piece.whole + piece.width) for piece in shares.pieces(rank)]
    table = torch.tensor([row for rows in columns for row in rows], device="cpu")
    return to_device(table, device)


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

    Every rank gets an equal number of value heads and the key heads that serve them. Where ranks
    outnumber key heads, neighbours share one: its query and key travel to each of them, and what
    they find as its gradient is summed.

    Args:
        dims: sizes on one tensor-parallel rank.
        group: the context-parallel group.
        layout: how the ranks' tokens were cut from the sequence.

    ``dims`` of the object are the sizes inside the exchange, on one rank.

    Raises:
        ValueError: the heads cannot be shared by the group.
    """

    name = "headwise"
    moves_rows = True

    def __init__(self, dims: GDNDims, group: dist.ProcessGroup, layout: SequenceLayout) -> None:
        self.size = group.size()
        self.dims = dims.share_heads(self.size)
        key_copies = self.size * self.dims.num_key_heads // dims.num_key_heads
        self._proj = HeadShares(
            self.size, dims.layout.sections, (key_copies, key_copies, 1, 1, 1, 1)
        )
        assert self._proj.widths == self.dims.layout.sections
        self._mixed = HeadShares.even(self.size, (dims.v_dim,))
        self._group, self._layout = group, layout
        # By the documents' identity: hashing and adding up many lengths takes longer than a launch.
        self._exchange = lru_cache(maxsize=32)(self._make)

    @torch.compiler.disable  # Dynamo takes the handles of point-to-point messages for tensors
    def open(self, proj_sBP: Tensor, documents: Documents | None) -> Tensor:
        """``[s, B, P] -> [S, B, p]``, tokens in sequence order, this rank's heads."""
        return to_heads(proj_sBP, self._exchange_of(self._proj, proj_sBP, self.size, documents))

    def close(self, mixed_SBV: Tensor, documents: Documents | None) -> Tensor:
        """``[S, B, V / cp] -> [s, B, V]``, the inverse of :meth:`open` for the mixer's output."""
        return to_sequence(mixed_SBV, self._exchange_of(self._mixed, mixed_SBV, 1, documents))

    def _exchange_of(
        self, shares: HeadShares, rows: Tensor, sharers: int, documents: Documents | None
    ) -> Exchange:
        """``rows`` are those of one of ``sharers`` ranks."""
        tokens, batch = rows.shape[0] * sharers, rows.shape[1]
        return self._exchange(shares, tokens, batch, rows.dtype, rows.device, documents, limits())

    def _make(self, shares, tokens, batch, dtype, device, documents, limits) -> Exchange:
        lengths = Documents.lengths_of(documents, tokens)
        like = torch.empty(1, dtype=dtype, device=device).expand(tokens // self.size, batch, 1)
        return Exchange.of(self._group, shares, lengths, self._layout, like)

    def local(self, param: Tensor, sections: Sequence[int] | None = None) -> Tensor:
        """This rank's share of a parameter along its first dimension.

        Gradients flow into the rows of this rank's heads; summed over the group (which Megatron's
        data-parallel reduction does) they are the gradient on one rank, also of key heads that
        several ranks hold.

        Args:
            param: one row per value head, or with the channels of ``sections``.
            sections: the first few sections of the projection's layout.
        """
        if sections is None:
            shares = HeadShares.even(self.size, (param.shape[0],))
        else:
            count = len(sections)
            assert tuple(sections) == self._proj.sections[:count]
            shares = HeadShares(self.size, tuple(sections), self._proj.copies[:count])
        rank = self._group.rank()
        if len(shares.sections) == 1:
            return _share_of_parameter(param, 0, shares, rank)
        return _OwnRows.apply(param, _own_rows(shares, rank, param.device))

    def local_positions(self, tokens: int, documents: Documents | None) -> Tensor:
        """Which of the ``tokens`` sequence positions this rank holds, in its order."""
        lengths = Documents.lengths_of(documents, tokens)
        return positions(lengths, self.size, self._layout)[self._group.rank()]

    def split(self, proj_SBP: Tensor, documents: Documents | None) -> None:
        """No sequence goes on elsewhere."""
