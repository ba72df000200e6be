"""Layers of models that Megatron cannot build whole: the layer is transformers', and comes back.

OLMo Hybrid   separate projections, three convolutions in its files, write strengths up to 2
Qwen4-Exp     the output gate is a sigmoid
"""

import copy

import pytest
import torch
from megatron.core.transformer.spec_utils import build_module

from megatron_gdn.gdn.sizes import GDNDims
from megatron_gdn.hf import gdn_layer_from_hf, gdn_layer_to_hf, parse_hf_config
from megatron_gdn.specs import gated_delta_net_spec
from tests.hf.float64_layer import float64_layer
from tests.hf.tiny_models import build
from tests.parallel import assert_close, make_config, parallel

OLMO, QWEN4 = "OlmoHybridForCausalLM", "Qwen4ExpForCausalLM"
# Sizes of OLMo Hybrid's own heads, two of them.
HEADS = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 2,
    "linear_key_head_dim": 96, "linear_value_head_dim": 192,
}  # fmt: skip
LAYERS = {
    "olmo": (OLMO, {}, "separate, one conv"),
    "olmo 96 192": (OLMO, HEADS, "separate, one conv"),
    "qwen4": (QWEN4, {}, "flat"),
}


def options_of(theirs) -> dict:
    norm = theirs.o_norm if hasattr(theirs, "o_norm") else theirs.norm
    return {
        "output_gate_activation": norm.activation,
        "allow_neg_eigval": getattr(theirs, "allow_neg_eigval", False),
    }


def megatron_config(config, theirs):
    norm = theirs.o_norm if hasattr(theirs, "o_norm") else theirs.norm
    names = ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim")
    sizes = {f"linear_{name}": getattr(config, f"linear_{name}") for name in names}
    return make_config(
        hidden_size=config.hidden_size, layernorm_epsilon=norm.variance_epsilon,
        layernorm_zero_centered_gamma=True, **sizes,
    )  # fmt: skip


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_has_the_outputs_and_gradients_of_transformers(pools, name):
    """fp32, 1e-5 of the largest entry beside the equation in float64, which settles who errs."""
    pools(1).run(layer_equals_transformers, name)


def layer_equals_transformers(name: str) -> None:
    family, sizes, storage = LAYERS[name]
    model = build(family, **sizes)
    theirs = model.model.layers[0].linear_attn
    config = megatron_config(model.config, theirs)
    dims = GDNDims.from_config(config)
    spec = gated_delta_net_spec("local", **options_of(theirs))
    with parallel():
        layer = build_module(spec, config, layer_number=1)
        hold_to_the_equation(layer, theirs, dims, storage)


def hold_to_the_equation(layer, theirs, dims, storage) -> None:
    (state,) = gdn_layer_from_hf(theirs.state_dict(), dims, storage)
    layer.load_state_dict(state)
    torch.manual_seed(4)
    x, weight = torch.randn(2, 2, 70, 24)
    truth, params = float64_layer(theirs, x.double())
    (truth * weight).sum().backward()
    ours = layer(x.transpose(0, 1))[0].transpose(0, 1)
    (ours * weight).sum().backward()
    assert_close("output", ours, truth, 1e-5)
    assert_close("output of transformers", ours, theirs(x), 1e-5)
    found = {name: parameter.grad for name, parameter in layer.named_parameters()}
    back = gdn_layer_to_hf([found], dims, storage, zero_centered_gamma=False)
    for key, param in params.items():
        assert_close(f"gradient of {key}", back[key], param.grad, 1e-5)


@pytest.mark.parametrize("tp_size", [1, 2])
@pytest.mark.parametrize("name", LAYERS)
def test_weights_return_bit_for_bit(name, tp_size):
    family, sizes, storage = LAYERS[name]
    model = build(family, **sizes)
    file = model.model.layers[0].linear_attn.state_dict()
    dims = GDNDims.from_config(model.config)
    ranks = gdn_layer_from_hf(file, dims, storage, tp_size, zero_centered_gamma=False)
    back = gdn_layer_to_hf(ranks, dims, storage, zero_centered_gamma=False)
    assert back.keys() == file.keys()
    for key, tensor in file.items():
        assert torch.equal(back[key], tensor), key


def test_olmo_hybrids_files_have_the_layer_of_its_model(tmp_path):
    """Published files have three convolutions; transformers joins them as it loads.

    As it saves, transformers 5.23 cuts them into thirds, which are no heads where K is not V.
    """
    from safetensors.torch import load_file, save_file

    model = build(OLMO)
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    prefix, convs = "linear_attn.", [f"{name}_conv1d.weight" for name in "qkv"]
    dims = GDNDims.from_config(model.config)
    for layer in range(3):
        keys = [f"model.layers.{layer}.{prefix}{name}" for name in convs]
        conv = torch.cat([tensors[key] for key in keys])
        tensors |= zip(keys, map(torch.clone, conv.split(dims.layout.conv_widths)), strict=True)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    loaded = type(model).from_pretrained(tmp_path).state_dict()
    assert all(torch.equal(loaded[key], tensor) for key, tensor in model.state_dict().items())
    prefix = f"model.layers.0.{prefix}"
    file = {k.removeprefix(prefix): x for k, x in tensors.items() if k.startswith(prefix)}
    ranks = gdn_layer_from_hf(file, dims, "separate", 2)
    module = model.model.layers[0].linear_attn.state_dict()
    expected = gdn_layer_from_hf(module, dims, "separate, one conv", 2)
    for rank, theirs in zip(ranks, expected, strict=True):
        assert all(torch.equal(rank[name], tensor) for name, tensor in theirs.items())
    originals = {"o_norm.weight": file["o_norm.weight"]}
    back = gdn_layer_to_hf(copy.deepcopy(ranks), dims, "separate", originals=originals)
    assert back.keys() == file.keys()
    assert all(torch.equal(back[key], tensor) for key, tensor in file.items())


@pytest.mark.parametrize("family", [OLMO, QWEN4])
def test_a_whole_model_is_refused_by_what_megatron_lacks(family):
    with pytest.raises(ValueError, match=f"{family} is not converted whole: .*gdn_layer_from_hf"):
        parse_hf_config({"architectures": [family]})
