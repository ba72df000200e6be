"""The head exchange over nccl, on Triton's packing: bit for bit what the definition
says."""

import pytest

from tests.distributed import test_exchange as laws

pytestmark = pytest.mark.gpu


@pytest.fixture(params=[2, 4])
def pool(gpus, request):
    return gpus(request.param)


@pytest.mark.parametrize("direct", [True, False], ids=["runs", "second pass"])
@pytest.mark.parametrize("waves", [1, 2])
@pytest.mark.parametrize("key_heads", [1, 4])
@pytest.mark.parametrize("packed", ["dense", "unequal"])
def test_open_gives_every_rank_its_heads(pool, packed, key_heads, waves, direct):
    pool.run(
        laws.open_gives_every_rank_its_heads,
        "zigzag",
        packed,
        1,
        waves,
        direct,
        num_key_heads=key_heads,
    )


def test_a_batch_of_contiguous_sequences(pool):
    pool.run(laws.open_gives_every_rank_its_heads, "contiguous", "dense", 3, 2)


def test_sums_over_copies_are_rounded_once_in_the_order_of_ranks(pool):
    pool.run(laws.sums_over_copies_are_rounded_once_in_the_order_of_ranks)
