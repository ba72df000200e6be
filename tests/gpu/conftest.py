"""Worlds of GPUs."""

import pytest
import torch

from tests.ranks import RankPool


@pytest.fixture(scope="module")
def gpus():
    """``gpus(n)``: a nccl world of n ranks; it waits in memory while another is asked for."""
    made = {}

    def pool(size):
        if torch.cuda.device_count() < size:
            pytest.skip(f"needs {size} GPUs")
        if size not in made:
            made[size] = RankPool(size, backend="nccl")
        return made[size]

    yield pool
    for one in made.values():
        one.stop()
