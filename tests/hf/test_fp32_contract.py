"""The fp32 checkpoint contract: the published behaviour, and the stricter name test."""

from types import SimpleNamespace

import pytest
import torch

from megatron_gdn.hf import state_dict_adapter as adapter
from tests.processes import python_without

A_LOG = "model.layers.0.linear_attn.A_log"
HELD = "model.layers.0.linear_attn._fp32_params.A_log"
BF16 = torch.bfloat16
F32 = torch.float32


def test_the_contract_is_of_exactly_the_five_architectures_of_the_family():
    assert sorted(adapter.GDN_FP32_CHECKPOINT_ARCHITECTURES) == [
        "Qwen3NextForCausalLM",
        "Qwen3_5ForCausalLM",
        "Qwen3_5ForConditionalGeneration",
        "Qwen3_5MoeForCausalLM",
        "Qwen3_5MoeForConditionalGeneration",
    ]
    for name in adapter.GDN_FP32_CHECKPOINT_ARCHITECTURES:
        config = SimpleNamespace(architectures=["Other", name])
        assert adapter.has_gated_delta_net_fp32_checkpoint_contract(config)
    assert adapter.FP32_GDN_PARAM_NAMES == ("A_log", "dt_bias")
    assert adapter.HOLDER_NAME == "_fp32_params"


@pytest.mark.parametrize(
    "config",
    [
        object(),
        SimpleNamespace(architectures=None),
        SimpleNamespace(architectures=["LlamaModel"]),
    ],
)
def test_other_configs_have_no_contract(config):
    assert not adapter.has_gated_delta_net_fp32_checkpoint_contract(config)


def test_param_names_can_be_chosen():
    key = "model.layers.0.linear_attn.D"
    assert adapter.is_gated_delta_net_fp32_param_key(key, ("D",))
    assert adapter.route_fp32_holder_key(key, ("D",)).endswith(
        "linear_attn._fp32_params.D"
    )
    assert (
        adapter.upcast_gated_delta_net_fp32_state_tensor(
            key, torch.ones(2, dtype=BF16), ("D",)
        ).dtype
        == F32
    )


@pytest.mark.parametrize(
    ("key", "named", "routed"),
    [
        (A_LOG, True, HELD),
        (
            "outer.linear_attn.inner.linear_attn.dt_bias",
            True,
            "outer.linear_attn.inner.linear_attn._fp32_params.dt_bias",
        ),
        ("model.layers.0.linear_attn._checkpoint_wrapped_module.dt_bias", True, None),
        ("model.layers.0.linear_attn.conv1d.weight", False, None),
        ("model.layers.0.linear_attn.my_A_log", False, None),
        ("model.layers.0.linear_attn.A_log_extra", False, None),
        ("model.layers.0.self_attn.A_log", False, None),
        ("model.layers.0.self_attn._fp32_params.A_log", False, None),
        ("A_log", False, None),
        ("x", False, None),
    ],
)
def test_routing_uses_the_last_layer_of_a_key_and_strip_undoes_it(key, named, routed):
    """Both leave other keys alone (None); a key that names a gate does so in its
    holder, too."""
    routed = routed or key
    assert adapter.is_gated_delta_net_fp32_param_key(key) is named
    assert adapter.is_gated_delta_net_fp32_param_key(routed) is named
    assert (
        adapter.route_fp32_holder_key(key)
        == adapter.route_fp32_holder_key(routed)
        == routed
    )
    assert (
        adapter.strip_fp32_holder_key(routed)
        == adapter.strip_fp32_holder_key(key)
        == key
    )


def test_upcast_casts_only_what_the_contract_names():
    upcast = adapter.upcast_gated_delta_net_fp32_state_tensor
    half = torch.ones(2, dtype=BF16)
    full = torch.ones(2)
    ints = torch.ones(2, dtype=torch.int32)
    assert upcast(A_LOG, half).dtype == upcast(HELD, half).dtype == F32
    for key, tensor in [
        (A_LOG, full),
        (A_LOG, ints),
        (A_LOG, "text"),
        ("x.weight", half),
    ]:
        assert upcast(key, tensor) is tensor


def test_forced_mapping_names_floating_gate_parameters_only():
    state = {
        A_LOG: torch.ones(2, dtype=BF16),
        HELD: torch.ones(2, dtype=torch.int32),
        A_LOG.replace("0", "1"): "text",
        "x": 1,
    }
    assert adapter.forced_gated_delta_net_fp32_dtype_mapping(state) == {A_LOG: "F32"}


def test_a_live_state_reaches_the_file_and_comes_back():
    live = {
        HELD: torch.ones(2, dtype=BF16),
        "model.embed_tokens.weight": torch.ones(2, dtype=BF16),
    }
    file = adapter.to_file_state(live)
    assert list(file) == [A_LOG, "model.embed_tokens.weight"]
    assert file[A_LOG].dtype == F32
    assert file["model.embed_tokens.weight"] is live["model.embed_tokens.weight"]
    assert adapter.from_file_state(file).keys() == live.keys()
    assert list(
        adapter.from_file_state(file, route_linear_attn_fp32_params=False)
    ) == list(file)
    assert list(adapter.to_file_state(live, exclude_key_regex=r"model\.embed")) == [
        A_LOG
    ]


def test_loaded_dtypes_under_the_contract():
    bound = SimpleNamespace(architectures=["Qwen3_5MoeForCausalLM"])
    free = SimpleNamespace(architectures=["Other"])
    assert adapter.loaded_dtype(bound, A_LOG, BF16, BF16) == (F32, F32)
    assert adapter.loaded_dtype(free, A_LOG, BF16, BF16) == (BF16, BF16)
    assert adapter.loaded_dtype(bound, "x.weight", BF16, F32) == (F32, BF16)
    assert adapter.loaded_dtype(bound, A_LOG, torch.int32, BF16) == (
        torch.int32,
        torch.int32,
    )
    state = adapter.restore_loaded_dtypes(
        bound, {A_LOG: torch.ones(2, dtype=BF16)}, {A_LOG: BF16}
    )
    assert state[A_LOG].dtype == state[A_LOG]._hf_compute_dtype == F32


def test_the_contract_imports_with_torch_alone(tmp_path):
    code = "import megatron_gdn.hf.state_dict_adapter, megatron_gdn.gdn.hf"
    python_without("megatron safetensors transformers tqdm", code, tmp_path)
