"""Layers and models over a context-parallel mesh equal one rank, with every parameter's gradient."""

import pytest

from tests.hf.drop_in import cp_laws as laws

# Documents that no share of 2 or 4 ranks ends with, one of a token, and for cuts by document
# multiples of 8.
ANY = (5, 1, 23, 19)
CUT = (16, 8, 24)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("family", ["Qwen3_5ForCausalLM", "Qwen3NextForCausalLM"])
def test_a_layer_equals_one_rank(pools, family, ranks):
    cases = [
        ("zigzag_buffer", "chunkwise", None, 2),
        ("contiguous", "headwise", None, 2),
        ("interleaved", "chunkwise", None, 2),
        ("scattered", "headwise", None, 1),
        ("zigzag_buffer", "headwise", ANY, 1),
        ("zigzag", "chunkwise", CUT, 1),
        ("contiguous", "chunkwise", ANY, 1),
        ("interleaved", "chunkwise", ANY, 1),
    ]
    pools(ranks).run(laws.layers_equal_one_rank, family, cases)


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_model_with_attention_equals_one_rank(pools, ranks):
    cases = [
        ("zigzag_buffer", "auto", None, None),
        ("zigzag_buffer", "auto", ANY, "position_ids"),
        ("interleaved", "auto", ANY, "ids"),
        ("contiguous", "chunkwise", ANY, "mask"),
        ("zigzag", "headwise", CUT, "offsets"),
    ]
    pools(ranks).run(laws.models_equal_one_rank, "Qwen3_5ForCausalLM", cases)


@pytest.mark.parametrize("family", ["Qwen3NextForCausalLM", "Qwen3_5MoeForCausalLM"])
def test_mixture_models_equal_one_rank(pools, family):
    cases = [
        ("zigzag_buffer", "auto", None, None),
        ("contiguous", "auto", ANY, "offsets"),
    ]
    pools(2).run(laws.models_equal_one_rank, family, cases)
