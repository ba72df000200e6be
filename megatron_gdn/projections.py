"""The layer's linears: computed inside the mixer's function where they are plain, called elsewhere.

A linear of Megatron's that neither communicates nor adds a bias is one product. As a module it is
two autograd functions, and each takes the host longer than the launch of the product. So the mixer
takes the weights of such linears and computes the products in its own function, with the bits of
the modules.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from torch import Tensor, nn

from .module_hooks import any_global_hooks, has_hooks
from .observe import watched
from .ops.mixer_function import Projections

_PLAIN_FORWARDS = {cls: cls.forward for cls in (ColumnParallelLinear, RowParallelLinear)}


class PlainProjections:
    """Says for each forward of a layer whether its mixer computes both linears.

    What a linear keeps from its construction is looked at when it is seen first.
    """

    def __init__(self) -> None:
        self._seen: tuple[Any, Any] = (None, None)
        self._plain = False

    def weights(self, in_proj: nn.Module, out_proj: nn.Module, rows: Tensor) -> Projections | None:
        """The weights of the linears, if the mixer computes them over ``rows`` ``[s, B, D]``.

        None unless :func:`is_plain_linear` is true of both; with hooks on them or on all modules;
        under autocast, without tokens, and while Megatron's NVTX ranges are on, where each linear
        has a range of its own.
        """
        seen = self._seen
        if seen[0] is not in_proj or seen[1] is not out_proj:
            self._seen = seen = in_proj, out_proj
            self._plain = is_plain_linear(in_proj) and is_plain_linear(out_proj)
        if not self._plain or any_global_hooks() or watched():
            return None
        weights = []
        for linear in seen:
            weight = linear._parameters.get("weight")
            if (
                type(weight) is not nn.Parameter
                or weight.dtype != rows.dtype
                or weight.device != rows.device
                or type(linear).forward is not _PLAIN_FORWARDS.get(type(linear))
                or "forward" in vars(linear)
                or has_hooks(linear)
            ):
                return None
            weights.append(weight)
        if not rows.numel() or torch.is_autocast_enabled(rows.device.type):
            return None
        return Projections(*weights)


def is_plain_linear(linear: Any) -> bool:
    """Whether ``linear`` was built to compute ``x W^T`` and nothing else.

    Exactly Megatron's own classes, no bias, one tensor-parallel rank, and nothing of what Megatron
    does around the product: sums into ``main_grad``, offload, gathered weights.
    """
    if type(linear) not in _PLAIN_FORWARDS:
        return False
    config = linear.config
    return not (
        linear.bias is not None
        or linear.gradient_accumulation_fusion
        or linear.sequence_parallel
        or linear.explicit_expert_comm
        or linear.tp_group.size() > 1
        or getattr(linear, "gtp_remat_size", 1) > 1
        or config._cpu_offloading_context is not None
        or config.defer_embedding_wgrad_compute
    )
