"""A convolution of one tap reads no row before a token: a history has no rows."""

import pytest
import torch

from megatron_gdn.ops.delta_rule.base import HeadSizes
from tests.inference import test_aligned, test_step
from tests.inference.row_mixers import documents_of, gdn_kind, mamba2_kind, prefilled

pytestmark = pytest.mark.parametrize(
    "kind",
    [gdn_kind(HeadSizes(2, 4, 8, 6), taps=1), mamba2_kind(4, 2, 6, 5, taps=1)],
    ids=lambda kind: kind.name,
)


@pytest.mark.parametrize(
    "law",
    [
        test_step.test_packed_requests_of_unequal_length_go_on_from_their_own_memory,
        test_step.test_a_request_without_tokens_keeps_its_memory,
        test_step.test_several_tokens_at_once_have_the_bits_of_one_by_one_and_roll_back_exactly,
        test_aligned.test_neighbours_and_place_change_no_bit,
    ],
    ids=lambda law: law.__name__,
)
def test_laws_of_generation_hold(kind, law):
    law(kind)


def test_any_cut_gives_what_the_whole_gives(kind):
    test_step.test_any_cut_gives_what_the_whole_gives(kind, 65)
    test_aligned.test_any_cut_has_the_bits_of_training(
        kind, (70, -5, 60, -9, 6), torch.float32
    )


def test_an_empty_sequence_may_come_first(kind):
    mixer = kind.mixer(aligned=True)
    rows = kind.rows(5)
    mixed, _ = prefilled(mixer, rows, documents_of((0, 5)))
    assert torch.equal(mixed, kind.trained(rows, aligned=True))
