"""Specs: Transformer Engine's checkpoint names with local modules, and nothing built in
silence."""

import copy
import importlib
import warnings
from dataclasses import dataclass
from unittest.mock import patch

import megatron.core
import pytest
import torch
from megatron.core import parallel_state
from megatron.core.extensions import transformer_engine as te
from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.models.gpt import GPTModel
from megatron.core.models.hybrid import hybrid_block, hybrid_layer_specs
from megatron.core.models.hybrid.hybrid_block import HybridStack
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionBlock
from megatron.core.transformer.spec_utils import ModuleSpec, build_module, import_module
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from megatron_gdn import (
    GatedDeltaNet,
    GatedDeltaNet2,
    GatedDeltaProduct,
    KimiDeltaAttention,
    Mamba2Mixer,
    specs,
)
from megatron_gdn.compat import tested
from megatron_gdn.mixers.attention import (
    TorchSelfAttention,
    class_with_tree_attention,
)
from megatron_gdn.specs import (
    gated_delta_net_spec,
    gdp_stack_spec,
    gpt_block_spec,
    hybrid_stack_spec,
    kimi_delta_attention_spec,
    mamba2_spec,
)
from megatron_gdn.specs import hybrid as hybrid_module
from megatron_gdn.specs import layer as layer_module
from megatron_gdn.specs.hybrid import HybridMTPLayer, checked_mtp_spec
from megatron_gdn.specs.layer import LocalMoELayer
from tests.distributed.model_laws import leaves
from tests.parallel import make_config
from tests.ranks import on_ranks

EXPERTS = {"num_moe_experts": 3, "add_bias_linear": False, "moe_ffn_hidden_size": 16}
without_te = pytest.mark.skipif(
    HAVE_TE, reason="says what happens without Transformer Engine"
)


def hybrid(pattern: str, config=None, spec=None) -> HybridModel:
    config = make_config(num_layers=len(pattern)) if config is None else config
    spec = hybrid_stack_spec("local") if spec is None else spec
    return HybridModel(config, spec, 16, 8, hybrid_layer_pattern=pattern)


def keys_of(model) -> set[str]:
    return {entry.key for entry in leaves(model.sharded_state_dict())}


def require_finite_gradients(model, **more) -> None:
    """Of every parameter, in a step of eight tokens."""
    tokens = torch.arange(8)[None]
    model(tokens, tokens, None, labels=tokens, **more).sum().backward()
    assert all(
        p.grad is not None and p.grad.isfinite().all() for p in model.parameters()
    )


def gpt_config(freq, num_layers=4, **changes):
    return make_config(
        num_layers=num_layers,
        experimental_attention_variant="gated_delta_net",
        linear_attention_freq=freq,
        transformer_impl="local",
        pipeline_dtype=torch.float32,
        **changes,
    )


@on_ranks(tp=1)
def test_local_modules_write_the_checkpoint_keys_of_transformer_engine():
    model = hybrid("G-*M")
    keys = keys_of(model)
    assert "decoder.layers.0.input_layernorm.weight" in dict(model.named_parameters())
    assert {
        "decoder.layers.0.self_attention.in_proj.layer_norm_weight",
        "decoder.layers.0.self_attention.in_proj.weight.beta",
        "decoder.layers.1.mlp.linear_fc1.layer_norm_weight",
        "decoder.layers.2.self_attention.linear_qkv.layer_norm_weight",
        "decoder.layers.3.mixer.in_proj.layer_norm_weight",
        "decoder.layers.3.mixer.in_proj.weight.dt",
        "decoder.layers.3.mixer.conv1d.weight.x",
        "decoder.layers.3.mixer.norm.weight",
        "decoder.final_norm.weight",
    } <= keys
    assert not any("layernorm." in key for key in keys)


def test_what_both_mixers_know_goes_to_both():
    shared = {
        "cp_layout": "contiguous",
        "linear_cp_mode": "chunkwise",
        "cp_ranks_per_machine": 4,
    }
    layers = hybrid_stack_spec("local", backend="flash_qla", **shared).submodules
    assert layers.mamba_layer.submodules.mixer.params == shared
    options = {"backend": "reference", "mamba": {"backend": "fla", "norm_eps": 1e-6}}
    layers = hybrid_stack_spec("local", **options).submodules
    assert layers.mamba_layer.submodules.mixer.params == {
        "backend": "fla",
        "norm_eps": 1e-6,
    }


def test_m_layers_of_its_stack_are_gated_delta_products(monkeypatch):
    mixer = gdp_stack_spec.submodules.mamba_layer.submodules.mixer
    assert mixer.module is GatedDeltaProduct and mixer.params == {}
    options = {"backend": "flash_qla", "gdp": {"num_householder": 2}}
    stack = hybrid_stack_spec("local", cp_layout="contiguous", **options).submodules
    assert stack.mamba_layer.submodules.mixer.params == {
        "backend": "flash_qla",
        "cp_layout": "contiguous",
        "num_householder": 2,
    }
    launched = {"recompute": "light", "num_householder": 4}
    monkeypatch.setattr(layer_module, "_launch_options", lambda: launched)
    stack = hybrid_stack_spec("local", gdp={}).submodules
    assert stack.mamba_layer.submodules.mixer.params == launched


@on_ranks(tp=1)
def test_a_stack_of_gated_delta_products_trains():
    config = make_config(num_layers=3, mamba_num_heads=4, mamba_num_groups=2)
    model = hybrid("M*M", config, hybrid_stack_spec("local", gdp={}))
    mixer = model.decoder.layers[0].mixer
    assert type(mixer) is GatedDeltaProduct and mixer.num_householder == 3
    require_finite_gradients(model)


def test_the_transformer_engine_stack_has_query_and_key_norms_where_asked():
    """Megatron's own stack has none, whatever ``config.qk_layernorm`` says."""
    mixers = gated_delta_net_spec("local"), mamba2_spec("local")
    with_norms, without = (
        hybrid_module._te_submodules(*mixers, asked, "auto") for asked in (True, False)
    )
    assert without.mamba_layer.submodules.mixer.module is Mamba2Mixer
    for stack, norm in ((with_norms, te.TENorm), (without, None)):
        attention = stack.attention_layer.submodules.self_attention.submodules
        assert attention.q_layernorm is attention.k_layernorm is norm
        assert attention.linear_qkv is te.TELayerNormColumnParallelLinear
        # of trees and of the loader's cut the core hears too
        core = attention.core_attention
        assert core.keywords == {"cp_layout": "auto"}
        assert core.func is class_with_tree_attention(te.TEDotProductAttention)
    named = import_module(["megatron_gdn.specs", "gdn_qk_norm_hybrid_stack_spec"])
    parts = named.submodules.attention_layer.submodules.self_attention.submodules
    assert parts.q_layernorm is parts.k_layernorm is not None


@on_ranks(tp=1)
def test_k_layers_are_kimi_delta_attention_beside_gated_delta_net():
    model = hybrid("GKK-*K")
    mixers = [getattr(layer, "self_attention", None) for layer in model.decoder.layers]
    found = [type(mixer) for mixer in mixers if hasattr(mixer, "micro_batches")]
    assert found == [GatedDeltaNet, *[KimiDeltaAttention] * 3]
    expected = {
        "decoder.layers.1.input_layernorm.weight",
        "decoder.layers.1.self_attention.in_proj.weight.gate",
        "decoder.layers.1.self_attention.beta_proj.weight",
        "decoder.layers.1.self_attention.conv1d.weight.key",
        "decoder.layers.5.self_attention.dt_bias",
    }
    missing = expected - keys_of(model)
    assert not missing
    assert mixers[-1].layer_number == 6
    require_finite_gradients(model)


@on_ranks(tp=1)
def test_megatrons_dynamic_context_finds_the_states_of_k_layers():
    """Megatron-LM's main looks for letters that it knows, and counts layers by them."""
    stack = hybrid("K-G*").decoder
    assert isinstance(stack, HybridStack)
    assert list(stack.layer_type_list) == ["G", "-", "G", "*"]
    shapes = stack.mamba_state_shapes_per_request()
    # main's stack; others have no place for such layers
    of_k = stack.layers[0].self_attention.mamba_state_shapes_per_request()
    assert shapes is None or shapes == of_k


@pytest.mark.parametrize("pattern", ["G-/KK", "K-/GK*"])
@on_ranks(tp=1)
def test_heads_of_multi_token_prediction_have_k_layers(pattern):
    model = hybrid(
        pattern, make_config(num_layers=pattern.index("/"), mtp_num_layers=1)
    )
    found = [type(x.self_attention) for x in model.mtp.layers[0].mtp_model_layer.layers]
    of = {"K": KimiDeltaAttention, "G": GatedDeltaNet, "*": TorchSelfAttention}
    assert found == [of[letter] for letter in pattern.split("/")[1]]
    require_finite_gradients(model, loss_mask=torch.ones(1, 8))


def build_as_main(spec, *args, **given):
    """As Megatron's main branch, which names its own class in a copy of the spec of 'G'
    layers."""
    if spec.module is hybrid_module._GDNOrKDALayer:
        spec = copy.deepcopy(spec)
        spec.submodules.self_attention.module = object
    return build_module(spec, *args, **given)


@pytest.mark.parametrize("build", [build_module, build_as_main])
@on_ranks(tp=1)
def test_g_layers_of_the_variant_gdn2_are_gated_deltanet_2(build):
    config = make_config(num_layers=3, mtp_num_layers=1)
    config.experimental_attention_variant = "gdn2"
    with patch.object(hybrid_block, "build_module", build):
        model = hybrid("G-K/G", config)
    layers = [*model.decoder.layers, *model.mtp.layers[0].mtp_model_layer.layers]
    found = [type(layers[place].self_attention) for place in (0, 2, 3)]
    assert found == [GatedDeltaNet2, KimiDeltaAttention, GatedDeltaNet2]
    require_finite_gradients(model, loss_mask=torch.ones(1, 8))
    keys = keys_of(model)
    assert "decoder.layers.0.self_attention.in_proj.weight.w" in keys
    config = gpt_config([1, 0], num_layers=2)
    config.experimental_attention_variant = "gdn2"
    block = gpt_block_spec(config)
    assert block.layer_specs[0].submodules.self_attention.module is GatedDeltaNet2


def test_k_layers_take_their_own_options():
    spec = hybrid_stack_spec("local", cp_layout="contiguous", kda={"forget_rank": 0})
    mixer = spec.params["layers"]["K"].submodules.self_attention
    assert mixer.params == {"cp_layout": "contiguous", "forget_rank": 0}
    assert kimi_delta_attention_spec("local", backend="fla").params == {
        "backend": "fla"
    }


@pytest.mark.parametrize("symbol", ["D", "E"])
@on_ranks(tp=1)
def test_a_layer_the_local_spec_lacks_is_refused_and_not_an_identity(symbol):
    with pytest.raises(
        NotImplementedError, match=f"no layer for '{symbol}'"
    ) as refused:
        hybrid("G" + symbol)
    assert 'hybrid_stack_spec("te")' in str(refused.value)


@on_ranks(tp=1)
def test_local_experts_are_as_many_as_the_config_has():
    """The spec that ``--spec`` names is made before there is a config."""
    model = hybrid(
        "GE", make_config(num_layers=2, **EXPERTS), specs.gdn_hybrid_stack_spec_local
    )
    names = [
        [name for name, _ in layer.named_parameters()] for layer in model.decoder.layers
    ]
    assert [sum(name.endswith("linear_fc1.weight") for name in of) for of in names] == [
        0,
        3,
    ]


@pytest.mark.parametrize(
    "freq, mixers, changes",
    [
        (
            4,
            [GatedDeltaNet] * 3 + [TorchSelfAttention],
            EXPERTS | {"moe_layer_freq": 2},
        ),
        (2, [GatedDeltaNet, TorchSelfAttention] * 2, {}),
        ([1, 1, 0, 1], [GatedDeltaNet] * 2 + [TorchSelfAttention, GatedDeltaNet], {}),
        ([1, 1, 1, 1], [GatedDeltaNet] * 4, {}),
    ],
)
@on_ranks(tp=1)
def test_gpt_blocks_mix_layers_by_linear_attention_freq_and_may_hold_experts(
    freq, mixers, changes
):
    config = gpt_config(freq, **changes)
    block = gpt_block_spec(config)
    assert isinstance(block, TransformerBlockSubmodules)
    model = GPTModel(config, block, 16, 8, position_embedding_type="rope")
    tokens = torch.arange(8)[None]
    mask = torch.ones(1, 1, 8, 8, dtype=torch.bool).triu(1)
    losses = model(tokens, tokens, mask, labels=(tokens + 1) % 16)
    losses.sum().backward()
    assert losses.isfinite().all() and losses.shape == (1, 8)
    assert [type(layer.self_attention) for layer in model.decoder.layers] == mixers
    # its name in Megatron-Core after 0.19
    config.experimental_attention_variant = "gdn"
    again = gpt_block_spec(config).layer_specs
    assert [layer.submodules.self_attention.module for layer in again] == mixers


@on_ranks(tp=1)
def test_each_pipeline_stage_gets_its_own_layers():
    config = gpt_config(4, num_layers=6, pipeline_model_parallel_size=3)
    assert parallel_state.get_pipeline_model_parallel_rank() == 0
    blocks = [gpt_block_spec(config, pp_rank=rank) for rank in range(3)]
    assert [len(block.layer_specs) for block in blocks] == [2, 2, 2]


@pytest.mark.parametrize(
    "name",
    ["hybrid_stack_spec", "gdn_hybrid_stack_spec", "gdn_hybrid_stack_spec_local"],
)
def test_megatron_finds_the_hybrid_specs_by_name(name):
    spec = import_module(("megatron_gdn.specs", name))
    assert isinstance(spec, ModuleSpec)
    assert spec.submodules.gdn_layer.submodules.self_attention.module is GatedDeltaNet


@on_ranks(tp=1)
def test_a_hybrid_spec_is_called_for_another_and_built_by_build_module():
    other = hybrid_stack_spec("local", cp_layout="contiguous")
    assert other is not hybrid_stack_spec and isinstance(other, ModuleSpec)
    for layer in (other.submodules.gdn_layer, other.submodules.attention_layer):
        assert layer.submodules.self_attention.params["cp_layout"] == "contiguous"
    assert isinstance(other(), ModuleSpec)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    config = make_config(num_layers=1)
    given = {"pre_process": True, "layer_type_list": ["G"], "pg_collection": groups}
    stack = build_module(hybrid_stack_spec("local"), config, **given)
    assert type(stack).__name__ == "KDAHybridStack"


def test_unknown_modules_list_the_known_ones():
    with pytest.raises(ValueError, match="'tee'; use one of auto, local, te"):
        hybrid_stack_spec("tee")


@without_te
def test_transformer_engine_is_never_replaced_in_silence():
    with pytest.raises(ImportError, match='use modules="local"'):
        hybrid_stack_spec("te")
    config = make_config(
        experimental_attention_variant="gated_delta_net", linear_attention_freq=4
    )
    with pytest.raises(ImportError, match="needs Transformer Engine"):
        gpt_block_spec(config)


@dataclass
class OtherStack:
    """Places of layers as another Megatron may have them: some are gone, some are
    new."""

    mamba_layer: type = IdentityOp
    gdn_layer: type = IdentityOp
    attention_layer: type = IdentityOp
    mlp_layer: type = IdentityOp
    moe_layer: type = IdentityOp
    csa_layer: type = IdentityOp
    mtp_block_spec: ModuleSpec | None = None


def test_stacks_with_other_places_are_filled_and_no_place_is_an_identity(monkeypatch):
    monkeypatch.setattr(hybrid_module, "HybridStackSubmodules", OtherStack)
    layers = hybrid_stack_spec("local").submodules
    assert layers.gdn_layer.submodules.self_attention.module is GatedDeltaNet
    assert layers.mamba_layer.submodules.mixer.module is Mamba2Mixer
    assert layers.moe_layer.module is LocalMoELayer
    with pytest.raises(NotImplementedError, match="no layer for 'csa_layer'"):
        build_module(layers.csa_layer)
    assert IdentityOp not in vars(layers).values()
    assert layers.mtp_block_spec.module is MultiTokenPredictionBlock


def test_transformer_engines_prediction_heads_keep_their_parts_and_are_checked():
    theirs = hybrid_layer_specs.hybrid_stack_spec.submodules.mtp_block_spec
    ours = checked_mtp_spec(theirs, cp_layout="contiguous")
    assert ours.module is theirs.module
    for layer, original in zip(
        ours.submodules.layer_specs, theirs.submodules.layer_specs, strict=True
    ):
        assert layer.module is HybridMTPLayer and layer.params == {
            "cp_layout": "contiguous"
        }
        assert layer.submodules is original.submodules
        # Megatron's own spec stays as it was
        assert original.module is not HybridMTPLayer


@pytest.mark.parametrize(
    ("version", "warned"),
    [
        ("0.19.0", False),
        ("0.19.2+aa12f35", False),
        ("0.18.2", False),
        ("0.17.1", True),
        ("0.20.0rc0", True),
        ("0.20.1", True),
        ("1.0", True),
    ],
)
def test_an_untested_megatron_is_warned_of_when_the_specs_are_imported(
    monkeypatch, version, warned
):
    monkeypatch.setattr(megatron.core, "__version__", version)
    tested.warn_of_untested.cache_clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        importlib.reload(specs)
    told = [
        str(w.message)
        for w in caught
        if "megatron_gdn was tested with" in str(w.message)
    ]
    assert len(told) == warned and all(version in text for text in told)


def test_a_config_without_gated_delta_net_is_refused():
    with pytest.raises(ValueError, match="set it to 'gated_delta_net'"):
        gpt_block_spec(make_config())
