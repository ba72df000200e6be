"""A pool of ranks tells what went wrong on which rank, and where the others are."""

import time

import pytest
import torch.distributed as dist

from tests.ranks import RankError, RankPool


@pytest.fixture
def pool():
    started = RankPool(2)
    yield started
    started.stop()


def raise_on_the_second_rank() -> None:
    if dist.get_rank() == 1:
        raise ValueError("the only reason")
    dist.barrier()


def sleep_on_the_first_rank() -> None:
    if dist.get_rank() == 0:
        time.sleep(1000)


def test_what_a_later_rank_raises_is_told_while_the_first_waits_for_it(pool):
    start = time.monotonic()
    with pytest.raises(RankError, match="rank 1:(.|\n)*the only reason"):
        pool.run(raise_on_the_second_rank)
    assert time.monotonic() - start < pool.timeout_s / 2


def test_a_rank_that_does_not_answer_tells_where_it_is(pool):
    pool.run(dist.barrier)
    pool.timeout_s = 1
    with pytest.raises(RankError, match="rank 0:\nno answer(.|\n)*sleep_on_the_first_rank"):
        pool.run(sleep_on_the_first_rank)
