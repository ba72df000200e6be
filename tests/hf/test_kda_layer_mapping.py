"""Kimi Delta Attentions of three families: the layer is transformers', and returns bit for bit."""

import pytest
import torch

from megatron_gdn.hf import kda_layer_from_hf, kda_layer_to_hf
from megatron_gdn.kda.sizes import KDADims
from tests.hf.tiny_models import build
from tests.kda_mixers import kda_config, whole_mixer
from tests.layer.test_kda import written_out
from tests.parallel import assert_close, parallel

KIMI, GLM = "KimiLinearForCausalLM", "Glm5NextForConditionalGeneration"
BAILING = "BailingHybridForCausalLM"
FULL = {"forget_rank": 0, "output_rank": 0}
# Of each model: its model_type, changes to its config, and our layer's options.
LAYERS = {
    "kimi_linear": (KIMI, "kimi_linear", {}, {}),
    "glm5_next": (GLM, "glm5_next", {}, {"gate_lower_bound": -5.0}),
    "glm5_next unbounded": (GLM, "glm5_next", {"linear_lower_bound": None}, {}),
    "bailing_hybrid": (BAILING, "bailing_hybrid", {}, {**FULL, "gate_lower_bound": -5.0}),
    "bailing_hybrid unbounded": (BAILING, "bailing_hybrid", {"kda_safe_gate": False}, FULL),
}
SIZES = {
    "hidden_size": 24, "linear_num_key_heads": 4, "linear_num_value_heads": 4,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8,
}  # fmt: skip
each = pytest.mark.parametrize("name", LAYERS)


def layer_of(name: str):
    family, kind, changes, options = LAYERS[name]
    model = build(family, **changes)
    text = getattr(model.model, "language_model", model.model)
    ranks = {key: value for key, value in options.items() if key.endswith("_rank")}
    dims = KDADims.from_config(kda_config(**SIZES), **ranks)
    return model, text.layers[0].self_attn, kind, dims


@each
@pytest.mark.parametrize("tp_size", [1, 2, 4])
def test_module_to_shards_to_module_keeps_every_bit(name, tp_size):
    _, theirs, kind, dims = layer_of(name)
    module = theirs.state_dict()
    ranks = kda_layer_from_hf(module, dims, kind, tp_size, in_files=False)
    originals = {"o_norm.weight": module["o_norm.weight"]}
    back = kda_layer_to_hf(ranks, dims, kind, in_files=False, originals=originals)
    assert back.keys() == module.keys()
    for key, tensor in module.items():
        assert back[key].shape == tensor.shape and torch.equal(back[key], tensor), key


@each
def test_files_have_the_layer_of_the_module(name, tmp_path):
    from safetensors.torch import load_file

    model, theirs, kind, dims = layer_of(name)
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    (prefix,) = (
        key.removesuffix("q_conv1d.weight")
        for key in tensors
        if "layers.0." in key and key.endswith("q_conv1d.weight")
    )
    file = {k.removeprefix(prefix): x for k, x in tensors.items() if k.startswith(prefix)}
    ranks = kda_layer_from_hf(file, dims, kind, 2)
    expected = kda_layer_from_hf(theirs.state_dict(), dims, kind, 2, in_files=False)
    for rank, other in zip(ranks, expected, strict=True):
        assert rank.keys() == other.keys()
        assert all(torch.equal(rank[key], tensor) for key, tensor in other.items())
    originals = {"o_norm.weight": file["o_norm.weight"]}
    back = kda_layer_to_hf(ranks, dims, kind, originals=originals)
    assert back.keys() == file.keys()
    assert all(torch.equal(back[key], tensor) for key, tensor in file.items())


@each
def test_a_layer_has_the_outputs_and_gradients_of_transformers(pools, name):
    """fp32, beside the recurrence in float64: 1e-5, or twice what transformers errs by."""
    pools(1).run(layer_equals_transformers, name)


def layer_equals_transformers(name: str) -> None:
    options = LAYERS[name][3]
    _, theirs, kind, dims = layer_of(name)
    config = kda_config(**SIZES, layernorm_epsilon=theirs.o_norm.variance_epsilon)
    with parallel():
        ours = whole_mixer(config, **options)
    (state,) = kda_layer_from_hf(
        theirs.state_dict(), dims, kind, in_files=False, zero_centered_gamma=False
    )
    ours.load_state_dict(state)
    torch.manual_seed(4)
    x, weight = torch.randn(2, 2, 70, 24)
    y = theirs(x)
    (y * weight).sum().backward()
    got = ours(x.transpose(0, 1))[0].transpose(0, 1)
    (got * weight).sum().backward()
    found = {key: parameter.grad for key, parameter in ours.named_parameters()}
    ours.double()
    wanted, parameters = written_out(ours, x.transpose(0, 1).double(), (70,))
    (wanted.transpose(0, 1) * weight).sum().backward()
    exact = {key: parameter.grad for key, parameter in parameters.items()}

    def named_as_theirs(gradients):
        named = {"in_files": False, "zero_centered_gamma": False}
        return kda_layer_to_hf([gradients], dims, kind, **named)

    assert_close("output", got, wanted.transpose(0, 1), 1e-5)
    mine, true = named_as_theirs(found), named_as_theirs(exact)
    for key, parameter in theirs.named_parameters():
        error = (parameter.grad - true[key]).abs().max() / true[key].abs().max()
        assert_close(key, mine[key], true[key], max(1e-5, 2 * error.item()))


def test_what_does_not_fit_is_refused_by_name():
    _, theirs, kind, dims = layer_of("kimi_linear")
    module = theirs.state_dict()
    with pytest.raises(ValueError, match=r"a layer of kimi_linear has .*missing \['A_log'"):
        kda_layer_from_hf(module, dims, kind)
    with pytest.raises(ValueError, match="cannot split 4 key heads"):
        kda_layer_from_hf(module, dims, kind, 3, in_files=False)
