"""A mixer for Megatron's MambaLayer, with a gated norm over groups of heads."""

from __future__ import annotations

import math
from functools import cache, partial, wraps
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.inference.contexts import BaseInferenceContext
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.ssm.mamba_layer import MambaLayer
from torch import Tensor, nn

from ..context_parallel import Scheme
from ..ops.aligned import apply_token_by_token
from ..ops.readout.base import (
    PassThroughReadout,
    PlainReadout,
    SplitReadout,
    grouped_rms_norm,
)
from ..ops.stages import GatedNorm
from .base import RecurrentMixer
from .hooks import only_waits_for_parameters, wait_for_parameters
from .out_norm import FORWARDS_OF_PLAIN_NORMS, is_plain_norm
from .tensor_parallel import device_for, mark_sharded


class MambaLayerMixer(RecurrentMixer):
    """The base of mixers in which a group of heads shares keys, queries and the output
    norm (Mamba2, Gated DeltaProduct).

        out = out_proj(RMSNorm_group(y * SiLU(z)))       y: the recurrence's output

    The sizes come from the config's ``mamba_*`` fields. The attributes with sizes have
    the same names as in Megatron's mixers. A subclass sets ``rmsnorm`` and ``norm_eps``
    before :meth:`_build`.
    """

    use_muon = False  # as in Megatron's mixers
    conv_init_bounds_bias = False
    parameters_split_by_heads = ("norm.weight",)
    rmsnorm: bool  # whether a norm follows the gate before out_proj
    norm_eps: float
    norm: GroupedRMSNorm  # set if rmsnorm
    # The attention_mask of the MambaLayer around this mixer, while that layer runs.
    mask_of_layer: Tensor | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # the first mixer changes Megatron's MambaLayer
        pass_masks_to_mixers()
        super().__init__(*args, **kwargs)

    def _set_size_attributes(self) -> None:
        """Set attributes with sizes, named as in Megatron's mixer, for code that reads
        them."""
        all_ranks = self.global_dims
        local = self.dims
        self.d_state = all_ranks.state_dim
        self.headdim = all_ranks.head_dim
        self.nheads = all_ranks.num_heads
        self.ngroups = all_ranks.num_groups
        self.d_inner = all_ranks.d_inner
        self.nheads_local_tp = local.num_heads
        self.ngroups_local_tp = local.num_groups
        self.d_inner_local_tp = local.d_inner
        self.layout = local.layout

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        inference_context: BaseInferenceContext | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        sequence_len_offset: int | None = None,
        *,
        inference_params: BaseInferenceContext | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        **kwargs: object,
    ) -> tuple[Tensor, Tensor | None]:
        """The forward of :class:`RecurrentMixer`. Without an ``attention_mask`` it
        checks the mask of the MambaLayer around this mixer."""
        if attention_mask is None:
            mask = self.mask_of_layer
        else:
            mask = attention_mask
        return super().forward(
            hidden_states,
            mask,
            inference_context,
            packed_seq_params,
            sequence_len_offset,
            inference_params=inference_params,
            pg_collection=pg_collection,
            **kwargs,
        )

    @property
    def activation(self) -> str:
        """The activation of convolution and gate, under the name of Megatron's
        mixer."""
        return "silu"

    def _build_out_norm(self, submodules: object) -> None:
        """Build ``norm`` for this rank's channels if ``rmsnorm``; ``submodules`` is not
        read."""
        if self.rmsnorm:
            sizes = self.dims
            self.norm = GroupedRMSNorm(
                sizes.d_inner,
                sizes.num_groups,
                self.norm_eps,
                device_for(self.config),
                self.config.params_dtype,
            )

    @torch.no_grad()
    def _init_further_parameters(self) -> None:
        if self.rmsnorm:
            self.norm.weight.fill_(1)

    @property
    def gate_reads_own_rows(self) -> bool:
        """Whether gate and norm run after ``passage.from_stages``, by a call of the
        module ``norm``. They do if the norm is not a plain norm over this rank's
        groups, since kernels compute only such a norm."""
        if not self.rmsnorm:
            return False
        plain = is_plain_norm(self.norm) and only_waits_for_parameters(self.norm)
        return not plain or self.norm.groups != self.ngroups_local_tp

    def _norm_for(self, scheme: Scheme) -> GatedNorm | SplitReadout | None:
        """The norm and gate for rows of this scheme; without ``rmsnorm`` None, which
        means a gate without a norm.

        The norm needs all heads of a group. If a head exchange puts these heads on
        several ranks, the gate is applied before ``passage.from_stages``, and the norm
        after ``passage.from_stages``. With :attr:`gate_reads_own_rows` gate and norm
        are both applied after ``passage.from_stages``, by a call of the module
        ``norm``.
        """
        if not self.rmsnorm:
            return None
        layout = scheme.layout
        if self.gate_reads_own_rows:
            gate = self.layout.gate_columns
            # the first step only reshapes; the second gets this rank's own rows
            return SplitReadout(
                PassThroughReadout(layout.gate_columns, layout.state_heads),
                lambda o, rows: self.norm(o, rows[..., gate]).contiguous(),
                second_step_after_exchange=True,
            )
        wait_for_parameters(self.norm)
        weight = self.norm.weight
        eps = self.norm.eps
        # the groups of this tensor-parallel rank, and those in the rows after the
        # exchange
        groups = self.ngroups_local_tp
        exchanged_groups = layout.heads("group")
        if not scheme.exchanges_heads:
            return GatedNorm(weight, eps, groups=exchanged_groups)
        if exchanged_groups * scheme.size == groups:
            own_weight = scheme.local_parameter(weight)
            return GatedNorm(own_weight, eps, groups=exchanged_groups)
        norm = partial(grouped_rms_norm, gamma=weight, groups=groups, eps=eps)
        if self.config.batch_invariant_mode:
            norm = partial(apply_token_by_token, norm)
        return SplitReadout(
            PlainReadout(layout.gate_columns),
            lambda u, _: norm(u),
            second_step_after_exchange=True,
        )


class GroupedRMSNorm(nn.Module):
    """RMSNorm over each of ``groups`` groups of neighbouring channels, after a gate.

    u = x * silu(gate)        y = u * rsqrt(mean_group(u^2) + eps) * weight

    ``channels`` and ``groups`` are those of one tensor-parallel rank.
    """

    def __init__(
        self,
        channels: int,
        groups: int,
        eps: float,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        """Make ``weight`` ``[channels]``, filled with 1 and marked as split over
        tensor-parallel ranks."""
        super().__init__()
        self.groups = groups
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(channels, device=device, dtype=dtype))
        mark_sharded(self.weight, (channels,))

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        """y for ``x`` and ``gate`` ``[..., channels]``."""
        wide = torch.promote_types(x.dtype, torch.float32)
        u = x.to(wide) * F.silu(gate.to(wide))
        return grouped_rms_norm(u, self.weight, self.groups, self.eps).to(x.dtype)


# `is_plain_norm` now accepts this class, so kernels may compute the norm
FORWARDS_OF_PLAIN_NORMS[GroupedRMSNorm] = GroupedRMSNorm.forward


def check_time_steps(
    dt_init_range: tuple[float, float],
    dt_init_floor: float,
    dt_limit: tuple[float, float] = (0.0, math.inf),
) -> None:
    """Raise a ValueError if a range of time steps is empty or has an illegal bound.

    A bound of ``dt_init_range``, and ``dt_init_floor``, must be above 0; a bound of
    ``dt_limit`` may be 0. In each range low <= high.
    """
    low, high = dt_init_range
    if not 0 < low <= high:
        raise ValueError(f"dt_min={low}, dt_max={high} must be 0 < dt_min <= dt_max.")
    if not dt_init_floor > 0:
        raise ValueError(f"dt_init_floor={dt_init_floor} must be above 0.")
    if len(dt_limit) != 2 or not 0 <= dt_limit[0] <= dt_limit[1]:
        raise ValueError(
            f"dt_limit={dt_limit} must be (least, greatest) with 0 <= least."
        )


@cache
def pass_masks_to_mixers() -> None:
    """Change Megatron's MambaLayer: it gives its mask to a :class:`MambaLayerMixer`.

    Without this change the layer would drop the mask. The mixer refuses the masks that
    other mixers refuse, such as masks between documents.
    """
    theirs = MambaLayer.forward

    @wraps(theirs)
    def forward(
        self: MambaLayer,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Tensor:
        """Megatron's forward; while it runs, the mixer has the mask as
        ``mask_of_layer``."""
        if attention_mask is None or not isinstance(self.mixer, MambaLayerMixer):
            return theirs(self, hidden_states, attention_mask, *args, **kwargs)
        self.mixer.mask_of_layer = attention_mask
        try:
            return theirs(self, hidden_states, attention_mask, *args, **kwargs)
        finally:
            self.mixer.mask_of_layer = None

    MambaLayer.forward = forward
