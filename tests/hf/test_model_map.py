"""The whole model's map: which rows go where, and what a config says."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from megatron_gdn.hf import megatron_model, parse_hf_config
from megatron_gdn.hf.model_map import model_maps
from megatron_gdn.hf.safetensors_files import TensorSpec
from megatron_gdn.hf.tensor_plan import plan_tensors
from megatron_gdn.models import find

CONFIG = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "hidden_size": 16,
    "num_hidden_layers": 8,
    "vocab_size": 32,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 3,
    "linear_value_head_dim": 5,
    "linear_conv_kernel_dim": 4,
    "intermediate_size": 12,
}


@pytest.mark.parametrize(
    ("changes", "pattern"),
    [
        ({}, "G-G-G-*-G-G-G-*-"),
        ({"full_attention_interval": 2}, "G-*-G-*-G-*-G-*-"),
        (
            {"layer_types": ["full_attention", "linear_attention"] * 4},
            "*-G-*-G-*-G-*-G-",
        ),
    ],
)
def test_which_layers_are_gdn(changes, pattern):
    assert parse_hf_config(CONFIG | changes).hybrid_layer_pattern == pattern


def test_experts_follow_the_step_and_the_exceptions():
    moe = CONFIG | {
        "architectures": ["Qwen3NextForCausalLM"],
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 8,
        "shared_expert_intermediate_size": 8,
        "decoder_sparse_step": 2,
        "mlp_only_layers": [3],
    }
    config = parse_hf_config(moe)
    assert config.hybrid_layer_pattern == "G-GEG-*-G-GEG-*E"
    assert config.storage == "interleaved"
    with pytest.raises(ValueError, match="output_gate_type='sigmoid' is not supported"):
        parse_hf_config(moe | {"output_gate_type": "sigmoid"})
    with pytest.raises(ValueError, match="norm_topk_prob=false"):
        parse_hf_config(moe | {"norm_topk_prob": False})


def test_sizes_come_from_the_nested_config_and_the_tie_from_the_top():
    text = {key: value for key, value in CONFIG.items() if key != "architectures"}
    nested = {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "text_config": text | {"tie_word_embeddings": True},
    }
    flat = parse_hf_config(CONFIG)
    assert parse_hf_config(nested) == dataclasses.replace(
        flat, architecture="Qwen3_5ForConditionalGeneration"
    )
    assert parse_hf_config(nested | {"tie_word_embeddings": True}).tied


def test_rotary_settings_old_and_new():
    new = {"rope_parameters": {"rope_theta": 5.0, "partial_rotary_factor": 0.5}}
    old = {"rope_theta": 5.0, "partial_rotary_factor": 0.5}
    both = new | {"rope_scaling": new["rope_parameters"]}
    for rope in (new, old, both, new | old):
        config = parse_hf_config(CONFIG | rope)
        assert (config.rope_theta, config.rotary_fraction) == (5.0, 0.5)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "rope_type='yarn'"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_type='linear'"),
        ({"attn_output_gate": False}, "attn_output_gate=false"),
        (
            {
                "rope_parameters": {"rope_theta": 5.0},
                "rope_scaling": {"rope_theta": 6.0},
            },
            "rope_parameters=.* and rope_scaling=.* are one setting; give one",
        ),
        (
            {"rope_parameters": {"rope_theta": 5.0}, "rope_theta": 6.0},
            "rope_theta=6.0, and rope_parameters has rope_theta=5.0; give one value",
        ),
    ],
)
def test_a_setting_that_the_built_model_would_lack_is_refused(setting, message):
    with pytest.raises(ValueError, match=message):
        parse_hf_config(CONFIG | setting)


def test_weights_of_nemotron_are_refused_with_what_converts_its_layers():
    nemotron = find("Nemotron-H-8B").hf
    with pytest.raises(NotImplementedError, match="layer_from_hf converts one"):
        plan_tensors(nemotron, {}, "hybrid", True)


def test_a_folder_without_one_text_model_is_refused():
    config = parse_hf_config(CONFIG)
    second = "model.language_model.embed_tokens.weight"
    with pytest.raises(ValueError, match=r"missing key 'model\.embed_tokens\.weight'"):
        plan_tensors(config, {}, "hybrid", True)
    sources = (source for entry in model_maps(config, []) for source in entry.sources)
    files = {source.key: TensorSpec("BF16", source.shape) for source in sources}
    assert plan_tensors(config, files, "hybrid", True).passthrough_keys == []
    with pytest.raises(ValueError, match=f"unknown key '{second}'"):
        plan_tensors(
            config, files | {second: files["model.embed_tokens.weight"]}, "hybrid", True
        )


def test_experts_without_a_shape_are_refused():
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
    config = parse_hf_config(
        CONFIG
        | experts
        | {
            "architectures": ["Qwen3_5MoeForCausalLM"],
            "shared_expert_intermediate_size": 8,
        }
    )
    layers = [f"model.layers.{n}.mlp.experts.gate_up_proj" for n in range(8)]
    files = {key: TensorSpec("BF16", ()) for key in layers}
    files["model.embed_tokens.weight"] = TensorSpec("BF16", (32, 16))
    with pytest.raises(ValueError, match="num_experts=4, but the files .* 0 experts"):
        plan_tensors(config, files, "hybrid", True)


@pytest.mark.parametrize(
    "rope", [{"type": "mrope"}, {"rope_type": None, "type": "yarn"}]
)
def test_a_kind_of_rotary_embedding_under_its_older_name_is_refused_too(rope):
    with pytest.raises(ValueError, match="rope_type=.* must be 'default'"):
        parse_hf_config(CONFIG | {"rope_scaling": rope})


def load_without_files(monkeypatch, **parts):
    """`load_hf_weights`, with stand-ins for the ``parts`` that read files."""
    stand_ins = {
        "SafetensorsFolder": None,
        "read_hf_config": parse_hf_config(CONFIG),
        "_check_source_tensors": None,
        **parts,
    }
    for name, made in stand_ins.items():
        monkeypatch.setattr(megatron_model, name, lambda *_, made=made: made)
    megatron_model.load_hf_weights(None, "folder")


@pytest.mark.parametrize("left_out", [[], ["mtp.fc.weight", "mtp.norm.weight"]])
def test_a_load_names_what_it_leaves_out(left_out, monkeypatch, caplog):
    load_without_files(
        monkeypatch,
        _plan_model=(SimpleNamespace(passthrough_keys=left_out), {}),
        _match_maps_to_parameters=[],
    )
    told = "2 tensors of the Qwen3_5ForCausalLM are not part of a Megatron text model"
    assert (told in caplog.text) is bool(left_out)
    assert not left_out or "the first mtp.fc.weight" in caplog.text


def test_a_load_names_what_it_rounds(monkeypatch, caplog):
    params = {name: nn.Parameter(torch.zeros(1)) for name in "abc"}
    entry = SimpleNamespace(sources=[])
    monkeypatch.setattr(
        megatron_model, "_copy_values", lambda param, _: param is params["a"]
    )
    load_without_files(
        monkeypatch,
        _plan_model=(SimpleNamespace(passthrough_keys=[]), params),
        _match_maps_to_parameters=[(entry, list(params))],
        _local_shard=None,
    )
    told = "2 parameters have a narrower dtype than their file and were rounded"
    assert f"{told}, the first b." in caplog.text


@pytest.mark.parametrize("split", ["pipeline_model", "expert_model", "expert_tensor"])
def test_a_model_whose_layers_or_experts_are_elsewhere_is_not_saved(split, monkeypatch):
    monkeypatch.setattr(
        megatron_model, "_parallel_size", lambda kind: 2 if kind == split else 1
    )
    with pytest.raises(NotImplementedError, match=f"{split}_parallel_size=2"):
        megatron_model.save_hf_weights(nn.Module(), "folder", like="source")


def test_parameters_that_the_files_do_not_fill_are_named(monkeypatch):
    monkeypatch.setattr(megatron_model, "_parallel_size", lambda kind: 1)
    plan = SimpleNamespace(maps=[])
    with pytest.raises(
        ValueError, match=r"no tensor for a \(and 1 more\) of the model"
    ):
        megatron_model._match_maps_to_parameters(plan, dict.fromkeys("ab"), None)
