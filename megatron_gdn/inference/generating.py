"""What a mixer of this package tells, so that it generates."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor

from ..ops.layout import Layout
from ..ops.state_maps.state_map import StateShape
from .carry import CarryShape
from .dynamic import SlotBuffers, decode_requests, prefill_requests
from .step import RowMixer


class GeneratingMixer:
    """A Megatron mixer whose sequences go on from a :class:`.carry.Carry`.

    It tells the sizes of its states and how it computes between its projections; everything else,
    contexts, slots and Megatron's hooks, is in this folder and the same for every mixer.

    Attributes:
        pp_layer_offset: layers on the pipeline stages before.
        chunk_size: where Megatron's dynamic context may cut prompts. Results do not depend on it;
            it asks all recurrent layers of a model for the same.
        state_transposed: whether Megatron stores this mixer's states as ``[H, V, K]``.
        aligned: a token's bits do not depend on how it comes, see :mod:`megatron_gdn.ops.aligned`.
        dims: of this tensor-parallel rank: the ``layout`` of a projection row, the ``state`` of its
            heads.
    """

    config: Any
    pg_collection: Any
    tp_group: Any
    backend: str
    layer_number: int | None
    pp_layer_offset: int = 0
    chunk_size: int = 128
    state_transposed: ClassVar[bool] = False
    aligned: bool
    dims: Any

    @property
    def state_shape(self) -> StateShape:
        """The states of this rank's heads."""
        return self.dims.state

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
        taps, tp = self.conv_weight.shape[-1], self.tp_group
        return CarryShape.of(layout, self.state_shape, taps, self.aligned, tp.rank(), tp.size())

    # Under the names by which Megatron's dynamic inference asks and calls a mixer.

    def mamba_state_shapes_per_request(self) -> tuple[tuple[int, int], tuple[int, int, int]]:
        """A request's conv window ``[C, W]`` and its states ``[H, K, V]`` (or ``[H, V, K]``)."""
        heads, rows, columns, _ = self.state_shape
        states = (heads, columns, rows) if self.state_transposed else (heads, rows, columns)
        channels, _, taps = self.conv_weight.shape
        return (channels, taps), states

    def ssm_decode(
        self,
        projected: Tensor,
        conv_state: Tensor,
        ssm_state: Tensor,
        batch_indices: Tensor | None = None,
        intermediate_conv_state: Tensor | None = None,
        intermediate_ssm_state: Tensor | None = None,
    ) -> Tensor:
        """``[N, s, P]``, s tokens each of N requests, to ``[N, s, H V]``.

        See :func:`.dynamic.decode_requests`.
        """
        intermediate = None
        if intermediate_conv_state is not None and intermediate_ssm_state is not None:
            intermediate = self._in_slots(intermediate_conv_state, intermediate_ssm_state)
        return decode_requests(
            projected,
            self.row_mixer(projected.transpose(0, 1)),
            self._in_slots(conv_state, ssm_state),
            batch_indices,
            intermediate,
        )

    def ssm_prefill(
        self, projected: Tensor, conv_state: Tensor, ssm_state: Tensor, context: Any
    ) -> Tensor:
        """``[t, 1, P]``, prompts end to end and then padding, to ``[t, 1, H V]``.

        See :func:`.dynamic.prefill_requests`.
        """
        return prefill_requests(
            projected,
            self.row_mixer(projected),
            self._in_slots(conv_state, ssm_state),
            context.mamba_metadata,
        )

    def _in_slots(self, conv_state: Tensor, ssm_state: Tensor) -> SlotBuffers:
        return SlotBuffers(conv_state, ssm_state, self.state_transposed)
