"""Head exchange for a Mamba2 mixer that owns its parameters, ours or another's.

    rows = cp.pre_conv_ssm(mixer.in_proj(x))         [B, s, P] -> [B, S, p]
    y    = ...                                       conv and recurrence of p's heads, cp.get_*()
    y    = cp.post_conv_ssm(y)                       [B, S, v] -> [B, s, V]
    out  = mixer.out_proj(mixer.norm(y))             a norm group may span the heads of all ranks

Legend: S tokens of the whole sequence, s = S / cp of one rank, B batch, P width of a projection row
z | x | B | C | dt, p of one rank's heads, V = heads * head_dim, v = V / cp.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor

from ...ops.documents import Documents, one_document
from ...ops.layout import Layout, Section, SizeError
from ..layouts import SequenceLayout
from .exchange import Exchange, to_heads, to_sequence
from .scheme import share_of_parameter
from .shares import HeadShares

_RESOLVED = "_megatron_gdn_boundaries"


class MambaContextParallel:
    """Hidden-parallel context parallelism around a Mamba2 mixer.

    It is no module and owns no parameters. Every ``get_*`` call reads the parameters of ``mixer``
    anew, so it finds the tensors that sharded data parallelism puts in their place. Gradients reach
    the whole parameters; summed over the group, they equal those of a run on one rank. Sequences
    (documents) are in Megatron's zigzag layout.

    Args:
        num_heads, head_dim: of the mixer, before this split.
        n_groups: groups of B and C. With fewer groups than ranks, neighbouring ranks hold copies.
        d_state: width of B and of C.
        mixer: has ``dt_bias``, ``A_log``, ``D``, and ``conv1d`` or ``conv1d_weight`` and
            ``conv1d_bias``.

    Attributes:
        num_heads_local, n_groups_local, d_inner_local: of one rank.
        group_repeat_count: ranks that hold a copy of the same group.

    Raises:
        ValueError: the heads or the groups cannot be shared by the group's ranks.
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
        self.cp_group, self.mixer = cp_group, mixer
        self.cp_size, self.cp_rank = cp_group.size(), cp_group.rank()
        self.num_heads, self.head_dim = num_heads, head_dim
        self.n_groups, self.d_state = n_groups, d_state
        if num_heads % n_groups:
            raise SizeError(f"num_heads={num_heads} is not a multiple of n_groups={n_groups}.")
        layout = Layout(
            (
                Section("z", "head", head_dim),
                Section("x", "head", head_dim, conv=True),
                Section("B", "group", d_state, conv=True),
                Section("C", "group", d_state, conv=True),
                Section("dt", "head", 1, gates=True),
            ),
            (("head", num_heads), ("group", n_groups)),
        )
        local = layout.share(self.cp_size)
        self.num_heads_local, self.n_groups_local = local.heads("head"), local.heads("group")
        self.group_repeat_count = max(1, self.cp_size // n_groups)
        self.d_inner, self.d_inner_local = num_heads * head_dim, self.num_heads_local * head_dim
        copies = layout.copies(self.cp_size)
        self._width = layout.width
        self._proj = HeadShares(self.cp_size, layout.widths, copies)
        self._conv = HeadShares(self.cp_size, layout.conv_widths, copies[1:4])
        self._mixed = HeadShares.even(self.cp_size, (self.d_inner,))

    def pre_conv_ssm(
        self, projected_states: Tensor, cu_seqlens: Tensor | Documents | None = None
    ) -> Tensor:
        """Exchange all columns of this rank's tokens for this rank's columns of all tokens.

        Args:
            projected_states: ``[B, s, P]``, or ``[T / cp, P]`` of packed documents.
            cu_seqlens: their global offsets ``[N + 1]``, before the split. An offset tensor is read
                from its device once; ``Documents`` never.

        Returns:
            ``[B, S, p]`` or ``[T, p]`` in sequence order; with one rank the given tensor itself.

        Raises:
            ValueError: rows of another width, offsets for more than one batch row, offsets that do
                not end at T, or a length that is not a multiple of 2 cp.
        """
        name, ranks = "projected_states", self.cp_size
        return self._move(projected_states, name, self._width, ranks, self._proj, cu_seqlens)

    def post_conv_ssm(self, output: Tensor, cu_seqlens: Tensor | Documents | None = None) -> Tensor:
        """The inverse, of mixed rows.

        Args:
            output: ``[B, S, v]`` or ``[T, v]``.
            cu_seqlens: as given to :meth:`pre_conv_ssm`.

        Returns:
            ``[B, s, V]`` or ``[T / cp, V]``; with one rank the given tensor itself.

        Raises:
            ValueError: as :meth:`pre_conv_ssm`.
        """
        return self._move(output, "output", self.d_inner_local, 1, self._mixed, cu_seqlens)

    def get_conv1d_weight(self) -> Tensor:
        """``[channels of this rank, taps]``, from ``[channels, 1, taps]``."""
        return self._share(self._conv_parameter("weight"), self._conv).squeeze(1)

    def get_conv1d_bias(self) -> Tensor | None:
        """``[channels of this rank]``, or None."""
        bias = self._conv_parameter("bias")
        return None if bias is None else self._share(bias, self._conv)

    def get_dt_bias(self, whole: Tensor | None = None) -> Tensor:
        """``[heads of this rank]``; ``whole``: the parameter, if it is gathered already."""
        return self._head_share(self.mixer.dt_bias if whole is None else whole)

    def get_A_log(self, whole: Tensor | None = None) -> Tensor:
        """``[heads of this rank]``; ``whole``: as for :meth:`get_dt_bias`."""
        return self._head_share(self.mixer.A_log if whole is None else whole)

    def get_D(self, whole: Tensor | None = None) -> Tensor:
        """``[heads of this rank]``, or their channels; ``whole``: as for :meth:`get_dt_bias`."""
        return self._head_share(self.mixer.D if whole is None else whole)

    def _conv_parameter(self, name: str) -> Any:
        conv = getattr(self.mixer, "conv1d", None)
        return getattr(self.mixer, f"conv1d_{name}") if conv is None else getattr(conv, name)

    def _head_share(self, param: Tensor) -> Tensor:
        return self._share(param, HeadShares.even(self.cp_size, (param.shape[0],)))

    def _share(self, param: Tensor, shares: HeadShares) -> Tensor:
        return param if self.cp_size == 1 else share_of_parameter(param, 0, shares, self.cp_rank)

    def _move(
        self,
        x: Tensor,
        name: str,
        width: int,
        ranks: int,
        shares: HeadShares,
        cu_seqlens: Tensor | Documents | None,
    ) -> Tensor:
        """Exchange ``[B, tokens, width]`` or ``[tokens, width]``, which ``ranks`` ranks hold."""
        if self.cp_size == 1:
            return x
        if x.dim() not in (2, 3) or x.shape[-1] != width:
            raise ValueError(
                f"{name} must be [B, tokens, {width}] or [tokens, {width}], got {tuple(x.shape)}."
            )
        rows = x.unsqueeze(1) if x.dim() == 2 else x.transpose(0, 1)
        tokens = rows.shape[0] * ranks
        cut = one_document(tokens, x.device)
        if cu_seqlens is not None:
            if rows.shape[1] != 1:
                raise ValueError(
                    f"cu_seqlens describes one row of packed documents, got {rows.shape[1]} batch "
                    f"rows. Lay the rows end to end and extend cu_seqlens, or leave it out."
                )
            cut = _resolve(cu_seqlens, tokens).on(x.device)
        exchange = Exchange.of(self.cp_group, shares, cut, SequenceLayout.ZIGZAG, rows)
        moved = to_sequence(rows, exchange) if ranks == 1 else to_heads(rows, exchange)
        return moved.squeeze(1) if x.dim() == 2 else moved.transpose(0, 1).contiguous()


def _resolve(cu_seqlens: Any, tokens: int) -> Documents:
    """The documents; kept on the offsets' tensor until it is written to."""
    if not isinstance(cu_seqlens, Tensor) or cu_seqlens.is_inference():
        return Documents.from_cu_seqlens(cu_seqlens, tokens)
    version, kept = getattr(cu_seqlens, _RESOLVED, (None, cu_seqlens))
    if version == cu_seqlens._version:
        return Documents.from_cu_seqlens(kept, tokens)
    documents = Documents.from_cu_seqlens(cu_seqlens, tokens)
    setattr(cu_seqlens, _RESOLVED, (cu_seqlens._version, documents))
    return documents
