"""Each field of transformers' NemotronHConfig is read, or refused, or changes no
number."""

import math
from dataclasses import fields

import pytest
from transformers import NemotronHConfig

from megatron_gdn import Mamba2Mixer
from megatron_gdn.hf import build_model, parse_hf_config
from megatron_gdn.hf.nemotron import FIELDS_WITHOUT_EFFECT, READ_FIELDS, SETTING_FIELDS
from tests.hf.tiny_models import model_class
from tests.hostile.test_configs import NEMOTRON
from tests.parallel import parallel


def transformers_config(**changes) -> NemotronHConfig:
    return NemotronHConfig(**NEMOTRON | changes)


# What a file of transformers' class says, of the sizes of a small model.
OF_CLASS = transformers_config().to_dict()
NAMES = {field.name for field in fields(NemotronHConfig)} | OF_CLASS.keys()
# Another value of each field that is read; other sizes are doubled.
OTHERS = {
    "architectures": ["Qwen3NextForCausalLM"],
    "tie_word_embeddings": True,
    "layers_block_type": ["linear_attention", "mlp"] * 3,
    "layer_norm_epsilon": 1e-3,
    "hybrid_override_pattern": "M-M-M-",
    "num_hidden_layers": 5,
    "head_dim": 64,
    "time_step_min": 0.5,
}
# Values that describe another model.
REFUSED = {
    "attention_bias": True,
    "conv_kernel": 3,
    "mamba_hidden_act": "gelu",
    "mamba_proj_bias": True,
    "mlp_bias": True,
    "mlp_hidden_act": "silu",
    "moe_latent_size": 8,
    "n_group": 2,
    "n_shared_experts": 2,
    "norm_topk_prob": False,
    "residual_in_fp32": True,
    "sliding_window": 64,
    "time_step_limit": [0.0, 0.1],
    "topk_group": 2,
    "use_bias": True,
    "use_conv_bias": False,
}


def parsed(**changes):
    return parse_hf_config(NEMOTRON | changes)


def test_a_file_of_transformers_class_is_read():
    """It has layers_block_type in place of the pattern, and head_dim, here the class's
    128."""
    assert parse_hf_config(OF_CLASS) == parsed(head_dim=128)
    assert parsed() == parsed(head_dim=128)


def test_every_field_of_the_class_is_in_one_of_the_groups():
    groups = READ_FIELDS, SETTING_FIELDS, FIELDS_WITHOUT_EFFECT.keys()
    assert all(sum(name in group for group in groups) == 1 for name in NAMES), NAMES
    assert REFUSED.keys() == SETTING_FIELDS


@pytest.mark.parametrize("name", sorted(READ_FIELDS))
def test_a_field_that_is_read_changes_the_model_or_is_refused(name):
    change = OTHERS.get(name) or 2 * NEMOTRON[name]
    try:
        found = parse_hf_config({**OF_CLASS, name: change})
    except ValueError:
        return
    assert found != parse_hf_config(OF_CLASS)


@pytest.mark.parametrize("name", sorted(SETTING_FIELDS))
def test_a_setting_that_the_built_model_lacks_is_refused(name):
    with pytest.raises(ValueError, match=f"{name}=.* is not supported in whole models"):
        parsed(**{name: REFUSED[name]})
    given = OF_CLASS[name]
    assert parsed(**{name: given}) == parsed()


@pytest.mark.parametrize("name", sorted(FIELDS_WITHOUT_EFFECT))
def test_a_field_without_effect_changes_nothing(name):
    assert parsed(**{name: 3}) == parsed()


@pytest.mark.parametrize("infinity", [math.inf, {"__float__": "Infinity"}])
def test_infinity_is_read_as_transformers_writes_it(infinity):
    assert parsed(time_step_limit=[0.0, infinity]) == parsed()


@pytest.mark.parametrize(
    "old, usual, value",
    [
        ("attention_head_dim", "head_dim", 64),
        ("mamba_n_groups", "n_groups", 2),
        ("layer_types", "layers_block_type", OF_CLASS["layers_block_type"]),
    ],
)
def test_an_older_name_means_the_same_and_contradicts_no_newer_one(old, usual, value):
    bare = {name: given for name, given in NEMOTRON.items() if name != usual}
    assert parse_hf_config({**bare, old: value}) == parse_hf_config(
        {**bare, usual: value}
    )
    other = ["moe"] if isinstance(value, list) else 2 * value
    with pytest.raises(ValueError, match=f"{old}=.* and {usual}=.* are one setting"):
        parse_hf_config({**bare, old: value, usual: other})


def test_old_names_of_settings_are_refused_too():
    with pytest.raises(ValueError, match="conv_kernel=3 is not supported"):
        parsed(mamba_d_conv=3)


def test_two_lists_of_layers_must_agree_and_one_must_be_there():
    with pytest.raises(
        ValueError, match="hybrid_override_pattern has .* layers_block_type has"
    ):
        parsed(layers_block_type=["moe"])
    with pytest.raises(ValueError, match="has no 'hybrid_override_pattern'"):
        parsed(hybrid_override_pattern=None)
    with pytest.raises(
        ValueError, match="layers_block_type=.* must be a list of 'attention', "
    ):
        parsed(layers_block_type=["conv"])


def test_a_single_expert_is_refused():
    """Megatron would not normalise its score."""
    with pytest.raises(ValueError, match="num_experts_per_tok=1 is not supported"):
        parsed(num_experts_per_tok=1)


def test_a_field_that_no_nemotron_has_is_refused():
    with pytest.raises(
        ValueError, match="'mixer_gain'.* not known as fields of a NemotronH"
    ):
        parsed(mixer_gain=2)


def limits_of_time_steps(config) -> set[tuple[float, float]]:
    with parallel():
        model, _ = build_model(config, modules="local")
    return {one.dt_limit for one in model.modules() if isinstance(one, Mamba2Mixer)}


def test_a_built_model_bounds_time_steps_as_transformers_does(pools):
    """By time_step_min; transformers' layers ignore time_step_limit."""
    model = model_class("NemotronHForCausalLM")(transformers_config(time_step_min=0.5))
    theirs = {
        one.time_step_limit
        for one in model.modules()
        if hasattr(one, "time_step_limit")
    }
    law = limits_of_time_steps, parsed(time_step_min=0.5)
    assert pools(1).run(*law) == [theirs] == [{(0.5, math.inf)}]
    assert parsed().time_step_min == transformers_config().time_step_min


def test_groups_that_do_not_divide_the_heads_are_refused():
    heads = NEMOTRON["mamba_num_heads"]
    with pytest.raises(ValueError, match="mamba_num_heads.*n_groups"):
        parse_hf_config(NEMOTRON | {"n_groups": heads - 1})
