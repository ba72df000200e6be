"""The head exchange over nccl, on Triton's packing: bit for bit what the definition says."""

import pytest
import torch

from tests.distributed import test_exchange as laws
from tests.ranks import RankPool

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module", params=[2, 4])
def gpus(request):
    if torch.cuda.device_count() < request.param:
        pytest.skip(f"needs {request.param} GPUs")
    pool = RankPool(request.param, backend="nccl")
    yield pool
    pool.stop()


@pytest.mark.parametrize("direct", [True, False], ids=["runs", "second pass"])
@pytest.mark.parametrize("waves", [1, 2])
@pytest.mark.parametrize("key_heads", [1, 4])
@pytest.mark.parametrize("packed", ["dense", "unequal"])
def test_open_gives_every_rank_its_heads(gpus, packed, key_heads, waves, direct):
    gpus.run(
        laws.open_gives_every_rank_its_heads, "zigzag", packed, 1, waves, direct,
        num_key_heads=key_heads,
    )  # fmt: skip


def test_a_batch_of_contiguous_sequences(gpus):
    gpus.run(laws.open_gives_every_rank_its_heads, "contiguous", "dense", 3, 2)


def test_sums_over_copies_are_rounded_once_in_the_order_of_ranks(gpus):
    gpus.run(laws.sums_over_copies_are_rounded_once_in_the_order_of_ranks)
