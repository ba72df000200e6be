"""The head exchange under Megatron's names: functions, and a class for Mamba2 mixers.

Legend: S tokens of the whole sequence, s = S / cp tokens on one rank, B batch, D the
exchanged width, d = D / cp; P width of a Mamba2 row z | x | B | C | dt, p width of one
rank's heads in that row, V = heads * head_dim, v = V / cp, T tokens of packed
documents.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...ops.documents import Documents, one_document
from ...ops.layout import Layout, Section, SizeError
from ..layouts import SequenceLayout
from .exchange import HeadExchange, to_heads, to_sequence
from .scheme import Headwise
from .shares import HeadShares

# The attribute in which a tensor of offsets stores the `Documents` made from it.
_DOCUMENTS_ATTRIBUTE = "_megatron_gdn_boundaries"


def _check_dimensions(caller: str, tensor: Tensor, seq_dim: int, head_dim: int) -> None:
    """Raise a ValueError unless ``tensor`` is 3-D, ``seq_dim`` is 0 and ``head_dim`` -1
    or 2."""
    if tensor.dim() != 3 or seq_dim != 0 or head_dim not in (-1, 2):
        raise ValueError(
            f"{caller} takes a [sequence, batch, heads] tensor with seq_dim=0 and "
            f"head_dim=-1 or 2, got shape {tuple(tensor.shape)}, seq_dim={seq_dim}, "
            f"head_dim={head_dim}."
        )


def _even_shares(
    caller: str, width: int, sections: Sequence[int] | None, cp_size: int
) -> HeadShares:
    """Even shares of ``sections``, which must add up to ``width``; errors begin with
    ``caller``."""
    if sections is None:
        sections = [width]
    else:
        sections = list(sections)
    if sum(sections) != width or any(section % cp_size for section in sections):
        raise ValueError(
            f"{caller}: sections {sections} must add up to the width {width} and each "
            f"be a multiple of the context-parallel size {cp_size}."
        )
    return HeadShares.even(cp_size, sections)


def _sequence_layout_of(is_balanced: bool) -> SequenceLayout:
    """Zigzag if the tokens are balanced for causal attention, else contiguous."""
    if is_balanced:
        return SequenceLayout.ZIGZAG
    return SequenceLayout.CONTIGUOUS


def tensor_a2a_cp2hp(
    tensor: Tensor,
    seq_dim: int,
    head_dim: int,
    cp_group: dist.ProcessGroup,
    split_sections: Sequence[int] | None = None,
    undo_attention_load_balancing: bool = True,
) -> Tensor:
    """All-to-all from a share of the tokens to a share of the columns:
    ``[s, B, D] -> [S, B, d]``.

    Args:
        tensor: ``[s, B, D]``.
        seq_dim, head_dim: ``seq_dim`` must be 0, ``head_dim`` must be -1 or 2.
        cp_group: the ranks that share the sequence.
        split_sections: widths of the sections of D (query heads, ...); ranks share each
            section.
        undo_attention_load_balancing: if True, tokens are cut in zigzag over ranks, and
            the result is in sequence order; if False, the result has rank 0's tokens
            first, then rank 1's, ...

    Returns:
        ``[S, B, d]``: rank r has the r-th of cp equal shares of every section, for all
        tokens. The forward and the backward take one collective each.

    Raises:
        ValueError: for another dimension order, for a section that is not a multiple of
            cp, or for an S that is not a multiple of ``2 * cp`` if the zigzag is
            undone.

    Arguments and result are those of
    ``megatron.core.ssm.gated_delta_net.tensor_a2a_cp2hp``.
    """
    cp_size = cp_group.size()
    if cp_size == 1:
        return tensor
    _check_dimensions("tensor_a2a_cp2hp", tensor, seq_dim, head_dim)
    shares = _even_shares("tensor_a2a_cp2hp", tensor.shape[2], split_sections, cp_size)
    units = one_document(tensor.shape[0] * cp_size, tensor.device)
    layout = _sequence_layout_of(undo_attention_load_balancing)
    return to_heads(tensor, HeadExchange.of(cp_group, shares, units, layout, tensor))


def tensor_a2a_hp2cp(
    tensor: Tensor,
    seq_dim: int,
    head_dim: int,
    cp_group: dist.ProcessGroup,
    split_sections: Sequence[int] | None = None,
    redo_attention_load_balancing: bool = True,
) -> Tensor:
    """All-to-all from a share of the columns to a share of the tokens:
    ``[S, B, d] -> [s, B, D]``.

    This is the inverse of :func:`tensor_a2a_cp2hp`, whose sections are cp times as
    wide.

    Args:
        tensor: ``[S, B, d]``.
        split_sections: the widths given to :func:`tensor_a2a_cp2hp`, each divided by
            cp.
        redo_attention_load_balancing: if True, ``tensor`` is in sequence order, and the
            result is this rank's zigzag share; if False, ``tensor`` has rank 0's tokens
            first, then 1's, ...

    Returns:
        ``[s, B, D]``.

    Raises:
        ValueError: for another dimension order, for sections that do not add up to d,
            or for an S that is not a multiple of cp (of ``2 * cp`` if the zigzag is
            redone).

    Arguments and result are those of
    ``megatron.core.ssm.gated_delta_net.tensor_a2a_hp2cp``.
    """
    cp_size = cp_group.size()
    if cp_size == 1:
        return tensor
    _check_dimensions("tensor_a2a_hp2cp", tensor, seq_dim, head_dim)
    S, _, d = tensor.shape
    if S % cp_size:
        raise ValueError(
            f"tensor_a2a_hp2cp: {S} tokens cannot be shared by {cp_size} ranks; the "
            f"length must be a multiple of {cp_size}."
        )
    if split_sections is None:
        sections = [d]
    else:
        sections = list(split_sections)
    if sum(sections) != d:
        if sum(sections) == d * cp_size:
            hint = " They are the widths before the exchange."
        else:
            hint = ""
        raise ValueError(
            f"tensor_a2a_hp2cp: sections {sections} must add up to {d}, the width of "
            f"the tensor on this rank.{hint} Give the widths that a rank holds: those "
            "given to tensor_a2a_cp2hp, each divided by the context-parallel size "
            f"{cp_size}."
        )
    shares = HeadShares.even(cp_size, [section * cp_size for section in sections])
    layout = _sequence_layout_of(redo_attention_load_balancing)
    units = one_document(S, tensor.device)
    return to_sequence(tensor, HeadExchange.of(cp_group, shares, units, layout, tensor))


def get_parameter_local_cp(
    param: Tensor,
    dim: int,
    cp_group: dist.ProcessGroup,
    split_sections: Sequence[int] | None = None,
) -> Tensor:
    """This rank's share of a parameter whose dimension ``dim`` is split by heads.

    Gradients reach only this rank's share of ``param``. Megatron's data-parallel
    reduction sums the gradients over the group, and the sum equals the gradient of a
    run on one rank.

    Args:
        param: the whole parameter.
        dim: the dimension that the ranks share.
        cp_group: the context-parallel group.
        split_sections: widths of the sections of ``dim``, each of which is split over
            the ranks.

    Returns:
        A view of ``param`` if there is one section, else a new tensor.

    Raises:
        ValueError: a section is not a multiple of the group's size.
    """
    if cp_group.size() == 1:
        return param
    width = param.shape[dim]
    cp_size = cp_group.size()
    shares = _even_shares("get_parameter_local_cp", width, split_sections, cp_size)
    blocks = [
        param.narrow(dim, block.first_column, block.width)
        for block in shares.blocks(cp_group.rank())
    ]
    if len(blocks) == 1:
        return blocks[0]
    return torch.cat(blocks, dim=dim)


_CONVOLVED_SECTIONS = ("x", "B", "C")


def mamba_layout(heads: int, groups: int, head_dim: int, state_dim: int) -> Layout:
    """The layout of a Mamba2 projection row, z | x | B | C | dt; a group of B or of C
    has ``state_dim`` columns."""
    sections = (
        Section("z", "head", head_dim),
        Section("x", "head", head_dim, conv=True),
        Section("B", "group", state_dim, conv=True),
        Section("C", "group", state_dim, conv=True),
        Section("dt", "head", 1, gates=True),
    )
    return Layout(sections, (("head", heads), ("group", groups)))


class MambaContextParallel:
    """Context parallelism by head exchange around a Mamba2 mixer, which owns the
    parameters::

        rows = cp.pre_conv_ssm(mixer.in_proj(x))  [B, s, P] -> [B, S, p]
        y    = ...                                convolution and recurrence, cp.get_*()
        y    = cp.post_conv_ssm(y)                [B, S, v] -> [B, s, V]
        out  = mixer.out_proj(mixer.norm(y))      on all heads: a norm group may span
                                                  them

    The class owns no parameters: every ``get_*`` call reads the current parameters of
    ``mixer``, also those that sharded data parallelism has replaced. The gradients of
    the whole parameters, summed over the group, equal the gradients of a run on one
    rank. The caller must cut every document in zigzag.

    Args:
        num_heads, head_dim: number and width of the mixer's heads, before ranks share
            the heads.
        n_groups: groups of B and C. If ranks outnumber groups, several ranks hold the
            same group.
        d_state: width of a group of B, and of C.
        mixer: a module with ``dt_bias``, ``A_log``, ``D``, and with either ``conv1d``,
            or ``conv1d_weight`` and ``conv1d_bias``.

    Attributes:
        num_heads, head_dim, n_groups, d_state, mixer, cp_group: the arguments.
        num_heads_local, n_groups_local, d_inner_local: heads, groups and channels of
            one rank.
        group_repeat_count: the number of ranks that hold a copy of the same group.

    Raises:
        ValueError: if the ranks cannot share the heads or the groups.
    """

    def __init__(
        self,
        cp_group: dist.ProcessGroup,
        num_heads: int,
        head_dim: int,
        n_groups: int,
        d_state: int,
        mixer: Any,
    ) -> None:
        """Compute the sizes of this rank's heads; the arguments are as in the class.

        ``mixer``'s parameters are not read here.
        """
        self.cp_group = cp_group
        self.mixer = mixer
        self.cp_size, self.cp_rank = cp_group.size(), cp_group.rank()
        self.num_heads = num_heads
        self.head_dim = head_dim
        self.n_groups = n_groups
        self.d_state = d_state
        if num_heads % n_groups:
            raise SizeError(
                f"num_heads={num_heads} is not a multiple of n_groups={n_groups}."
            )
        layout = mamba_layout(num_heads, n_groups, head_dim, d_state)
        self._scheme = Headwise(layout, cp_group, SequenceLayout.ZIGZAG)
        local = self._scheme.layout
        self.num_heads_local, self.n_groups_local = (
            local.heads("head"),
            local.heads("group"),
        )
        self.group_repeat_count = max(1, self.cp_size // n_groups)
        self.d_inner = num_heads * head_dim
        self.d_inner_local = self.num_heads_local * head_dim
        self._row_width = layout.width

    def pre_conv_ssm(
        self, projected_states: Tensor, cu_seqlens: Tensor | Documents | None = None
    ) -> Tensor:
        """Exchange rows ``[B, s, P]`` or ``[T / cp, P]`` for this rank's columns of all
        tokens.

        ``cu_seqlens`` ``[N + 1]`` are offsets of N documents in the tokens of all
        ranks; the host reads a tensor of offsets once, at its first use. The result,
        ``[B, S, p]`` or ``[T, p]``, is in sequence order.

        Raises:
            ValueError: for rows of another width, for offsets with more than one batch
                row, for offsets that do not end at T, or for a sequence length that is
                not a multiple of 2 cp.
        """
        return self._exchange_rows(
            projected_states, "projected_states", self._row_width, cu_seqlens
        )

    def post_conv_ssm(
        self, output: Tensor, cu_seqlens: Tensor | Documents | None = None
    ) -> Tensor:
        """Move ``output`` back to tokens: ``[B, S, v] -> [B, s, V]`` or
        ``[T, v] -> [T / cp, V]``.

        ``cu_seqlens`` and errors are those of :meth:`pre_conv_ssm`.
        """
        return self._exchange_rows(output, "output", self.d_inner_local, cu_seqlens)

    def get_conv1d_weight(self) -> Tensor:
        """This rank's rows of the convolution's weight:
        ``[channels of this rank, taps]``."""
        return self._local_part(
            self._conv_parameter("weight"), _CONVOLVED_SECTIONS
        ).squeeze(1)

    def get_conv1d_bias(self) -> Tensor | None:
        """This rank's part of the convolution's bias, ``[channels of this rank]``, or
        None."""
        bias = self._conv_parameter("bias")
        if bias is None:
            return None
        return self._local_part(bias, _CONVOLVED_SECTIONS)

    def get_dt_bias(self, whole: Tensor | None = None) -> Tensor:
        """This rank's part of ``dt_bias`` [heads].

        If the mixer holds only a shard of ``dt_bias``, the caller passes the gathered
        parameter as ``whole``.
        """
        return self._local_part(self.mixer.dt_bias if whole is None else whole)

    def get_A_log(self, whole: Tensor | None = None) -> Tensor:
        """This rank's part of ``A_log`` [heads]; ``whole`` as in
        :meth:`get_dt_bias`."""
        return self._local_part(self.mixer.A_log if whole is None else whole)

    def get_D(self, whole: Tensor | None = None) -> Tensor:
        """This rank's part of D, [heads] or [channels]; ``whole`` as in
        :meth:`get_dt_bias`."""
        return self._local_part(self.mixer.D if whole is None else whole)

    def _conv_parameter(self, name: str) -> Tensor:
        """The mixer's ``conv1d.<name>`` or ``conv1d_<name>``; ``name`` is "weight" or
        "bias"."""
        conv = getattr(self.mixer, "conv1d", None)
        if conv is None:
            return getattr(self.mixer, f"conv1d_{name}")
        return getattr(conv, name)

    def _local_part(
        self, param: Tensor, sections: Sequence[str] | None = None
    ) -> Tensor:
        """This rank's part of ``param``, whose dimension 0 has an entry per column of
        ``sections``; None: an entry per head, or per column of the heads."""
        if self.cp_size == 1:
            return param
        return self._scheme.local_parameter(param, sections)

    def _exchange_rows(
        self,
        x: Tensor,
        argument: str,
        width: int,
        cu_seqlens: Tensor | Documents | None,
    ) -> Tensor:
        """Exchange ``x``, ``[B, tokens, width]`` or ``[tokens, width]``.

        ``argument`` is the caller's name of ``x``. "projected_states" are exchanged for
        the columns of this rank's heads of all tokens, "output" for this rank's tokens
        with the columns of all heads.
        """
        if self.cp_size == 1:
            return x
        if x.dim() not in (2, 3) or x.shape[-1] != width:
            raise ValueError(
                f"{argument} must be [B, tokens, {width}] or [tokens, {width}], got "
                f"{tuple(x.shape)}."
            )
        if x.dim() == 2:
            rows = x.unsqueeze(1)
        else:
            rows = x.transpose(0, 1)
        is_projection = argument == "projected_states"
        tokens = rows.shape[0]
        if is_projection:
            tokens = tokens * self.cp_size
        documents = None
        if cu_seqlens is not None:
            if rows.shape[1] != 1:
                raise ValueError(
                    "cu_seqlens describes one row of packed documents, got "
                    f"{rows.shape[1]} batch rows. Lay the rows end to end and extend "
                    "cu_seqlens, or leave cu_seqlens out."
                )
            documents = _documents_of(cu_seqlens, tokens, x.device)
        passage = self._scheme.passage(documents, tokens, rows.shape[1], rows)
        if is_projection:
            exchanged = passage.to_stages(rows)
        else:
            exchanged = passage.from_stages(rows)
        if x.dim() == 2:
            return exchanged.squeeze(1)
        return exchanged.transpose(0, 1).contiguous()


def _documents_of(
    cu_seqlens: Tensor | Documents, tokens: int, device: torch.device
) -> Documents:
    """The documents with offsets ``cu_seqlens`` in ``tokens`` tokens.

    The result is stored as an attribute of the tensor until the tensor's values change.
    So the host waits for a GPU only at the first of several calls.
    """
    # An inference tensor has no version, so its documents are not kept.
    if not isinstance(cu_seqlens, Tensor) or cu_seqlens.is_inference():
        return Documents.from_cu_seqlens(cu_seqlens, tokens, device=device)
    key = (cu_seqlens._version, device)  # torch counts changes in place
    kept_key, kept = getattr(cu_seqlens, _DOCUMENTS_ATTRIBUTE, (None, cu_seqlens))
    if key == kept_key:  # this call only checks the number of tokens
        return Documents.from_cu_seqlens(kept, tokens)
    documents = Documents.from_cu_seqlens(cu_seqlens, tokens, device=device)
    setattr(cu_seqlens, _DOCUMENTS_ATTRIBUTE, (key, documents))
    return documents
