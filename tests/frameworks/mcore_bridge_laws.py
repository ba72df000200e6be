"""mcore-bridge, of ms-swift, builds, loads and saves our layer after one call
(`te_on_cpu.py`)."""

import sys

import pytest
import torch
import transformers
from mcore_bridge import ModelConfig, get_mcore_model, hf_to_mcore_config
from mcore_bridge.bridge import GPTBridge
from mcore_bridge.model.modules import GatedDeltaNet as Theirs
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from megatron.core.packed_seq_params import PackedSeqParams
from peft import LoraConfig, PeftModel, get_peft_model
from torch.overrides import TorchFunctionMode

import megatron_gdn
from megatron_gdn.frameworks.mcore_bridge import (
    _reorder_in_the_bridge,
    row_order_by_key_head,
)
from tests.frameworks.conftest import page_lines
from tests.frameworks.tiny_models import (
    MODELS,
    TOKENS,
    WITHOUT_GPU,
    published,
    require_exported,
    require_falling,
    require_logits,
    tokens,
)

RANK = 4
ALPHA = 8
MORE = {"moe_router_fusion": False, "variable_seq_lengths": False}


class CudaIsTheCPU(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        def here(x):
            return "cpu" if isinstance(x, str) and x == "cuda" else x

        return func(*map(here, args), **{k: here(x) for k, x in (kwargs or {}).items()})


@pytest.fixture(autouse=True)
def megatron(one_process):
    with CudaIsTheCPU():
        yield


def config_of(folder, dtype: torch.dtype = torch.float32, **settings) -> ModelConfig:
    hf_config = transformers.AutoConfig.from_pretrained(folder)
    given = {**hf_to_mcore_config(hf_config), **WITHOUT_GPU, **MORE, **settings}
    return ModelConfig(params_dtype=dtype, bf16=dtype == torch.bfloat16, **given)


def bridged(folder, dtype: torch.dtype = torch.float32):
    config = config_of(folder, dtype)
    (model,) = get_mcore_model(config)
    config.bridge.load_weights([model], str(folder))
    return model, config.bridge


def language_model(model):
    return getattr(model, "language_model", model)


def logits(model, ids: torch.Tensor, **more) -> torch.Tensor:
    return language_model(model)(
        ids, torch.arange(TOKENS).expand(len(ids), -1), None, **more
    )


@pytest.mark.parametrize("name", MODELS)
def test_the_logits_are_transformers_and_the_export_is_what_was_loaded(name, tmp_path):
    theirs = published(name, tmp_path)
    megatron_gdn.patch_megatron()
    ours, bridge = bridged(tmp_path)
    layers = [layer.self_attention for layer in language_model(ours).decoder.layers]
    assert [isinstance(each, megatron_gdn.GatedDeltaNet) for each in layers] == [
        True
    ] * 3 + [False]
    with torch.no_grad():
        require_logits(name, logits(ours, tokens()), theirs(tokens()).logits)
    require_exported(bridge.export_weights([ours]), tmp_path, one_by_one=True)


def mixer(model):
    return language_model(model).decoder.layers[0].self_attention


def test_a_bf16_model_exports_the_bits_that_were_loaded(tmp_path):
    published("Qwen3.5", tmp_path, torch.bfloat16)
    megatron_gdn.patch_megatron()
    ours, bridge = bridged(tmp_path, torch.bfloat16)
    require_exported(bridge.export_weights([ours]), tmp_path, gates_in_fp32=True)


def test_our_rows_are_theirs_in_another_order_and_undo_gives_theirs_back(tmp_path):
    published("Qwen3-Next", tmp_path)
    megatron_gdn.patch_megatron()
    ours, bridge = bridged(tmp_path)
    megatron_gdn.patch_megatron(gdn=False)
    theirs, of_theirs = bridged(tmp_path)
    assert type(mixer(theirs)) is Theirs
    expected = dict(mixer(theirs).named_parameters())
    layout = mixer(ours).dims.layout
    rows = {
        "in_proj.weight": row_order_by_key_head(layout),
        "conv1d.weight": row_order_by_key_head(layout, conv=True),
    }
    for name, parameter in mixer(ours).named_parameters():
        reordered = parameter[rows[name]] if name in rows else parameter
        assert torch.equal(reordered, expected.pop(name)), name
    assert not expected, sorted(expected)
    require_exported(of_theirs.export_weights([theirs]), tmp_path)
    # built before, it is ours still
    require_exported(bridge.export_weights([ours]), tmp_path)


def test_it_trains(tmp_path):
    published("Qwen3.5 MoE", tmp_path)
    megatron_gdn.patch_megatron()
    model, _ = bridged(tmp_path)
    require_falling(
        lambda: logits(model, tokens(), labels=tokens()).mean(),
        language_model(model).parameters(),
    )


def test_packed_documents_do_not_see_each_other(tmp_path):
    published("Qwen3-Next", tmp_path)
    megatron_gdn.patch_megatron()
    model, _ = bridged(tmp_path)
    lengths = [9, 11, 1, 1, 2]  # the loader's padding is documents of one token
    ends = torch.tensor([0, *lengths]).cumsum(0).int()
    packed = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=ends,
        cu_seqlens_kv=ends,
        max_seqlen_q=11,
        max_seqlen_kv=11,
    )
    ids = tokens()[:1]
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    with torch.no_grad():
        together = model(ids, positions, None, packed_seq_params=packed)[0]
        alone = [
            model(each, torch.arange(each.shape[1])[None], None)[0]
            for each in ids.split(lengths, 1)
        ]
    require_logits("packed", together, torch.cat(alone))


LINEARS = "in_proj", "out_proj", "linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"
OF_TRANSFORMERS = {
    "Qwen3-Next": ("in_proj_qkvz", "in_proj_ba"),
    "Qwen3.5": ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"),
}
OTHERS = (
    "out_proj",
    "q_proj",
    "k_proj",
    "v_proj",
    "o_proj",
    "gate_proj",
    "up_proj",
    "down_proj",
)


def adapted(model, seed: int):
    """With LoRA on all linears of the layers, none of which does nothing."""
    targets = rf".*decoder\.layers\..*self_attention\.({'|'.join(LINEARS)})$"
    lora = LoraConfig(
        task_type="CAUSAL_LM", r=RANK, lora_alpha=ALPHA, target_modules=targets
    )
    wrapped = get_peft_model(model, lora)
    torch.manual_seed(seed)
    for name, parameter in wrapped.named_parameters():
        if parameter.requires_grad:
            assert ".lora_" in name
            torch.nn.init.normal_(parameter, std=0.1)
    return wrapped, lora


@pytest.mark.parametrize("name", OF_TRANSFORMERS)
def test_adapters_are_saved_for_transformers_loaded_again_and_merged(name, tmp_path):
    files, adapters, merged = (tmp_path / x for x in ("model", "adapters", "merged"))
    theirs = published(name, files)
    megatron_gdn.patch_megatron()
    ours, bridge = bridged(files)
    wrapped, lora = adapted(ours, seed=2)
    with torch.no_grad():
        found = logits(ours, tokens())
    bridge.save_weights([wrapped], str(adapters), peft_format=True)
    lora.target_modules = [*OF_TRANSFORMERS[name], *OTHERS[:5]]
    lora.save_pretrained(adapters)
    with torch.no_grad():
        expected = PeftModel.from_pretrained(theirs, adapters)(tokens()).logits
    # As without adapters, and each linear has two more products.
    require_logits("adapted", found, expected, roundings=32)

    again, other_bridge = bridged(files)
    wrapped_again, _ = adapted(again, seed=3)
    other_bridge.load_weights([wrapped_again], str(adapters), peft_format=True)
    for key, parameter in wrapped_again.named_parameters():
        assert torch.equal(parameter, wrapped.get_parameter(key)), key

    wrapped.merge_adapter()
    bridge.save_weights([wrapped], str(merged))
    theirs.config.save_pretrained(merged)
    plain = type(theirs).from_pretrained(merged).eval()
    with torch.no_grad():
        require_logits("merged", plain(tokens()).logits, expected, roundings=32)


def test_a_checkpoint_has_adapters_by_sections(tmp_path):
    published("Qwen3.5", tmp_path)
    megatron_gdn.patch_megatron()
    ours, _ = bridged(tmp_path)
    adapted(ours, seed=2)
    sharded = mixer(ours).sharded_state_dict()
    for name in ("base_layer.weight", "lora_B.default.weight"):
        stored = sharded[f"in_proj.{name}"]
        assert isinstance(stored, ShardedTensorFactory)
        assert [each.key for each in stored.build()] == [
            f"in_proj.{name}.{x}"
            for x in ("query", "key", "value", "z", "beta", "alpha")
        ]


def test_the_lines_of_the_page_build_ours(tmp_path):
    published("Qwen3.5", tmp_path)
    build, plugin = page_lines("mcore_bridge")
    names = {"megatron_gdn": megatron_gdn, "get_mcore_model": get_mcore_model}
    names |= {"config": config_of(tmp_path), "HF_FOLDER": str(tmp_path)}
    exec(build, names)
    assert isinstance(mixer(names["model"]), megatron_gdn.GatedDeltaNet)
    megatron_gdn.patch_megatron(gdn=False)
    sys.modules.pop("megatron_gdn.enable", None)
    exec(plugin)
    (model,) = get_mcore_model(config_of(tmp_path))
    assert isinstance(mixer(model), megatron_gdn.GatedDeltaNet)


@pytest.mark.parametrize(
    "field", ["linear_decoupled_in_proj", "fp8_param", "fp4_param"]
)
def test_what_has_other_parameters_is_refused_by_name(field, tmp_path):
    published("Qwen3-Next", tmp_path)
    megatron_gdn.patch_megatron()
    config = config_of(tmp_path)
    setattr(config, field, True)
    with pytest.raises(
        NotImplementedError, match=f"mcore-bridge's {field}=True .*gdn=False"
    ):
        get_mcore_model(config)


def test_the_log_line_names_mcore_bridge(caplog):
    megatron_gdn.patch_megatron()
    assert "mcore-bridge's subclass of it too" in caplog.text


def test_a_version_that_was_not_tested_is_named_once(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(
        "megatron_gdn.frameworks.mcore_bridge.version", lambda name: "1.7.0"
    )
    # by the tests before, and again after this one
    wrapped = GPTBridge._set_linear_attn_state
    monkeypatch.setattr(GPTBridge, "_set_linear_attn_state", wrapped)
    _reorder_in_the_bridge.cache_clear()
    published("Qwen3.5", tmp_path)
    megatron_gdn.patch_megatron()
    get_mcore_model(config_of(tmp_path))
    assert caplog.text.count("mcore-bridge 1.7.0: megatron_gdn reorders") == 1
