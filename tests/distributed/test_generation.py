"""Hybrid models (M, G and *) generate: through Megatron's own engine, and at every parallel size.

fp32, 1e-5 of the largest logit: some 80 units of rounding for sums of a few hundred terms.
"""

import pytest
import torch

from tests.distributed import generation_laws as laws


@pytest.fixture(scope="module")
def alone(pools):
    (found,) = pools(1).run(laws.generates)
    return found


def test_megatrons_own_engine_generates_what_training_calls_likeliest(pools):
    pools(1).run(laws.megatrons_engine_writes_the_likeliest_tokens)


def test_a_model_of_recurrent_layers_alone_generates(pools):
    pools(1).run(laws.generates, pattern="M-G-")


@pytest.mark.parametrize(
    ("tp", "cp", "sp"), [(2, 1, False), (2, 1, True), (1, 2, False)], ids=["tp2", "sp2", "cp2"]
)
def test_two_ranks_generate_what_one_generates(pools, alone, tp, cp, sp):
    tokens, logits = alone
    for other_tokens, other_logits in pools(2).run(laws.generates, tp, cp, sp):
        assert torch.equal(other_tokens, tokens)
        torch.testing.assert_close(
            other_logits, logits, rtol=1e-5, atol=1e-5 * logits.abs().max().item()
        )


def test_sequence_parallel_prefill_leaves_the_same_states(pools):
    pools(2).run(laws.sequence_parallel_prefill)


def test_what_cannot_generate_is_refused_in_words(pools):
    words = ("static_context", "tokens [B, S]", "tokens [B, S]", "pipeline_model_parallel_size=2")
    for found in pools(2).run(laws.refusals):
        assert len(found) == len(words)
        for message, word in zip(found, words, strict=True):
            assert word in message


def test_generation_has_the_log_probabilities_of_training(pools):
    """In fp32 within some roundings of log-probabilities of up to 10."""
    (gap,) = pools(1).run(laws.gap)
    assert gap.backend == "reference"
    assert 0 < gap.max_log_prob < 1e-4 and gap.mean_log_prob <= gap.max_log_prob
    assert abs(gap.max_kl) < 1e-6 and not gap.equal


@pytest.mark.parametrize("greedy", [False, True], ids=["drawn", "greedy"])
@pytest.mark.parametrize("pattern", ["M-*-G-", "G-G-M-*-"])
@pytest.mark.parametrize(
    ("tp", "dtype", "at_once"),
    [(1, torch.float32, 1), (2, torch.bfloat16, 4)],
    ids=["fp32", "tp2-bf16"],
)
def test_in_batch_invariant_mode_generation_has_the_bits_of_training(
    pools, tp, dtype, at_once, pattern, greedy
):
    found = pools(tp).run(
        laws.gap, tp=tp, exact=True, at_once=at_once, dtype=dtype, pattern=pattern, greedy=greedy
    )
    for gap in found:
        assert gap.equal and gap.max_log_prob == gap.max_kl == 0, gap


def test_the_first_module_that_differs_is_named(pools):
    ((ordinary, exact),) = pools(1).run(laws.modules_that_differ_first)
    assert exact is None and "layers.0" in ordinary and "(70, 2, " in ordinary, ordinary


@pytest.mark.slow
@pytest.mark.parametrize("pattern", ["G-*-", "M-G-"])
def test_in_batch_invariant_mode_4096_tokens_have_the_bits_of_training(pools, pattern):
    for gap in pools(1).run(laws.gaps_of_a_long_text, pattern)[0]:
        assert gap.equal and gap.max_log_prob == gap.max_kl == 0, gap


def test_in_batch_invariant_mode_neighbours_change_no_bit(pools):
    pools(1).run(laws.exact_batches)


def test_in_batch_invariant_mode_packing_changes_no_bit(pools):
    pools(1).run(laws.exact_packing)


def test_kernels_are_refused_in_batch_invariant_mode(pools):
    (refused,) = pools(1).run(laws.backend_by_name_in_the_exact_mode)
    assert len(refused) == 2 and all("Use 'auto' or 'reference'" in words for words in refused)
