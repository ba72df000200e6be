"""Layers of every family, of models that Megatron cannot build too: ours is
transformers'."""

from typing import NamedTuple

import pytest
import torch
from megatron.core.transformer.spec_utils import build_module

from megatron_gdn.gdn.sizes import GDNDims
from megatron_gdn.hf import (
    layer_from_hf,
    layer_to_hf,
    parse_hf_config,
)
from megatron_gdn.kda.sizes import KDADims
from megatron_gdn.specs import gated_delta_net_spec
from tests.distributed.mixers import whole
from tests.hf.drop_in.conftest import BAILING, DENSE, GLM, KIMI, NEXT, OLMO, QWEN4
from tests.hf.float64_layer import float64_layer
from tests.hf.test_layer_mapping import assert_same_file
from tests.hf.tiny_models import build
from tests.parallel import assert_close, make_config, parallel

# Sizes of OLMo Hybrid's own heads, two of them.
HEADS = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 96,
    "linear_value_head_dim": 192,
}
FULL = {"forget_rank": 0, "output_rank": 0}
LOW = {"forget_rank": 8, "output_rank": 8}  # the head dim
KDA_SIZES = {
    "hidden_size": 24,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}


class Layer(NamedTuple):
    """``kind``: a GDN's storage, or the model_type of a KDA, whose own ``options`` are
    given."""

    family: str
    kind: str
    changes: dict = {}
    options: dict | None = None


JOINED = "separate, one conv"
LAYERS = {
    "next": Layer(NEXT, "interleaved"),
    "next ratio 4": Layer(NEXT, "interleaved", {"linear_num_value_heads": 16}),
    "dense": Layer(DENSE, "flat"),
    "dense ratio 1": Layer(DENSE, "flat", {"linear_num_value_heads": 4}),
    "dense ratio 3": Layer(DENSE, "flat", {"linear_num_value_heads": 12}),
    "olmo": Layer(OLMO, JOINED),
    "olmo 96 192": Layer(OLMO, JOINED, HEADS),
    "qwen4": Layer(QWEN4, "flat"),
    "kimi": Layer(KIMI, "kimi_linear", {}, LOW),
    "glm": Layer(GLM, "glm5_next", {}, {**LOW, "gate_lower_bound": -5.0}),
    "glm unbounded": Layer(GLM, "glm5_next", {"linear_lower_bound": None}, LOW),
    "bailing": Layer(BAILING, "bailing_hybrid", {}, {**FULL, "gate_lower_bound": -5.0}),
    "bailing unbounded": Layer(
        BAILING, "bailing_hybrid", {"kda_safe_gate": False}, FULL
    ),
}
KDAS = [name for name, layer in LAYERS.items() if layer.options is not None]
each = pytest.mark.parametrize("name", LAYERS)


class Mapping:
    """transformers' model, its first linear attention, and our maps of that."""

    def __init__(self, name: str) -> None:
        family, kind, changes, self.options = LAYERS[name]
        self.model = build(family, **changes)
        text = getattr(self.model.model, "language_model", self.model.model)
        if self.options is None:
            self.theirs = text.layers[0].linear_attn
            self.dims = GDNDims.from_config(self.model.config)
            self.stored = {"storage": kind}
        else:
            self.theirs = text.layers[0].self_attn
            ranks = {
                key: value
                for key, value in self.options.items()
                if key.endswith("_rank")
            }
            self.dims = KDADims.of(make_config(**KDA_SIZES), **ranks)
            self.stored = {"family": kind, "in_files": False}
        self.norm = next(x for x in ("o_norm", "norm") if hasattr(self.theirs, x))

    def read(self, state, tp_size=1, **options):
        return layer_from_hf(state, self.dims, tp_size, **{**self.stored, **options})

    def write(self, ranks, **options):
        return layer_to_hf(ranks, self.dims, **{**self.stored, **options})

    def build_ours(self):
        """With transformers' weights; the norms of a Gated DeltaNet are
        zero-centred."""
        norm = getattr(self.theirs, self.norm)
        epsilon = {"layernorm_epsilon": norm.variance_epsilon}
        if self.options is None:
            more = {"allow_neg_eigval": getattr(self.theirs, "allow_neg_eigval", False)}
            spec = gated_delta_net_spec(
                "local", output_gate_activation=norm.activation, **more
            )
            sizes = {key: getattr(self.model.config, key) for key in HEADS}
            config = make_config(
                hidden_size=24, layernorm_zero_centered_gamma=True, **epsilon, **sizes
            )
            ours = build_module(spec, config, layer_number=1)
        else:
            ours = whole("kda", {**KDA_SIZES, **epsilon}, **self.options)
        state = self.theirs.state_dict()
        ours.load_state_dict(
            self.read(state, zero_centered_gamma=self.options is None)[0]
        )
        return ours


@pytest.mark.each_value
@each
@pytest.mark.parametrize("tp_size", [1, 2, 4])
@pytest.mark.parametrize(
    "zero_centered", [False, True], ids=["plain norms", "zero-centred"]
)
def test_weights_return_bit_for_bit(name, tp_size, zero_centered):
    mapping = Mapping(name)
    if tp_size == 4 and name == "olmo 96 192":
        pytest.skip("it has two heads")
    module = mapping.theirs.state_dict()
    gamma = {"zero_centered_gamma": zero_centered}
    originals = {f"{mapping.norm}.weight": module[f"{mapping.norm}.weight"]}
    ranks = mapping.read(module, tp_size, **gamma)
    assert_same_file(mapping.write(ranks, originals=originals, **gamma), module)


@each
def test_a_zero_centred_norm_holds_its_gain_minus_one(name):
    """And nothing else depends on it. transformers' own gains are ones."""
    mapping = Mapping(name)
    module = mapping.theirs.state_dict()
    module[f"{mapping.norm}.weight"].copy_(
        1 + torch.arange(len(module[f"{mapping.norm}.weight"])) / 256
    )
    (plain,), (centred,) = (
        mapping.read(module, zero_centered_gamma=zero_centred)
        for zero_centred in (False, True)
    )
    expected = plain | {"out_norm.weight": plain["out_norm.weight"] - 1}
    assert_same_file(centred, expected)


@each
def test_a_layer_has_the_outputs_and_gradients_of_transformers(pools, name):
    """fp32, 1e-5 of the largest entry; a KDA's gradients may err twice as much as
    transformers'."""
    pools(1).run(layer_equals_transformers, name)


def layer_equals_transformers(name: str) -> None:
    mapping = Mapping(name)
    with parallel():
        ours = mapping.build_ours()
    torch.manual_seed(4)
    x, weight = torch.randn(2, 2, 70, 24)
    x_truth, x_ours, x_theirs = (
        each.clone().requires_grad_() for each in (x.double(), x, x)
    )
    truth, params = float64_layer(mapping.theirs, x_truth)
    got = ours(x_ours.transpose(0, 1))[0].transpose(0, 1)
    theirs = mapping.theirs(x_theirs)
    for y in (truth, got, theirs):
        (y * weight).sum().backward()
    assert_close("gradient of the input", x_ours.grad, x_truth.grad, 1e-5)
    assert_close("output", got, truth, 1e-5)
    assert_close("output of transformers", got, theirs, 1e-5)
    found = {key: parameter.grad for key, parameter in ours.named_parameters()}
    found = mapping.write([found], zero_centered_gamma=False)
    for key, parameter in mapping.theirs.named_parameters():
        true = params[key].grad
        tolerance = 1e-5
        if mapping.options is not None:
            error = (parameter.grad - true).abs().max() / true.abs().max()
            tolerance = max(tolerance, 2 * error.item())
        assert_close(f"gradient of {key}", found[key], true, tolerance)


def layer_in_the_file(folder, end: str) -> dict:
    """Of the first layer, by its own keys; ``end``: of one of them."""
    from safetensors.torch import load_file

    tensors = load_file(folder / "model.safetensors")
    (prefix,) = (
        k.removesuffix(end) for k in tensors if "layers.0." in k and k.endswith(end)
    )
    return {
        k.removeprefix(prefix): x for k, x in tensors.items() if k.startswith(prefix)
    }


@pytest.mark.parametrize("name", KDAS)
def test_files_have_the_layer_of_the_module(name, tmp_path):
    mapping = Mapping(name)
    mapping.model.save_pretrained(tmp_path)
    file = layer_in_the_file(tmp_path, "q_conv1d.weight")
    ranks = mapping.read(file, 2, in_files=True)
    for rank, other in zip(
        ranks, mapping.read(mapping.theirs.state_dict(), 2), strict=True
    ):
        assert_same_file(rank, other)
    originals = {"o_norm.weight": file["o_norm.weight"]}
    assert_same_file(mapping.write(ranks, originals=originals, in_files=True), file)


def test_olmo_hybrids_files_have_the_layer_of_its_model(tmp_path):
    """Published files have three convolutions; transformers joins them as it loads. As
    it saves, transformers 5.23 cuts them into thirds, which are no heads where K is not
    V."""
    from safetensors.torch import load_file, save_file

    mapping = Mapping("olmo")
    model = mapping.model
    dims = mapping.dims
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    for layer in range(3):
        keys = [
            f"model.layers.{layer}.linear_attn.{name}_conv1d.weight" for name in "qkv"
        ]
        conv = torch.cat([tensors[key] for key in keys])
        tensors |= zip(
            keys, map(torch.clone, conv.split(dims.layout.conv_widths)), strict=True
        )
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    loaded = type(model).from_pretrained(tmp_path).state_dict()
    assert all(
        torch.equal(loaded[key], tensor) for key, tensor in model.state_dict().items()
    )
    file = layer_in_the_file(tmp_path, "q_conv1d.weight")
    ranks = layer_from_hf(file, dims, 2, storage="separate")
    for rank, theirs in zip(
        ranks, mapping.read(mapping.theirs.state_dict(), 2), strict=True
    ):
        assert_same_file(rank, theirs)
    originals = {"o_norm.weight": file["o_norm.weight"]}
    assert_same_file(
        layer_to_hf(ranks, dims, originals=originals, storage="separate"), file
    )


@pytest.mark.parametrize(
    "family, lacks",
    [
        (OLMO, "no norm after attention"),
        (QWEN4, "no hyper-connections"),
        (GLM, "no hyper-connections and no attention over indexed"),
        (BAILING, "latent attention has no output gate"),
    ],
)
def test_a_whole_model_is_refused_with_what_megatron_lacks(family, lacks):
    with pytest.raises(
        ValueError, match=rf"architecture \['{family}'\].*{lacks}.*see layer_from_hf"
    ):
        parse_hf_config({"architectures": [family]})


def test_what_does_not_fit_is_refused_by_name():
    mapping = Mapping("kimi")
    said = r"family=.kimi_linear., in_files=True.* has .*missing \['A_log'"
    with pytest.raises(ValueError, match=said):
        mapping.read(mapping.theirs.state_dict(), in_files=True)
