"""What a mixer of this package tells, so that it generates."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..ops.layout import Layout
from ..ops.state_maps.state_map import StateShape
from .carry import CarryShape
from .step import RowMixer


class GeneratingMixer:
    """A Megatron mixer whose sequences go on from a :class:`.carry.Carry`.

    It tells the sizes of its states and how it computes between its projections; everything else,
    contexts, slots and Megatron's hooks, is in this folder and the same for every mixer.

    Attributes:
        aligned: a token's bits do not depend on how it comes, see :mod:`megatron_gdn.ops.aligned`.
        dims: of this tensor-parallel rank, with the ``layout`` of a projection row.
    """

    config: Any
    pg_collection: Any
    layer_number: int | None
    aligned: bool
    dims: Any

    @property
    def state_shape(self) -> StateShape:
        """The states of this rank's heads."""
        raise NotImplementedError

    @property
    def conv_weight(self) -> Tensor:
        """``[C, 1, W]``, in the dtype and on the device of the projection's rows."""
        raise NotImplementedError

    def row_mixer(self, proj: Tensor) -> RowMixer:
        """The mixer between its projections, for rows like ``proj`` ``[s, B, P]``."""
        raise NotImplementedError

    @property
    def carry_shape(self) -> CarryShape:
        """What one sequence carries from call to call in generation, on this rank."""
        layout: Layout = self.dims.layout
        return CarryShape.of(layout, self.state_shape, self.conv_weight.shape[-1], self.aligned)
