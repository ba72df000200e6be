"""What tensor parallelism needs to know about the layer's own parameters."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..compat.observe import log_once
from ..ops.first_derivative import first_derivative_only


def mark_sharded(parameter: nn.Parameter, sections: Sequence[int]) -> None:
    """Mark a parameter as split over tensor-parallel ranks along dimension 0.

    ``partition_sizes`` names the sections that are each split by themselves; tools that regather
    weights across tensor-parallel sizes read it.
    """
    vars(parameter).update(
        tensor_model_parallel=True,
        partition_dim=0,
        partition_stride=1,
        partition_sizes=list(sections),
    )


def mark_packed(linear: nn.Module, sections: Sequence[int], use_muon: bool) -> None:
    """Mark a column-parallel linear whose rows are several sections, each split by itself.

    Megatron's resharding reads ``partition_sizes`` (this rank's sizes). Its Muon reads the others:
    the marks of a fused attention projection, with sections in place of Q, K and V, make it
    orthogonalise each section by itself. ``use_muon=False`` gives the weight to Adam, where
    Megatron reads it (its main branch).
    """
    sizes, muon_splits = list(sections), muon_reads_sections()
    if not muon_splits:
        log_once(
            "megatron_gdn: Muon of this megatron-core would orthogonalise in_proj as one matrix. "
            "Install megatron-core 0.19 or later to train with Muon."
        )
    for parameter in (getattr(linear, "weight", None), getattr(linear, "bias", None)):
        if isinstance(parameter, nn.Parameter):
            vars(parameter).update(partition_sizes=sizes, use_muon=use_muon)
            if parameter.ndim == 2 and muon_splits:
                vars(parameter).update(is_qkv=True, qkv_split_shapes=sizes)


def muon_reads_sections() -> bool:
    """Whether Megatron's Muon reads a parameter's own sections, and fp32 masters copy them.

    Before 0.19 it cuts every parameter marked ``is_qkv`` in the sizes of the model's attention.
    """
    from megatron.core.tensor_parallel import layers

    return "qkv_split_shapes" in layers._MODEL_PARALLEL_ATTRIBUTE_DEFAULTS


class _SumGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, parameter: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return parameter.view_as(parameter)

    @staticmethod
    @first_derivative_only
    def backward(ctx, gradient: Tensor):
        # A copy, because others may hold this gradient; in fp32, so that the sum is rounded once.
        wide = torch.promote_types(gradient.dtype, torch.float32)
        total = gradient.to(wide, copy=True, memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        return total.to(gradient.dtype), None


def sum_gradient(parameter: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """The same values; the gradient is the sum over ``group`` (None: nothing is summed).

    For a replicated parameter that each tensor-parallel rank uses on its own heads. The sum is part
    of the backward, so it needs no hook or mark on the parameter and no help from Megatron.
    """
    if group is None or not (torch.is_grad_enabled() and parameter.requires_grad):
        return parameter
    return _SumGradient.apply(parameter, group)


@contextmanager
def gradients_summed(module: nn.Module, group: dist.ProcessGroup | None) -> Iterator[None]:
    """Inside this context, ``module`` reads its parameters through :func:`sum_gradient`.

    Raises:
        RuntimeError: something else replaced the parameters meanwhile, as ``fully_shard`` of
            ``module`` itself does; their gradients would not be summed.
    """
    if group is None or not torch.is_grad_enabled():
        yield
        return
    slots: list[tuple[dict[str, Any], str, nn.Parameter]] = [
        (part._parameters, name, parameter)
        for part in module.modules()
        for name, parameter in part._parameters.items()
        if parameter is not None and parameter.requires_grad
    ]
    summed = {parameter: sum_gradient(parameter, group) for _, _, parameter in slots}
    for parameters, name, parameter in slots:
        parameters[name] = summed[parameter]
    replaced = []
    try:
        yield
    finally:
        for parameters, name, parameter in slots:
            if parameters.get(name) is summed[parameter]:
                parameters[name] = parameter
            else:
                replaced.append(name)
    if replaced:
        raise RuntimeError(
            f"{type(module).__name__}: {', '.join(replaced)} changed during the forward, so the "
            f"gradient cannot be summed over {group.size()} tensor-parallel ranks. Under torch's "
            f"fully_shard, shard the whole GatedDeltaNet (or the layer around it), not its norm."
        )
