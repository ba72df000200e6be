"""A ``config.json`` that nobody vouches for: every field has a type and a range, and
errors say."""

import json
import math
import re
import shutil
import time

import pytest
import transformers

from megatron_gdn.hf import CPAwareGatedDeltaNet, megatron_flags, parse_hf_config
from megatron_gdn.hf.config_fields import FIELD_TABLE
from megatron_gdn.hf.json_files import short_text
from megatron_gdn.models.model import Model
from tests.hf.test_model_map import CONFIG

EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
    "shared_expert_intermediate_size": 8,
    "decoder_sparse_step": 2,
}
NEMOTRON = {
    "architectures": ["NemotronHForCausalLM"],
    "hybrid_override_pattern": "M-M*ME",
    "hidden_size": 16,
    "vocab_size": 32,
    "intermediate_size": 8,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "mamba_num_heads": 4,
    "mamba_head_dim": 4,
    "ssm_state_size": 8,
    "n_groups": 2,
    "moe_intermediate_size": 8,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_shared_expert_intermediate_size": 8,
    "layer_norm_epsilon": 1e-5,
    "routed_scaling_factor": 2.5,
}
SIZES = [
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_conv_kernel_dim",
    *EXPERTS,
    "full_attention_interval",
    "mamba_num_heads",
    "mamba_head_dim",
    "ssm_state_size",
    "n_groups",
    "n_routed_experts",
    "moe_shared_expert_intermediate_size",
]
NUMBERS = [
    "rms_norm_eps",
    "rope_theta",
    "partial_rotary_factor",
    "layer_norm_epsilon",
    "routed_scaling_factor",
]
OTHERS = [
    "architectures",
    "layer_types",
    "mlp_only_layers",
    "tie_word_embeddings",
    "text_config",
    "rope_parameters",
    "rope_scaling",
    "hybrid_override_pattern",
    "hidden_act",
    "attention_bias",
    "output_gate_type",
    "attn_output_gate",
    "rope_type",
    "norm_topk_prob",
]
WRONG = [
    "64",
    "",
    "4 --load X --spec evil f",
    "x\nerror",
    -1,
    -0.5,
    math.nan,
    math.inf,
    -math.inf,
    True,
    [],
    {},
    [[64]],
    {"a": "b"},
    10**19,
    1e300,
    64.5,
]
# Of these values some are legal for some fields.
LEGAL = [
    ("rope_theta", 64.5),
    ("routed_scaling_factor", 64.5),
    ("mlp_only_layers", []),
    ("text_config", {}),
    ("rope_parameters", {}),
    ("rope_scaling", {}),
    ("tie_word_embeddings", True),
    ("attn_output_gate", True),
    ("norm_topk_prob", True),
]
# Legal by their type, and wrong for another reason, which the error says.
OTHERWISE_WRONG = [
    ("architectures", []),
    ("layer_types", []),
    ("text_config", {"a": "b"}),
]


def config_with(field: str) -> dict:
    """A config in which ``field`` is read."""
    if field in NEMOTRON and field not in CONFIG | EXPERTS:
        return NEMOTRON
    return CONFIG | {"architectures": ["Qwen3NextForCausalLM"]} | EXPERTS


def is_legal(field: str, value: object) -> bool:
    return any(
        field == name and type(value) is type(v) and value == v for name, v in LEGAL
    )


def refusal(config, where: str = "there/config.json") -> str:
    """What `parse_hf_config` says, in one line of at most 500 characters."""
    with pytest.raises(ValueError) as caught:
        parse_hf_config(config, where)
    text = str(caught.value)
    assert text.isprintable() and len(text) < 500, text
    return text


@pytest.mark.parametrize("field", [*SIZES, *NUMBERS, *OTHERS])
def test_a_field_of_a_wrong_type_or_range_is_named_with_what_is_legal(field):
    config = config_with(field)
    parse_hf_config(config)
    for value in WRONG:
        changed = config | {field: value}
        if is_legal(field, value):
            parse_hf_config(changed)
            continue
        said = refusal(changed)
        if (field, value) not in OTHERWISE_WRONG:
            assert (
                said.startswith(f"there/config.json: {field}=") and "must be" in said
            ), said


def test_a_zero_is_no_size_and_a_zero_of_experts_is_none():
    for field in SIZES:
        if field in ("num_experts", "n_routed_experts"):
            continue
        assert f"{field}=0 is not legal" in refusal(config_with(field) | {field: 0})
    assert (
        "E"
        not in parse_hf_config(
            config_with("num_experts") | {"num_experts": 0}
        ).hybrid_layer_pattern
    )


@pytest.mark.parametrize("config", [[], None, 5, "x"])
def test_a_config_is_an_object(config):
    assert "there/config.json must hold one JSON object" in refusal(config)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"num_attention_heads": 7},
            "num_attention_heads=7 must be a multiple of num_key_value_h",
        ),
        (
            {"linear_num_value_heads": 5},
            "linear_num_value_heads=5 must be a multiple of linear_n",
        ),
        (
            {"num_experts_per_tok": 99},
            "num_experts_per_tok=99 must be at most num_experts=4",
        ),
        ({"partial_rotary_factor": 9}, "partial_rotary_factor=9 is not legal"),
        (
            {"rope_parameters": {"partial_rotary_factor": 9}},
            "partial_rotary_factor=9 is not legal",
        ),
        ({"rope_parameters": {"rope_theta": math.nan}}, "rope_theta=nan is not legal"),
    ],
)
def test_fields_that_contradict_each_other_are_refused(changes, said):
    assert said in refusal(config_with("num_experts") | changes)


def test_rope_parameters_have_no_size():
    rope = {"hidden_size": 5, "rope_theta": 7}
    assert "it has ['hidden_size']" in refusal(CONFIG | {"rope_parameters": rope})


def test_a_pattern_has_as_many_layers_as_the_config_says():
    assert "num_hidden_layers=5, but hybrid_override_pattern has 6" in refusal(
        NEMOTRON | {"num_hidden_layers": 5}
    )


def test_a_value_makes_no_flag():
    """Flags are a list: a text is one word of the command line, whatever it holds."""
    config = parse_hf_config(CONFIG)
    object.__setattr__(config, "vocab_size", 7)
    config.sizes.num_query_groups = "4 --load X"
    flags = megatron_flags(config)
    assert flags[flags.index("--num-query-groups") + 1] == "4 --load X"
    assert "--load" not in flags


@pytest.mark.parametrize(
    ("fields", "most"),
    [
        (("num_hidden_layers", "first_k_dense_replace"), 10_000),
        (
            (
                "num_experts",
                "num_experts_per_tok",
                "expert_groups",
                "chosen_expert_groups",
                "shared_experts",
            ),
            100_000,
        ),
    ],
)
def test_a_config_has_so_many_layers_and_experts_at_most(fields, most):
    """A larger number would take all memory before anything else refused it."""
    for name in fields:
        field = FIELD_TABLE[name]
        assert field.is_legal(most) and not field.is_legal(most + 1), name
        assert str(most) in field.legal_values


def test_a_base_that_megatrons_flag_would_round_is_refused():
    with pytest.raises(ValueError, match="rope_theta=10000.5"):
        megatron_flags(parse_hf_config(CONFIG | {"rope_theta": 10000.5}))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"[" * 100_000, "nested too deeply"),
        (b'{"text_config": ' * 100_000, "nested too deeply"),
        (b"\xff\xfe{}", "is not JSON"),
        (b"9" * 5000, "is not JSON"),
        (b"[1]", "must hold one JSON object"),
        (b'{"hidden_size": 64, "hidden_size": 65}', "'hidden_size' is listed twice"),
        (b"", "is not JSON"),
    ],
)
def test_a_file_that_is_no_config_is_named_in_one_line(
    tmp_path, refused, content, said
):
    (tmp_path / "config.json").write_bytes(content)
    text = refused("flags", tmp_path)
    assert (
        f"{tmp_path / 'config.json'}" in text and said in text and text.count("\n") == 1
    )


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"num_hidden_layers": 10**19},
            "num_hidden_layers=10000000000000000000 is not legal",
        ),
        (
            {"num_hidden_layers": 9999, "layer_types": None},
            "num_hidden_layers=9999, but the files",
        ),
        ({"num_experts": 10**8}, "num_experts=100000000 is not legal"),
        (
            {"num_experts": 99_999},
            "num_experts=99999, but the files have weights of 4 experts",
        ),
        (
            {"vocab_size": 2**31 - 1},
            "embed_tokens.weight has shape (67, 24), but config.json asks",
        ),
        ({"hidden_size": 2**31 - 1}, "embed_tokens.weight has shape"),
        ({"head_dim": 2**31 - 2}, "o_proj.weight has shape"),
        ({"linear_key_head_dim": 2**31 - 1}, "linear_attn.conv1d.weight has shape"),
        ({"linear_value_head_dim": 2**31 - 1}, "linear_attn.out_proj.weight has shape"),
        ({"moe_intermediate_size": 2**31 - 1}, "but config.json asks for"),
    ],
)
def test_sizes_are_compared_with_the_files_before_anything_is_built(
    hf_folder, tmp_path, refused, monkeypatch, changes, said
):
    monkeypatch.setattr("megatron_gdn.hf.folders.build_model", None)
    folder = shutil.copytree(hf_folder("next"), tmp_path / "source")
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    start = time.process_time()
    assert said in refused("import", folder, tmp_path / "imported")
    assert time.process_time() - start < 10


def test_a_published_models_entry_is_read_by_the_same_table():
    fields = {name: value for name, value in CONFIG.items() if name != "architectures"}
    model = Model(
        "odd", "Qwen3_5ForCausalLM", fields | {"hidden_size": "64"}, "nowhere"
    )
    with pytest.raises(
        ValueError, match=r"odd in catalogue.toml: hidden_size='64' is not legal"
    ):
        _ = model.hf


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("linear_num_key_heads", "2"),
        ("linear_num_key_heads", 0),
        ("hidden_size", True),
        ("linear_conv_kernel_dim", -4),
        ("rms_norm_eps", math.nan),
        ("rms_norm_eps", -1.0),
    ],
)
def test_the_drop_in_reads_a_config_by_the_same_table(field, value):
    config = transformers.Qwen3_5TextConfig(**CONFIG)
    object.__setattr__(config, field, value)
    with pytest.raises(
        ValueError, match=f"a Qwen3_5TextConfig: {field}={re.escape(short_text(value))}"
    ):
        CPAwareGatedDeltaNet(config, 0)


def test_every_field_says_what_it_means():
    for name, field in FIELD_TABLE.items():
        assert field.meaning and field.legal_values, name
