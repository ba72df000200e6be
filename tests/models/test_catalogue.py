"""The numbers of the catalogue are those of the published models."""

import pytest

from megatron_gdn.hf import parse_hf_config
from megatron_gdn.models import ENTRIES, Stack, find
from tests.models.published import as_config, config_of, parameters_of, vision_parameters

QWEN = [name for name, entry in ENTRIES.items() if entry.architecture.startswith("Qwen")]


@pytest.mark.parametrize("name", ENTRIES)
def test_a_model_has_as_many_parameters_as_the_one_that_transformers_builds(name):
    assert find(name).stack.parameters == parameters_of(name)


# The numbers of parameters in the index of the published files. They hold the language model, one
# head of multi-token prediction (one attention layer with its MLP), and the vision encoder.
@pytest.mark.parametrize(
    ("name", "published", "sees"),
    [
        ("Qwen3.5-9B", 9_653_104_368, True),
        ("Qwen3.5-122B-A10B", 125_086_497_008, True),
        ("Qwen3.6-35B-A3B", 35_951_822_704, True),
        ("Qwen3.8-27B", 27_781_427_952, True),
        ("Qwen3.8-2.4T-A95B", 2_446_182_725_504, False),
    ],
)
def test_the_published_files_hold_as_many(name, published, sees):
    model = find(name)
    pattern = f"{model.pattern}/{model.pattern[-2:]}"
    vocab = model.entry.fields["vocab_size"]
    stack = Stack.of(as_config(model.settings), pattern, vocab, model.tied)
    vision = vision_parameters(stack.hidden_size) if sees else 0
    assert stack.parameters + vision == published


@pytest.mark.parametrize("name", QWEN)
def test_transformers_config_class_translates_to_the_same_settings(name):
    model = find(name)
    config = config_of(model.entry.architecture, model.entry.fields).to_dict()
    assert parse_hf_config(config | {"architectures": [model.entry.architecture]}) == model.hf


def test_transformers_config_class_of_nemotron_has_the_same_layers_and_sizes():
    names = {"linear_attention": "M", "full_attention": "*", "mlp": "-", "moe": "E"}
    for name in (name for name in ENTRIES if name.startswith("Nemotron")):
        model = find(name)
        config = config_of(model.entry.architecture, model.entry.fields)
        assert "".join(names[kind] for kind in config.layers_block_type) == model.pattern
        assert config.conv_kernel == 4, "Megatron's Mamba2 layers have no other"
        assert {config.use_conv_bias, not config.use_bias, not config.mlp_bias} == {True}
        assert config.n_shared_experts == config.n_group == config.topk_group == 1
        for field in (name for name in model.entry.fields if name != "hybrid_override_pattern"):
            assert getattr(config, field) == model.entry.fields[field], field


def test_olmo_hybrid_is_what_transformers_builds_by_default():
    model = find("Olmo-Hybrid-7B")
    default = config_of(model.entry.architecture, {}).to_dict()
    assert {name: default[name] for name in model.entry.fields} == model.entry.fields
    assert default["layer_types"] == (["linear_attention"] * 3 + ["full_attention"]) * 8


def test_every_entry_says_where_its_numbers_were_found():
    assert all(entry.source for entry in ENTRIES.values())


def test_a_name_that_is_not_there_is_refused_with_those_that_are():
    assert find("qwen3.5-35b-a3b").name == "Qwen3.5-35B-A3B"
    with pytest.raises(ValueError, match=r"unknown model 'Qwen9'; known: tiny, Qwen3-Next-80B"):
        find("Qwen9")
