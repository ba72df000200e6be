"""Hybrid models generate: through Megatron's own engine, and at every parallel size.

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
    pools(1).run(laws.generates, pattern="G-G-")


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
