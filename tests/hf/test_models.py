"""Imported Megatron models compute what transformers computes, and save what they
loaded."""

import re

import pytest
import torch

from megatron_gdn.hf.safetensors_files import SafetensorsFolder
from tests.hf import model_laws as laws

DENSE = ["dense", "dense tied", "dense ratio 1", "dense ratio 3", "vision"]
MOE = [
    "next",
    "next dense layer",
    "next ratio 4",
    "moe",
    "moe packed",
    "vision moe packed",
]


def assert_logits_agree(found, noisy=False):
    """``noisy`` excepts tokens that one rounding moves further, as some routers do."""
    assert found["beyond noise" if noisy else "largest"] < 1e-4, found
    assert found["median"] < 1e-5, found
    assert found["cosine"] > 0.99999, found


@pytest.mark.parametrize(
    "kind", ["hybrid", pytest.param("gpt", marks=pytest.mark.nightly)]
)
@pytest.mark.parametrize("name", DENSE + MOE)
def test_an_imported_model_has_the_logits_of_transformers(pools, hf_folder, name, kind):
    (found,) = pools(1).run(laws.logits_agree, hf_folder(name), kind)
    assert_logits_agree(found, noisy=name in ("moe", "moe packed"))


@pytest.mark.parametrize("name", ["dense", "next"])
def test_plain_norms_give_the_same_logits(pools, hf_folder, name):
    (found,) = pools(1).run(
        laws.logits_agree, hf_folder(name), "gpt", layernorm_zero_centered_gamma=False
    )
    assert_logits_agree(found)


@pytest.mark.each_value
@pytest.mark.parametrize(
    "kind", ["hybrid", pytest.param("gpt", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(
    "name", ["dense", "dense tied", "next", "moe packed", "vision"]
)
def test_a_loaded_model_saves_the_bits_and_dtypes_of_its_source(
    pools, hf_folder, tmp_path, name, dtype, kind
):
    (found,) = pools(1).run(
        laws.save_gives_the_source_back,
        hf_folder(name),
        tmp_path / "saved",
        kind,
        dtype,
    )
    assert found == []


@pytest.mark.parametrize(
    ("ranks", "tp", "wrap"),
    [(1, 1, True), (2, 2, False), (2, 1, False)],
    ids=["wrapped", "two ranks", "two replicas"],
)
def test_wrapped_and_shared_models_save_them_too(
    pools, hf_folder, tmp_path, ranks, tp, wrap
):
    """Of two replicas one writes."""
    folders = hf_folder("dense"), tmp_path / "saved"
    found = pools(ranks).run(
        laws.save_gives_the_source_back, *folders, "hybrid", torch.bfloat16, tp, wrap
    )
    assert found == [[]] * ranks


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("dense", "hybrid"),
        pytest.param("dense", "gpt", marks=pytest.mark.slow),
        pytest.param("next dense layer", "hybrid", marks=pytest.mark.slow),
        ("next dense layer", "gpt"),
    ],
)
def test_two_ranks_share_a_model(pools, hf_folder, tmp_path, name, kind):
    folder = hf_folder(name)
    dense = {"sequence_parallel": name != "dense", "tensor_model_parallel_size": 2}
    for found in pools(2).run(laws.logits_agree, folder, kind, tp=2, **dense):
        assert_logits_agree(found)


@pytest.mark.each_value
@pytest.mark.parametrize("fp32_gates", [False, True], ids=["as in the source", "fp32"])
@pytest.mark.parametrize(("name", "tp"), [("next", 1), ("next", 2), ("dense", 1)])
def test_trained_gates_are_saved_in_fp32_or_their_loss_is_said(
    pools, hf_folder, tmp_path, name, tp, fp32_gates
):
    """Qwen3-Next's files have both gates in bf16, Qwen3.5's only dt_bias."""
    source = hf_folder(name)
    target = tmp_path / "saved"
    ranks = pools(tp).run(laws.save_trained_gates, source, target, tp, fp32_gates)
    before = SafetensorsFolder(source)
    after = SafetensorsFolder(target)
    lost = []
    for gate in ("A_log", "dt_bias"):
        key = f"model.layers.0.linear_attn.{gate}"
        trained = torch.cat([gates[gate] for gates, _ in ranks])
        assert not torch.equal(trained, trained.bfloat16().float())
        dtype = torch.float32 if fp32_gates else before.specs[key].torch_dtype
        assert after.read(key).dtype == dtype
        assert torch.equal(after.read(key), trained.to(dtype))
        lost += [key] * (dtype != torch.float32)
    warnings = ranks[0][1]
    assert [said for _, said in ranks[1:]] == [[]] * (tp - 1)
    if not lost:
        assert warnings == []
        return
    (warning,) = warnings
    assert f"the source files have: {', '.join(lost)}. " in warning
    assert "fp32_gates=True" in warning


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"config": {"hybrid_layer_pattern": "G-" * 4}},
            r"the model has no decoder.layers.6.self_at",
        ),
        ({"config": {"tied": True}}, "tie_word_embeddings=False in config.json"),
        (
            {"config": {"sizes": {"ffn_hidden_size": 28}}},
            r"linear_fc1.weight has shape \(56, 24\) in the model",
        ),
        (
            {"config": {"vocab_size": 32}},
            "vocabulary has 67 rows, the model's embedding only 32",
        ),
        (
            {"options": {"output_gate_activation": "sigmoid"}},
            "self_attention was built with output_gate_activation='sigmoid'",
        ),
        (
            {"options": {"allow_neg_eigval": True}},
            "was built with allow_neg_eigval=True",
        ),
    ],
)
def test_a_model_of_another_shape_or_meaning_is_refused_by_name(
    pools, hf_folder, changes, message
):
    (found,) = pools(1).run(laws.loading_fails, hf_folder("dense"), **changes)
    assert re.search(message, found), found


@pytest.mark.parametrize("kind", ["hybrid", "gpt"])
def test_a_spec_that_is_given_builds_the_model(pools, hf_folder, kind):
    (found,) = pools(1).run(laws.mark_the_layers_of_a_spec, hf_folder("only gdn"), kind)
    assert "Marked" in found
