"""Layers and models over a context-parallel mesh equal one rank, every gradient
included."""

import pytest
import torch

from tests.hf.drop_in import cp_laws as laws
from tests.hf.drop_in.conftest import (
    BAILING,
    DENSE,
    GLM,
    KIMI,
    MOE,
    NEXT,
    OLMO,
    QWEN4,
    VISION,
    VISION_MOE,
)

# Documents that no share of 2 or 4 ranks ends with, one of a token, and for cuts by
# document multiples of 8.
ANY = (5, 1, 23, 19)
CUT = (16, 8, 24)
EXPERTS = (MOE, VISION_MOE)

FEW = [
    ("seq_index: zigzag_buffer", "headwise", None, 1),
    ("zigzag_buffer", "headwise", ANY, 1),
    ("contiguous", "chunkwise", ANY, 1),
]
SOME = [
    ("contiguous", "headwise", None, 2),
    ("seq_index: zigzag", "chunkwise", CUT, 1),
]
MORE = [
    ("zigzag_buffer", "chunkwise", None, 2),
    ("seq_index: contiguous", "chunkwise", None, 2),
    ("zigzag", "chunkwise", CUT, 1),
]


@pytest.mark.each_value
@pytest.mark.parametrize(
    ("family", "ranks", "cases"),
    [
        (DENSE, 2, FEW + SOME),
        pytest.param(DENSE, 2, MORE, marks=pytest.mark.slow),
        (NEXT, 2, FEW[1:2]),
        pytest.param(NEXT, 2, FEW + SOME + MORE, marks=pytest.mark.slow),
        pytest.param(DENSE, 4, FEW + SOME + MORE, marks=pytest.mark.slow),
        *(
            pytest.param(family, 2, FEW[1:], marks=pytest.mark.slow)
            for family in (OLMO, QWEN4, BAILING)
        ),
        pytest.param(KIMI, 2, FEW, marks=pytest.mark.slow),
        (GLM, 4, FEW[1:]),
    ],
)
def test_a_layer_equals_one_rank(pools, family, ranks, cases):
    pools(ranks).run(laws.layers_equal_one_rank, family, cases)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_model_with_attention_equals_one_rank(pools, ranks):
    cases = [
        ("zigzag_buffer", "auto", None, None),
        ("zigzag_buffer", "auto", ANY, "position_ids"),
        ("seq_index: zigzag_buffer", "auto", ANY, "ids"),
        ("contiguous", "chunkwise", ANY, "mask"),
        ("zigzag", "headwise", CUT, "offsets"),
    ]
    pools(ranks).run(laws.models_equal_one_rank, "Qwen3_5ForCausalLM", cases)


@pytest.mark.slow
@pytest.mark.parametrize("family", [NEXT, VISION, OLMO, KIMI, *EXPERTS])
def test_other_models_equal_one_rank(pools, family):
    cases = [
        ("zigzag_buffer", "auto", None, None),
        ("contiguous", "auto", ANY, "offsets"),
    ]
    pools(2).run(laws.models_equal_one_rank, family, cases)


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.nightly)])
def test_a_mesh_set_on_a_built_layer_counts(pools, ranks):
    pools(ranks).run(laws.a_mesh_that_is_set_counts, [None, ANY])


@pytest.mark.parametrize(
    "law",
    [
        laws.a_mesh_set_on_a_patched_model_counts,
        laws.a_mesh_of_one_rank_leaves_attention_alone,
        laws.a_patch_says_on_how_many_ranks_it_runs_what,
        laws.a_trainer_gives_each_rank_its_share,
        laws.a_trainer_deals_one_batch_to_all_ranks,
        laws.gates_that_alone_are_sharded,
        laws.tables_do_not_follow_the_default_device,
        laws.padded_rows_and_padding_in_a_row,
        laws.without_tokens_there_is_no_output,
        laws.a_mask_in_a_dict_is_passed_on,
        laws.indexed_attention_is_refused,
        laws.different_batches_are_refused,
        laws.padding_beside_offsets,
    ],
    ids=lambda law: law.__name__,
)
def test_of_two_ranks(pools, law):
    pools(2).run(law)


def test_what_ranks_cannot_share_is_refused_on_every_rank(pools):
    two_rows = torch.tensor([[1, 1, 1, 1, 2, 2, 2, 2]]).expand(2, -1)
    late = torch.tensor([[0, 0, 0, 0, 1, 1, 1, 1], [1] * 8])
    cases = [
        ("zigzag_buffer", {}, {"tokens": 5}, "10 tokens, which is not a multiple of 4"),
        (
            "contiguous",
            {},
            {"seq_index": torch.arange(7)},
            r"must be \[8\] or \[rows, 8\]",
        ),
        (
            "contiguous",
            {},
            {"seq_index": torch.arange(8)},
            "is no share of 16 tokens in zigzag",
        ),
        ("contiguous", {}, {"seq_index": torch.zeros(1, 2, 8)}, r"shape \(1, 2, 8\)"),
        (
            "contiguous",
            {},
            {"seq_index": torch.arange(16).view(2, 8)},
            "rows of seq_index differ",
        ),
        (
            "zigzag",
            {},
            {"cu_seqlens": torch.tensor([0, 6, 16])},
            "6 tokens, .* multiple of 4",
        ),
        (
            "zigzag",
            {},
            {"_packed_seq_ids": torch.ones(1, 8), "cu_seqlens": torch.tensor([0, 16])},
            "cuts every document by itself",
        ),
        (
            "zigzag_buffer",
            {},
            {"position_ids": torch.arange(8)[None]},
            "neither go on nor start",
        ),
        (
            "zigzag_buffer",
            {},
            {"attention_mask": torch.ones(1, 1, 8, 8)},
            "nothing about the tok",
        ),
        (
            "zigzag_buffer",
            {},
            {"cu_seqlens": torch.tensor([0, 5]), "indices": torch.arange(5)},
            "indices of 5 tokens with context parallelism",
        ),
        (
            "zigzag_buffer",
            {},
            {"attention_mask": two_rows},
            "packed documents in one row only",
            2,
        ),
        (
            "zigzag_buffer",
            {},
            {"attention_mask": late},
            "padding before tokens in one row only",
            2,
        ),
        (
            "contiguous",
            {},
            {"position_ids": torch.arange(8).expand(3, -1)},
            r"position_ids has shape \(3, 8\)",
            2,
        ),
        (
            "zigzag_buffer",
            {},
            {"position_ids": torch.zeros(3, 1, 8)},
            r"\[4, 1, 8\], text posit",
        ),
        (
            "contiguous",
            {},
            {"_packed_seq_ids": torch.tensor([[2, 2, 2, 2, 1, 1, 1, 1]])},
            "document 1 after document 2",
        ),
        (
            "contiguous",
            {"linear_cp_mode": "headwise"},
            {"cu_seqlens": torch.tensor([0, 9])},
            "ends at 9, which does not match the 16 tokens",
        ),
    ]
    pools(2).run(laws.all_refused, cases)


@pytest.mark.parametrize(
    ("family", "ranks"),
    [
        (DENSE, 2),
        pytest.param(KIMI, 2, marks=pytest.mark.slow),
        pytest.param(NEXT, 2, marks=pytest.mark.slow),
        pytest.param(MOE, 2, marks=pytest.mark.slow),
        pytest.param(DENSE, 4, marks=pytest.mark.slow),
    ],
)
def test_a_fully_sharded_model_equals_one_rank(pools, family, ranks):
    pools(ranks).run(laws.fully_sharded_equals_one_rank, family)


@pytest.mark.slow
@pytest.mark.parametrize("family", [DENSE, KIMI])
def test_a_sharded_model_has_the_parameters_of_transformers(pools, family):
    pools(2).run(laws.a_sharded_model_has_the_parameters_of_transformers, family)
