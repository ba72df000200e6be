"""Chooses the scheme that a micro-batch runs under."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..dims import GDNDims
from .headwise import Headwise, SingleRank
from .zigzag import SequenceLayout

if TYPE_CHECKING:
    from megatron.core.packed_seq_params import PackedSeqParams


class ContextParallel:
    """The schemes of one layer: one per context-parallel group it meets.

    Args:
        dims: sizes on one tensor-parallel rank.
        group: the group of micro-batches that do not bring their own.
        layout: how the ranks' tokens were cut from the sequence.

    Raises:
        ValueError: the heads cannot be split over ``group``.
    """

    def __init__(self, dims: GDNDims, group: Any, layout: SequenceLayout) -> None:
        self._dims, self._group, self._layout = dims, group, layout
        self._schemes: dict[Any, SingleRank | Headwise] = {}
        self._scheme_over(group)

    def _scheme_over(self, group: Any) -> SingleRank | Headwise:
        if group not in self._schemes:
            alone = group is None or group.size() == 1
            self._schemes[group] = (
                SingleRank(self._dims) if alone else Headwise(self._dims, group, self._layout)
            )
        return self._schemes[group]

    def scheme_for(self, packed: PackedSeqParams | None) -> SingleRank | Headwise:
        """The scheme of this micro-batch; ``packed.cp_group`` goes before the layer's group.

        Raises:
            ValueError: ``local_cp_size`` is not the size of ``cp_group``, or the heads cannot be
                split over that group.
        """
        if packed is None or (packed.cp_group is None and packed.local_cp_size is None):
            return self._scheme_over(self._group)
        group, size = packed.cp_group, packed.local_cp_size
        if size is not None and size != (1 if group is None else group.size()):
            given = "no cp_group" if group is None else f"a cp_group of {group.size()} ranks"
            raise ValueError(
                f"packed_seq_params has local_cp_size={size} and {given}; they must agree (a size "
                f"of 1 needs no group)."
            )
        return self._scheme_over(group)
