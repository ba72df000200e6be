"""What tensor parallelism needs to know about the layer's own parameters."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn


def mark_sharded(parameter: nn.Parameter, sections: Sequence[int]) -> None:
    """Mark a parameter as split over tensor-parallel ranks along dimension 0.

    ``partition_sizes`` names the sections that are each split by themselves; tools that regather
    weights across tensor-parallel sizes read it.
    """
    parameter.tensor_model_parallel = True
    parameter.partition_dim = 0
    parameter.partition_stride = 1
    parameter.partition_sizes = list(sections)


def sum_gradient_over_tp(parameter: nn.Parameter, tp_size: int, sequence_parallel: bool) -> None:
    """Have Megatron sum the gradient of a replicated parameter that each rank uses on its heads.

    Every rank sees only its own heads, so the true gradient is the sum over tensor-parallel ranks.
    ``finalize_model_grads`` sums parameters marked ``sequence_parallel``, but only when the model
    is sequence parallel; otherwise it offers an average, which a factor of ``tp_size`` turns into
    the sum. (megatron-core 0.19's own layer does neither, and its norm weights drift apart.)
    """
    if tp_size == 1:
        return
    if sequence_parallel:
        parameter.sequence_parallel = True
    else:
        parameter.average_gradients_across_tp_domain = True
        parameter.register_hook(lambda grad: grad * tp_size)
