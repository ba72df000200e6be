"""The layer's linears: computed inside the mixer's function where they are plain, called elsewhere.

A linear of Megatron's that neither communicates nor adds a bias is one product. As a module it is
two autograd functions, and each takes the host longer than the launch of the product. So the mixer
takes the weights of such linears and computes the products in its own function, with the bits of
the modules.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel import layers
from torch import Tensor, nn

from .module_hooks import any_global_hooks, has_hooks
from .observe import watched
from .ops.mixer_function import Projections


def _what_a_call_runs() -> tuple[Any, ...]:
    """The functions of Megatron that a call of such a linear runs, as they are at this moment."""
    column, row = layers.ColumnParallelLinear, layers.RowParallelLinear
    return (
        column.forward, column._forward_impl, row.forward, row._forward_impl,
        layers.linear_with_grad_accumulation_and_async_allreduce,
        layers.linear_with_frozen_weight,
    )  # fmt: skip


def _plain_classes() -> tuple[type, ...]:
    """Megatron's linears; none if functions of another file stand in the place of theirs."""
    try:
        files = {function.__code__.co_filename for function in _what_a_call_runs()}
    except AttributeError:
        return ()
    if files != {layers.__file__}:
        return ()
    return layers.ColumnParallelLinear, layers.RowParallelLinear


_PLAIN_CLASSES = _plain_classes()
_KNOWN = _what_a_call_runs() if _PLAIN_CLASSES else ()


class PlainProjections:
    """Says for each forward of a layer whether its mixer computes both linears.

    What a linear keeps from its construction is looked at when it is seen first.
    """

    def __init__(self) -> None:
        self._seen: tuple[Any, Any] = (None, None)
        self._plain = False

    def weights(self, in_proj: nn.Module, out_proj: nn.Module, rows: Tensor) -> Projections | None:
        """The weights of the linears, if the mixer computes them over ``rows`` ``[s, B, D]``.

        None, so that the modules are called, if one of these holds:

        - a linear is not as :func:`is_plain_linear` wants it, or a call of it would run a hook, a
          ``forward`` of its own, a bias, an offload, or sums into ``main_grad``;
        - a weight is no plain parameter, or of another dtype or device than ``rows``;
        - Megatron's functions were replaced, torch has hooks for all modules, autocast is on;
        - there are no tokens, or Megatron's NVTX ranges are on, where each linear has its own.
        """
        seen = self._seen
        if seen[0] is not in_proj or seen[1] is not out_proj:
            self._seen = seen = in_proj, out_proj
            self._plain = is_plain_linear(in_proj) and is_plain_linear(out_proj)
        if not self._plain or any_global_hooks() or watched() or _what_a_call_runs() != _KNOWN:
            return None
        weights, dtype, device = [], rows.dtype, rows.device
        for linear in seen:
            weight = linear._parameters.get("weight")
            own = vars(linear)
            if (
                type(weight) is not nn.Parameter
                or weight.dtype != dtype
                or weight.device != device
                or linear._parameters.get("bias") is not None
                or own["gradient_accumulation_fusion"]
                or own["config"]._cpu_offloading_context is not None
                or "forward" in own
                or "_forward_impl" in own
                or type(linear) not in _PLAIN_CLASSES
                or has_hooks(linear)
            ):
                return None
            weights.append(weight)
        if not rows.numel() or torch.is_autocast_enabled(device.type):
            return None
        return Projections(*weights)


def is_plain_linear(linear: Any) -> bool:
    """Whether ``linear`` was built as one product on one tensor-parallel rank.

    Exactly Megatron's own classes, with whole weights, not of an expert, without sequence
    parallelism and without weight gradients that are put off.
    """
    return type(linear) in _PLAIN_CLASSES and not (
        linear.sequence_parallel
        or linear.explicit_expert_comm
        or linear.tp_group.size() > 1
        or getattr(linear, "gtp_remat_size", 1) > 1
        or linear.config.defer_embedding_wgrad_compute
    )
