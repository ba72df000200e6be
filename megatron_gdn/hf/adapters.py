"""Low-rank adapters around the linears of a Megatron model, as Megatron-Bridge's peft puts them.

Bridge replaces a linear by a wrapper: ``to_wrap`` is the linear, ``adapter`` its low-rank branch.
``weight`` of a wrapper is that of the plain linear with the same output, W + (alpha / dim) B A.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn

from ..compat.fp8_weights import dequantised


def base_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters by the names that they have without adapters; those of adapters left out."""
    for name, parameter in model.named_parameters():
        owner, of_adapter, _ = name.partition(".adapter.")
        if not (of_adapter and _is_wrapper(model.get_submodule(owner))):
            yield name.replace(".to_wrap.", "."), parameter


def with_adapters_merged(model: nn.Module) -> Callable[[nn.Parameter], Tensor]:
    """A function from a parameter of `base_parameters` to the tensor that an export writes.

    It is the parameter itself, the values of one that Transformer Engine stores in FP8, or, of a
    wrapped linear, the merged weight on this rank. To merge is a collective over the
    tensor-parallel ranks.

    Raises:
        NotImplementedError: a wrapper does not tell its merged weight, as Bridge's DoRA.
    """
    wrappers: dict[nn.Parameter, nn.Module] = {}
    for name, module in model.named_modules():
        if _is_wrapper(module):
            if not hasattr(type(module), "weight"):
                raise NotImplementedError(
                    f"{name} is a {type(module).__name__}, which does not tell its merged weight: "
                    f"an export would lose the adapter. Legal are wrappers with a property "
                    f"`weight`, such as those of Megatron-Bridge's LoRA. Merge this one yourself."
                )
            wrappers[cast(Any, module.to_wrap).weight] = module

    @torch.no_grad()
    def merged(parameter: nn.Parameter) -> Tensor:
        wrapper = wrappers.get(parameter)
        weight = parameter if wrapper is None else cast(Tensor, wrapper.weight)
        return dequantised(weight.detach())

    return merged


def _is_wrapper(module: nn.Module) -> bool:
    return {"to_wrap", "adapter"} <= module._modules.keys()
