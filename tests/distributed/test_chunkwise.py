"""Chunkwise context parallelism: what is its own beside the laws that hold for both schemes.

fp32 on gloo, tolerance as in ``mixers``.
"""

import pytest
import torch

from tests.distributed import chunkwise_laws as laws
from tests.distributed.mixer_laws import parallel_equals_one_rank
from tests.distributed.mixers import GDN

LAYOUTS = ["zigzag", "zigzag_buffer", "contiguous"]
TWO_KEY_HEADS = {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
exchanges = pytest.mark.parametrize("exchange", ["gather", "share"])
sizes = pytest.mark.parametrize("size", [2, 4, 8])


def equal(pools, tp, cp, *args, **options):
    pools(tp * cp).run(parallel_equals_one_rank, GDN, tp, cp, *args, mode="chunkwise", **options)


@sizes
@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
def test_every_exchange_gives_the_product_of_the_maps_before(pools, size, layout):
    for backwards in (False, True):
        for dtype in (torch.float32, torch.float64):
            pools(size).run(laws.chains_equal_their_product, layout, backwards, dtype)


@pytest.mark.parametrize("size", [6, 8])
def test_no_exchange_passes_a_cut(pools, size):
    last = size - 1
    for cuts in ((0,), (1,), (2,), (0, 1, 2, last - 1), (2, last), tuple(range(size))):
        for backwards in (False, True):
            args = ("contiguous", backwards, torch.float32, cuts)
            pools(size).run(laws.chains_equal_their_product, *args)


@exchanges
@pytest.mark.parametrize(
    "lengths",
    [pytest.param(None, marks=pytest.mark.slow), (16, 0, 48, 32)],
    ids=["batch", "packed"],
)
def test_eight_ranks_of_two_key_heads_equal_one_rank(pools, lengths, exchange):
    pools(8).run(
        laws.either_exchange_equals_one_rank, exchange, 1, 8, lengths=lengths, changes=TWO_KEY_HEADS
    )


@pytest.mark.parametrize(
    ("cp", "layout"),
    [  # at 4 the rows before come from several ranks
        pytest.param(2, "zigzag", marks=pytest.mark.slow),
        (2, "zigzag_buffer"),
        pytest.param(2, "contiguous", marks=pytest.mark.slow),
        (4, "zigzag"),
        pytest.param(4, "zigzag_buffer", marks=pytest.mark.slow),
        (4, "contiguous"),
    ],
)
def test_chunks_shorter_than_the_taps_equal_one_rank(pools, cp, layout):
    chunks = cp if layout == "contiguous" else 2 * cp
    for tokens in (chunks, 2 * chunks):
        equal(pools, 1, cp, tokens=tokens, batch=3, layout=layout, conv_bias=True)
    equal(pools, 1, cp, lengths=(chunks, 0, chunks, 2 * chunks), layout=layout)


@pytest.mark.parametrize("layout", LAYOUTS)
@exchanges
def test_documents_across_many_ranks_equal_one_rank(pools, layout, exchange):
    pools(4).run(
        laws.either_exchange_equals_one_rank, exchange, 1, 4, lengths=(128, 0, 64), layout=layout
    )


def test_a_rank_of_nothing_but_padding_equals_one_rank(pools):
    equal(pools, 1, 2, lengths=(24,), real_lengths=(11,), layout="contiguous")
    equal(pools, 1, 4, lengths=(12, 20), real_lengths=(12, 3), layout="contiguous")


@pytest.mark.parametrize("layout", ["zigzag_buffer", "contiguous"])
@pytest.mark.parametrize("last", [2, 19], ids=["short", "long"])
def test_runs_of_several_documents_equal_one_rank(pools, layout, last):
    """Maps are computed of the last piece of a run alone, or of all pieces at once."""
    equal(pools, 1, 2, lengths=(20 - last, last + 3, 0, 17), layout=layout)


@pytest.mark.parametrize("rates", [(1e-4, 2e-4), (16, 20)], ids=["no decay", "strong decay"])
@pytest.mark.parametrize("lengths", [None, (8, 24, 16, 8)], ids=["batch", "packed"])
def test_any_decay_equals_one_rank(pools, rates, lengths):
    equal(pools, 2, 2, True, lengths=lengths, A_init_range=rates)


@pytest.mark.parametrize("taps", [1, 2, 7])
def test_any_number_of_taps_equals_one_rank(pools, taps):
    for layout in LAYOUTS:
        changes = {"linear_conv_kernel_dim": taps}
        equal(pools, 1, 2, lengths=(8, 4, 12), layout=layout, changes=changes)


@pytest.mark.parametrize("mode", ["headwise", "chunkwise"])
@pytest.mark.parametrize("lengths", [None, (8, 24, 0, 16)], ids=["batch", "packed"])
def test_fp16_operands_equal_one_rank(pools, lengths, mode):
    pools(2).run(laws.fp16_operands_equal_one_rank, 2, lengths=lengths, mode=mode)


@pytest.mark.parametrize("lengths", [None, (8, 24, 0, 16)], ids=["batch", "packed"])
def test_two_runs_are_bitwise_equal(pools, lengths):
    pools(4).run(laws.two_runs_are_bitwise_equal, 4, lengths)


def test_a_checkpoint_holds_while_auto_changes_the_scheme(pools):
    pools(2).run(laws.a_checkpoint_holds_while_auto_changes_the_scheme)


@pytest.mark.parametrize("mode", ["headwise", "chunkwise"])
def test_training_works_after_an_evaluation_in_inference_mode(pools, mode):
    pools(2).run(laws.trains_after_inference_mode, 2, mode)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("mode", ["headwise", "chunkwise"])
def test_tables_do_not_follow_the_default_device(pools, mode, layout):
    pools(2).run(laws.tables_do_not_follow_the_default_device, 2, mode, layout)


@pytest.mark.parametrize("mode", ["headwise", "chunkwise"])
def test_no_tokens_give_gradients_of_zero(pools, mode):
    pools(2).run(laws.no_tokens_give_gradients_of_zero, 2, mode)


@pytest.mark.parametrize("mode", ["headwise", "chunkwise"])
def test_recomputing_the_norm_works_inside_checkpoints(pools, mode):
    pools(2).run(laws.recomputing_the_norm_inside_a_checkpoint_changes_nothing, 2, mode)


def test_nothing_is_sent_where_no_document_is_cut(pools):
    pools(2).run(laws.no_exchange_where_no_document_is_cut)


def test_the_mode_comes_from_the_spec_or_the_config(pools):
    long, short = 2**20, 64

    def chosen(*args, **options):
        return pools(2).run(laws.chosen_scheme, *args, **options)[0]

    assert chosen(short) == "headwise" and chosen(long) == "chunkwise"
    assert chosen(short, "chunkwise") == "chunkwise" and chosen(long, "headwise") == "headwise"
    assert chosen(short, "headwise", linear_cp_mode="chunkwise") == "chunkwise"
    one_key_head = {"linear_num_key_heads": 1, "linear_num_value_heads": 3}
    assert chosen(short, sizes=one_key_head) == "chunkwise"
    assert chosen(short, most_heads=4) == "headwise"
    assert chosen(short, most_heads=3) == "chunkwise"


def test_activations_are_priced_in_their_own_dtype(pools):
    """Twice the bytes per row cost headwise twice, and chunkwise nothing more."""
    for dtype, scheme in ((torch.bfloat16, "headwise"), (torch.float32, "chunkwise")):
        assert pools(2).run(laws.chosen_scheme, 2**19, dtype=dtype) == [scheme] * 2


def test_the_mode_of_the_config_equals_one_rank(pools):
    pools(2).run(laws.the_mode_of_the_config_equals_one_rank, "chunkwise")


def test_auto_logs_each_choice_once(pools):
    first, *_ = pools(2).run(laws.auto_says_once_what_it_takes)
    headwise, chunkwise = first
    assert "takes 'headwise'" in headwise and "8 tokens" in headwise
    assert "2 ranks, 2 per machine" in headwise and "ms chunkwise" in headwise
    assert "takes 'chunkwise'" in chunkwise


def test_modes_that_cannot_run_are_refused(pools):
    pools(2).run(laws.modes_that_cannot_run_are_refused)
