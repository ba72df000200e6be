"""The output norm of a Mamba2 mixer as a module: it owns the weight, the mixer computes with it."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.utils import (
    ensure_metadata_has_dp_cp_group,
    make_sharded_tensors_for_checkpoint,
)
from torch import Tensor, nn

from ...ops.readout.grouped import grouped_rms_norm
from ..hooks import only_waits_for_parameters
from ..tensor_parallel import mark_sharded


class GroupedRMSNorm(nn.Module):
    """RMSNorm over each group of channels of one tensor-parallel rank, after an optional gate.

        u = x * silu(gate)        y = u * rsqrt(mean_group(u^2) + eps) * weight

    Args:
        channels: of this rank.
        groups: of this rank, ``channels / groups`` neighbouring channels each.
        eps: added to the mean square.
        tp_group: the ranks that share the channels.
        device, dtype: of the weight.
    """

    def __init__(
        self, channels: int, groups: int, eps: float, tp_group: Any, device: Any, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.groups, self.eps, self.tp_group = groups, eps, tp_group
        self.weight = nn.Parameter(torch.ones(channels, device=device, dtype=dtype))
        mark_sharded(self.weight, (channels,))

    def forward(self, x: Tensor, gate: Tensor | None = None) -> Tensor:
        """``[..., channels]``, in ``x.dtype``."""
        if gate is None:
            return grouped_rms_norm(x, self.weight, self.groups, self.eps)
        wide = torch.promote_types(x.dtype, torch.float32)
        u = x.to(wide) * F.silu(gate.to(wide))
        return grouped_rms_norm(u, self.weight, self.groups, self.eps).to(x.dtype)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict[str, Any]:
        """The weight for distributed checkpoints, split over the tensor-parallel ranks."""
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            {"weight": 0},
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=ensure_metadata_has_dp_cp_group(metadata)["dp_cp_group"],
        )


_PLAIN_FORWARD = GroupedRMSNorm.forward


def is_plain_grouped_norm(norm: nn.Module, groups: int) -> bool:
    """Whether a mixer may compute ``norm`` itself, over ``groups`` groups of this rank's channels.

    False for other classes, subclasses, parametrised weights, a replaced ``forward``, other groups,
    or hooks except those of :func:`..hooks.wait_for_parameters`. Such a module is called with
    the recurrence's output and the gate.
    """
    return (
        type(norm) is GroupedRMSNorm
        and "forward" not in vars(norm)
        and GroupedRMSNorm.forward is _PLAIN_FORWARD
        and norm.groups == groups
        and only_waits_for_parameters(norm)
    )
