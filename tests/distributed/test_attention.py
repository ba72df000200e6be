"""Plain-torch attention equals a direct softmax, alone and in parallel, in every layout.

fp32 on gloo against fp64, largest difference over largest entry at most 1e-5: about 80 units of
rounding, for sums over at most a few hundred terms.
"""

import pytest

from tests.distributed import attention_laws as laws

UNEQUAL = (8, 24, 16, 8)  # multiples of 2 * cp for cp = 2 and 4
ANY_LENGTH = (3, 0, 29, 7, 1)

layouts = pytest.mark.parametrize("layout", ["zigzag", "zigzag_buffer", "contiguous"])
ranks = pytest.mark.parametrize(
    ("tp", "cp", "sp"), [(1, 2, False), (1, 4, False), (2, 2, True)], ids=["cp2", "cp4", "tp2-cp2"]
)


@layouts
@ranks
def test_packed_documents_in_parallel_equal_a_direct_softmax(pools, tp, cp, sp, layout):
    lengths = UNEQUAL if layout == "zigzag" else ANY_LENGTH
    pools(tp * cp).run(
        laws.parallel_equals_a_direct_softmax, tp, cp, sp, lengths=lengths, layout=layout
    )


@layouts
@ranks
def test_a_batch_in_parallel_equals_a_direct_softmax(pools, tp, cp, sp, layout):
    pools(tp * cp).run(laws.parallel_equals_a_direct_softmax, tp, cp, sp, layout=layout)


@pytest.mark.parametrize("lengths", [None, ANY_LENGTH], ids=["batch", "packed"])
@pytest.mark.parametrize("rope", [True, False], ids=["rope", "no rope"])
def test_one_rank_equals_a_direct_softmax(pools, lengths, rope):
    pools(1).run(laws.parallel_equals_a_direct_softmax, 1, 1, lengths=lengths, rope=rope)


@pytest.mark.parametrize("lengths", [None, UNEQUAL], ids=["batch", "packed"])
@pytest.mark.parametrize(
    "options",
    [
        {"groups": 1},
        {"groups": 4},
        {"qk_layernorm": True},
        {"rope": False},
        {"recompute": True},
    ],
    ids=str,
)
def test_head_counts_norms_and_recomputation_equal_a_direct_softmax(pools, options, lengths):
    pools(4).run(laws.parallel_equals_a_direct_softmax, 2, 2, True, lengths=lengths, **options)


@layouts
def test_the_context_parallel_group_of_the_micro_batch_is_honoured(pools, layout):
    pools(2).run(
        laws.parallel_equals_a_direct_softmax,
        1,
        2,
        lengths=UNEQUAL,
        layout=layout,
        own_cp_group=True,
    )


@layouts
@pytest.mark.parametrize("cp", [1, 2])
def test_a_document_changes_no_bit_of_another(pools, cp, layout):
    pools(cp).run(laws.documents_do_not_see_each_other, cp, layout)


def test_packed_documents_are_each_document_alone(pools):
    pools(1).run(laws.packed_documents_are_each_document_alone)


def test_bf16_is_rounded_like_bf16(pools):
    error, largest = pools(1).run(laws.bf16_error)[0]
    # |o| <= max |v|. Rounding o costs 2^-9 of it; probabilities, which sum to 1, may be rounded
    # before their product with v (2^-9), and their sum is of unrounded ones (another 2^-9).
    assert 0 < error <= 3 * 2**-9 * largest


def test_dropout_is_for_training(pools):
    pools(1).run(laws.dropout_is_for_training)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("window", "cannot combine context_parallel_size=2 with window_size=(4, 0)"),
        ("sinks", "cannot combine context_parallel_size=2 with softmax_type='off-by-one'"),
        ("not causal", "cannot combine context_parallel_size=2 with attn_mask_type="),
        ("bias", "adds no attention_bias"),
        ("mask", "is not a causal mask"),
        ("max_seqlen", "set both to at least 24"),
    ],
)
def test_what_it_cannot_do_is_refused(pools, what, message):
    for answer in pools(2).run(laws.refusal, what):
        assert message in answer
