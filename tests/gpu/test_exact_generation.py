"""In batch-invariant mode 4,096 tokens have the bits of training, however they come."""

import pytest

from tests.gpu import exact_generation_laws as laws

pytestmark = pytest.mark.gpu

each_model = pytest.mark.parametrize("pattern", ["G-*-", "M-G-"])
each_size = pytest.mark.parametrize("tp", [1, 2])


@each_model
@each_size
def test_any_cut_of_drawn_and_greedy_tokens_has_the_bits_of_training(gpus, pattern, tp):
    for found in gpus(tp).run(laws.gaps, pattern, tp, 300):
        for gap in found:
            assert gap.equal and gap.max_log_prob == gap.max_kl == 0, gap


@each_model
@each_size
def test_neither_packing_nor_another_row_changes_a_bit(gpus, pattern, tp):
    gpus(tp).run(laws.packing_changes_no_bit, pattern, tp)
