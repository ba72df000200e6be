"""A whole Kimi Linear: built, trained, imported and exported as transformers does."""

from math import prod
from types import SimpleNamespace

import pytest
import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.dist_checkpointing.serialization import load_sharded_metadata
from megatron.core.transformer.multi_latent_attention import MLASelfAttention

from megatron_gdn.hf import (
    build_model,
    compare_folders,
    export_folder,
    import_folder,
    parse_hf_config,
)
from megatron_gdn.hf.folders import find_checkpoint
from megatron_gdn.mixers.latent_attention import LatentAttention
from tests.hf import kimi_laws as laws
from tests.hf.model_laws import (
    checkpoint_loads,
    load_and_save,
    save_gives_the_source_back,
)
from tests.hf.test_checkpoints import megatron_loads, stored_by_a_model
from tests.hf.test_folders import digests
from tests.hf.tiny_models import KIMI_FOLDERS, KIMI_PUBLISHED


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.fixture(scope="module")
def step_of_transformers(pools, hf_folder, tmp_path_factory):
    """``step_of_transformers(name, packed)``: the folders of gradients and the logits,
    in fp32 and in fp64."""
    made = {}

    def make(name: str, packed: bool):
        for exact in (False, True):
            key = name, packed, exact
            if key not in made:
                target = tmp_path_factory.mktemp("gradients") / "saved"
                law = laws.step_of_transformers
                (logits,) = pools(1).run(law, hf_folder(name), target, packed, exact)
                made[key] = target, logits
        return made[name, packed, False], made[name, packed, True]

    return make


@pytest.mark.parametrize(
    ("name", "packed", "sizes"),
    [
        slow("kimi", False, {}),
        ("kimi saved", True, {}),
        ("kimi", False, {"tp": 2}),
        ("kimi", True, {"cp": 2}),
        ("kimi", False, {"pp": 2}),
        ("kimi", False, {"ep": 2}),
        slow("kimi tied", False, {}),
        slow("kimi groups", False, {}),
        slow("kimi saved", False, {"tp": 2}),
        # experts need sequence parallelism
        ("kimi dense", False, {"tp": 2, "sequence_parallel": False}),
        slow("kimi", True, {"cp": 2, "layout": "contiguous"}),
        slow("kimi", False, {"cp": 2}),
    ],
    ids=str,
)
def test_a_step_has_the_logits_and_gradients_of_transformers(
    pools, hf_folder, step_of_transformers, name, packed, sizes
):
    """fp32, 1e-5 of the norm of each tensor, beyond the error of transformers' own."""
    steps = step_of_transformers(name, packed)
    ranks = prod(sizes.get(name, 1) for name in ("tp", "cp", "pp", "ep"))
    for found in pools(ranks).run(
        laws.step_of_megatron, hf_folder(name), *steps, packed, **sizes
    ):
        assert len(found) > 30
        assert max(found.values()) < 1e-5, found


@pytest.mark.parametrize(
    "name",
    [name if name == "kimi tied" else slow(name) for name in KIMI_FOLDERS],
)
def test_export_gives_the_source_files_back_byte_for_byte(hf_folder, tmp_path, name):
    folder = hf_folder(name)
    import_folder(folder, tmp_path / "imported")
    export_folder(tmp_path / "imported", tmp_path / "back", like=folder)
    assert digests(tmp_path / "back") == digests(folder)


@pytest.fixture(scope="module")
def imported(hf_folder, tmp_path_factory):
    checkpoint = tmp_path_factory.mktemp("imported") / "checkpoint"
    import_folder(hf_folder("kimi"), checkpoint)
    return checkpoint


@pytest.mark.parametrize(
    "sizes", [{"tp": 2}, slow({"pp": 2}), slow({"ep": 2})], ids=str
)
def test_every_rank_loads_its_share_and_saves_what_exports(
    pools, hf_folder, imported, tmp_path, sizes
):
    folder = hf_folder("kimi")
    held = pools(2).run(checkpoint_loads, folder, imported, "hybrid", **sizes)
    if "tp" not in sizes:
        assert all(set(names) < set().union(*held) for names in held)
    saved = tmp_path / "iter_0000001"
    law = load_and_save, imported, folder, saved, "hybrid", torch.bfloat16
    pools(2).run(*law, **sizes)
    export_folder(saved, tmp_path / "back", like=folder)
    assert list(compare_folders(folder, tmp_path / "back")) == []


def test_an_import_has_the_keys_and_shapes_that_megatron_saves(
    pools, hf_folder, imported
):
    folder = hf_folder("kimi")
    ((tensors, objects),) = pools(1).run(stored_by_a_model, folder, "hybrid")
    stored = load_sharded_metadata(str(find_checkpoint(imported)))
    found = {
        key: tuple(one.global_shape)
        for key, one in stored.items()
        if isinstance(one, ShardedTensor)
    }
    # Transformer Engine's modules ask for more of these than local ones.
    assert objects < stored.keys() - found.keys()
    for key in ("embedding.word_embeddings.weight", "output_layer.weight"):
        # The model pads 67 rows to 72, and loads either.
        assert (found.pop(key), tensors.pop(key)) == ((67, 24), (72, 24))
    assert found == tensors


def test_megatrons_own_loader_takes_an_import_and_our_flags_build_its_model(
    pools, hf_folder, imported
):
    law = megatron_loads, hf_folder("kimi"), imported, "hybrid"
    (different,) = pools(1).run(*law)
    assert different == {}


@pytest.mark.parametrize(
    ("tp", "wrap"), [(1, True), (2, False)], ids=["wrapped", "two ranks"]
)
def test_a_bf16_model_saves_the_bits_of_its_source(
    pools, hf_folder, tmp_path, tp, wrap
):
    """The experts' biases too, which Megatron's Float16Module makes bf16 at first."""
    saved = tmp_path / "saved"
    law = save_gives_the_source_back, hf_folder("kimi"), saved, "hybrid"
    found = pools(tp).run(*law, torch.bfloat16, tp, wrap)
    assert found == [[]] * tp


def test_a_model_that_rotates_or_has_another_epsilon_is_refused(pools, hf_folder):
    epsilon, rotates = pools(1).run(laws.loading_fails, hf_folder("kimi"))[0]
    assert "MLASelfAttention, which rotates queries and keys" in rotates
    assert "built with norm_epsilon=None, but Hugging Face models" in epsilon


def test_what_latent_attention_cannot_generate_with_is_refused(pools, hf_folder):
    for cached, divided in pools(2).run(laws.generation_fails, hf_folder("kimi")):
        assert "cache_mla_latents=True" in cached
        assert "was built with context_parallel_size=2" in divided


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_a_latent_that_every_rank_has_whole_is_not_gathered(
    monkeypatch, sequence_parallel
):
    """As Transformer Engine's duplicated linear gives it."""
    rows = torch.randn(5, 1, 3)
    latent = torch.randn(5, 1, 10)
    layer = object.__new__(LatentAttention)
    torch.nn.Module.__init__(layer)
    layer.config = SimpleNamespace(
        kv_lora_rank=6, qk_pos_emb_head_dim=4, sequence_parallel=sequence_parallel
    )
    layer.pg_collection = SimpleNamespace(tp=SimpleNamespace(size=lambda: 2))
    monkeypatch.setattr(
        MLASelfAttention, "_qkv_down_projection", lambda *_: (rows, latent)
    )
    found_rows, found = layer._qkv_down_projection(rows)
    assert found_rows is rows and torch.equal(found, latent)


# Of moonshotai/Kimi-Linear-48B-A3B-Instruct, all fields, of a small model's sizes.
PUBLISHED = {
    "architectures": ["KimiLinearForCausalLM"],
    "bos_token_id": 163584,
    "dtype": "bfloat16",
    "eos_token_id": 163586,
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "hidden_size": 24,
    "initializer_range": 0.02,
    "intermediate_size": 20,
    "kv_lora_rank": 8,
    "linear_attn_config": {
        "full_attn_layers": [4],
        "head_dim": 8,
        "kda_layers": [1, 2, 3],
        "num_heads": 4,
        "short_conv_kernel_size": 4,
    },
    "model_max_length": 1048576,
    "model_type": "kimi_linear",
    "moe_intermediate_size": 12,
    "moe_renormalize": True,
    "num_attention_heads": 4,
    "num_expert_group": 1,
    "num_experts": 8,
    "num_experts_per_token": 4,
    "num_hidden_layers": 4,
    "num_key_value_heads": 4,
    "num_shared_experts": 1,
    "pad_token_id": 163839,
    "q_lora_rank": None,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "rms_norm_eps": 1e-05,
    "routed_scaling_factor": 2.446,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "transformers_version": "4.56.2",
    "use_cache": True,
    "v_head_dim": 6,
    "vocab_size": 67,
    **KIMI_PUBLISHED,
}


# Without lists of layers.
OF_SIZES = {"head_dim": 8, "num_heads": 4, "short_conv_kernel_size": 4}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"moe_router_activation_func": "softmax"}, "must be 'sigmoid'"),
        ({"mla_use_nope": False}, "mla_use_nope=false is not supported"),
        ({"moe_renormalize": False}, "norm_topk_prob=false is not supported"),
        ({"num_key_value_heads": 2}, "num_key_value_heads=2 must be num_attention"),
        ({"num_experts_per_token": 1}, "num_experts_per_tok=1 is not supported"),
        ({"num_experts_per_token": 9}, "must be at most num_experts=8"),
        ({"num_expert_group": 4}, "by its best 2. Only a quotient of 2"),
        ({"num_expert_group": 3}, "n_group=3 must divide num_experts=8"),
        ({"topk_group": 2}, "topk_group=2 be at most n_group"),
        ({"index_topk": 8}, "'index_topk'.* not known as fields of a Kimi Linear"),
        ({"layer_types": ["full_attention"] * 4}, "layer_types=.* contradicts"),
        ({"mlp_layer_types": ["dense"] * 4}, "mlp_layer_types=.* contradicts"),
        ({"num_hidden_layers": 5}, "must name each of the 5 layers once"),
        ({"n_group": 2}, "num_expert_group=1 and n_group=2 are one setting"),
        ({"linear_head_dim": 4}, "has head_dim=8, and linear_head_dim=4"),
        ({"linear_attn_config": {"gate": 1}}, "linear_attn_config has 'gate'"),
        (
            {"linear_attn_config": OF_SIZES, "layer_types": ["conv"] * 4},
            "layer_types must be 4 times one of 'linear_attention', 'full_attention'",
        ),
        (
            {"linear_attn_config": OF_SIZES, "layer_types": ["full_attention"] * 3},
            "layer_types must be 4 times one of",
        ),
        ({"linear_attn_config": [8]}, "linear_attn_config=.* must be an object"),
        ({"kv_lora_rank": None}, "has no 'kv_lora_rank'"),
    ],
    ids=str,
)
def test_what_megatron_lacks_or_a_config_contradicts_is_refused_by_name(
    changes, message
):
    with pytest.raises(ValueError, match=message):
        parse_hf_config(PUBLISHED | changes)


@pytest.mark.parametrize(
    ("changes", "pattern"),
    [
        ({}, "K-KEKE+E"),
        ({"first_k_dense_replace": 3}, "K-K-K-+E"),
        ({"linear_attn_config": OF_SIZES}, "K-KEKEKE"),
        (
            {"linear_attn_config": OF_SIZES, "layer_types": ["full_attention"] * 4},
            "+-+E+E+E",
        ),
        ({"first_k_dense_replace": 0}, "KEKEKE+E"),
        ({"linear_attn_config": OF_SIZES | {"kda_layers": [1, 2, 3, 4]}}, "K-KEKEKE"),
        (
            {"linear_attn_config": OF_SIZES | {"full_attn_layers": [1, 2, 3, 4]}},
            "+-+E+E+E",
        ),
    ],
    ids=str,
)
def test_which_layers_a_model_has(changes, pattern):
    assert parse_hf_config(PUBLISHED | changes).hybrid_layer_pattern == pattern


@pytest.mark.parametrize(
    "changes",
    [
        {"linear_head_dim": None},
        {"linear_head_dim": 8},
        {
            "linear_head_dim": 8,
            "linear_attn_config": PUBLISHED["linear_attn_config"] | {"head_dim": None},
        },
    ],
    ids=str,
)
def test_a_field_that_is_null_counts_as_absent_inside_and_outside(changes):
    assert parse_hf_config(PUBLISHED | changes) == parse_hf_config(PUBLISHED)


@pytest.mark.parametrize(
    ("changes", "symbol", "unused", "unset"),
    [
        (
            {"first_k_dense_replace": 4},
            "E",
            ["num_experts", "num_experts_per_token", "moe_intermediate_size"],
            ["num_moe_experts", "moe_router_dtype", "moe_router_topk"],
        ),
        (
            {"linear_attn_config": OF_SIZES},
            "+",
            ["kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"],
            ["multi_latent_attention", "kv_lora_rank", "rope_type"],
        ),
    ],
    ids=["experts", "latent attention"],
)
def test_layers_that_a_model_lacks_need_no_sizes_and_set_nothing(
    changes, symbol, unused, unset
):
    fields = {name: x for name, x in PUBLISHED.items() if name not in unused}
    config = parse_hf_config(fields | changes)
    assert symbol not in config.hybrid_layer_pattern
    assert not set(unset) & config.megatron_settings("hybrid").keys()
    assert set(unset) <= parse_hf_config(PUBLISHED).megatron_settings("hybrid").keys()


def test_transformers_class_has_the_layers_of_a_config_without_lists():
    from transformers import KimiLinearConfig

    fields = PUBLISHED | {"num_hidden_layers": 10, "linear_attn_config": OF_SIZES}
    theirs = KimiLinearConfig(**fields)
    ours = parse_hf_config(fields).hybrid_layer_pattern
    mixers = {"K": "linear_attention", "+": "full_attention"}
    mlps = {"-": "dense", "E": "sparse"}
    assert [mixers[symbol] for symbol in ours[::2]] == theirs.layer_types
    assert [mlps[symbol] for symbol in ours[1::2]] == theirs.mlp_layer_types


def test_a_gpt_model_is_refused():
    config = parse_hf_config(PUBLISHED)
    with pytest.raises(NotImplementedError, match="use model='hybrid'"):
        build_model(config, "gpt")
