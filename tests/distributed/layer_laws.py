"""What laws of one Gated DeltaNet need: the layer, its random values, packed
documents."""

from collections.abc import Callable

import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import checkpoint as megatron_checkpoint
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    TransformerLayerSubmodules,
)
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megatron_gdn.compat.torch_norm import TorchRMSNorm
from megatron_gdn.specs import gated_delta_net_spec
from tests.parallel import groups_of_megatron, make_config


def thd(lengths, device="cpu", real_lengths=None) -> PackedSeqParams:
    cu = torch.tensor([0, *lengths], dtype=torch.int32, device=device).cumsum(0).int()
    longest = {"max_seqlen_q": max(lengths), "max_seqlen_kv": max(lengths)}
    if real_lengths is None:
        return PackedSeqParams(
            qkv_format="thd", cu_seqlens_q=cu, cu_seqlens_kv=cu, **longest
        )
    real = (
        torch.tensor([0, *real_lengths], dtype=torch.int32, device=device)
        .cumsum(0)
        .int()
    )
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=real,
        cu_seqlens_kv=real,
        cu_seqlens_q_padded=cu,
        cu_seqlens_kv_padded=cu,
        **longest,
    )


def build_layer(config, pg_collection, options, **parts):
    """``parts``: modules in the places of the spec's."""
    spec = gated_delta_net_spec("local", **options)
    vars(spec.submodules).update(parts)
    return build_module(spec, config, layer_number=1, pg_collection=pg_collection)


def build(config=None, **options):
    """A layer of Megatron's own groups, under the tests' config if none is given."""
    return build_layer(config or make_config(), None, options)


def over_ranks(changes: dict | None = None, **options):
    """A layer of the ranks of Megatron's parallel state; ``changes`` are the
    config's."""
    groups = groups_of_megatron()
    return build_layer(
        make_config(**sizes_of(groups), **(changes or {})), groups, options
    )


def sizes_of(groups: ProcessGroupCollection) -> dict[str, int]:
    """What a config says of these groups."""
    tp, cp = groups.tp.size(), groups.cp.size()
    return {"tensor_model_parallel_size": tp, "context_parallel_size": cp}


def transformer_layer(
    config, mixer=None, norm=TorchRMSNorm, **options
) -> TransformerLayer:
    """Megatron's, with this mixer and nothing else in it."""
    parts = TransformerLayerSubmodules(
        input_layernorm=norm,
        self_attention=mixer or gated_delta_net_spec("local"),
        self_attn_bda=get_bias_dropout_add,
    )
    spec = ModuleSpec(module=TransformerLayer, submodules=parts)
    return build_module(spec, config, layer_number=1, **options)


class NormInside(nn.Module):
    """A norm that only can be called, whose parameters belong to a module inside it."""

    def __init__(self, config, hidden_size, eps):
        super().__init__()
        self.inner = nn.RMSNorm(hidden_size, eps)
        self.shift = nn.Parameter(torch.zeros(hidden_size))

    def forward(self, x):
        return self.inner(x) + self.shift


def layer_with(config, groups, called: bool, **options):
    """A layer whose ``out_norm`` is called, or fused."""
    return build_layer(
        config, groups, options, **({"out_norm": NormInside} if called else {})
    )


def randomise_(layer) -> None:
    """Give every parameter its own random values, norm weights and biases included."""
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)


def forward_backward(
    layer, x, packed=None, *, weight=None, run: Callable | None = None
) -> dict[str, Tensor]:
    """Output and every gradient; the loss is the output's square, or ``weight`` of
    it."""
    layer.zero_grad()
    leaf = x.detach().clone().requires_grad_()
    out, bias = (layer if run is None else run)(leaf, None, packed_seq_params=packed)
    out = out if bias is None else out + bias
    (
        out.square()
        if weight is None
        else (out.float() if out.dtype == torch.bfloat16 else out) * weight
    ).sum().backward()
    grads = {name: p.grad.clone() for name, p in layer.named_parameters()}
    return {"output": out.detach(), "input": leaf.grad, **grads}


def require_same_bits(
    found: dict[str, Tensor], expected: dict[str, Tensor], what=""
) -> None:
    assert found.keys() == expected.keys()
    different = [
        name for name, x in expected.items() if not torch.equal(found[name], x)
    ]
    assert not different, (what, different)


def checkpointed(function, *args):
    return checkpoint(function, *args, use_reentrant=False)


def reentrant(function, *args):
    return checkpoint(function, *args, use_reentrant=True)


def by_megatron(function, x, *args):
    return megatron_checkpoint(lambda x: function(x, *args), False, x)
