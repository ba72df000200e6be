"""Megatron's own Gated DeltaNet, and its Kimi Delta Attention and its Gated DeltaProduct
if it has them, by ``--spec``, in a stack that is otherwise ours."""

from contextlib import ExitStack
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from megatron.core.ssm.gated_delta_net import gdn

from megatron_gdn import GatedDeltaNet
from megatron_gdn.specs import gpt_block_spec, hybrid_stack_spec
from tests import upstream_gdp, upstream_kda
from tests.precision.training import stack_of

patched = ExitStack()
hybrid_stack = stack_of(upstream_layer=True)
_mixer = hybrid_stack.submodules.gdn_layer.submodules.self_attention
_of_one_document = gdn.chunk_gated_delta_rule


def _document_by_document(*rows: Any, cu_seqlens: Any = None, **named: Any) -> Any:
    """Megatron's rule in torch takes no offsets; fla's kernel, which does, needs a
    GPU."""
    if cu_seqlens is None:
        return _of_one_document(*rows, **named)

    def cut(value: Any, start: int, end: int) -> Any:
        return value[:, start:end] if isinstance(value, torch.Tensor) else value

    found = [
        _of_one_document(
            *(cut(value, *ends) for value in rows),
            **{name: cut(value, *ends) for name, value in named.items()},
        )[0]
        for ends in pairwise(cu_seqlens.tolist())
        if ends[1] > ends[0]
    ]
    return torch.cat(found, dim=1), None


gdn.chunk_gated_delta_rule = _document_by_document


def with_kda_of_megatron(stack: Any) -> Any:
    """``stack`` with Megatron's class in 'K' layers, and what stands in for kernels."""
    patched.enter_context(upstream_kda.without_kernels())
    layers = stack.params["layers"]
    layer = layers["K"]
    mixer = upstream_kda.spec_of_megatrons()
    parts = replace(layer.submodules, self_attention=mixer)
    layers = {**layers, "K": replace(layer, submodules=parts)}
    return replace(stack, params={"layers": layers})


if upstream_kda.HAS_KDA:
    hybrid_stack = with_kda_of_megatron(hybrid_stack)


def with_gdp_of_megatron(stack: Any) -> Any:
    """``stack`` with Megatron's class in 'M' layers, and what stands in for kernels."""
    patched.enter_context(upstream_gdp.without_kernels())
    layer = stack.submodules.mamba_layer
    module = upstream_gdp.megatrons_class()
    mixer = replace(layer.submodules.mixer, module=module)
    layer = replace(layer, submodules=replace(layer.submodules, mixer=mixer))
    return replace(stack, submodules=replace(stack.submodules, mamba_layer=layer))


if upstream_gdp.HAS_GDP:
    gdp_stack_spec = with_gdp_of_megatron(hybrid_stack_spec("local", gdp={}))


def gpt_block(*args: Any, **kwargs: Any) -> Any:
    block = gpt_block_spec(*args, **kwargs)
    layers = [
        replace(layer, submodules=replace(layer.submodules, self_attention=_mixer))
        if layer.submodules.self_attention.module is GatedDeltaNet
        else layer
        for layer in block.layer_specs
    ]
    return replace(block, layer_specs=layers)
