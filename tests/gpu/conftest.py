"""Worlds of GPUs."""

import pytest
import torch
import torch.distributed as dist

from tests.parallel import parallel
from tests.ranks import RankPool


@pytest.fixture(scope="module")
def nccl(tmp_path_factory):
    """A world of one rank in this process."""
    store = tmp_path_factory.mktemp("nccl") / "store"
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", init_method=f"file://{store}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def world(nccl):
    """Megatron's parallel state in it."""
    with parallel():
        yield


@pytest.fixture(scope="module")
def transformer_engine():
    pytest.importorskip("transformer_engine")


@pytest.fixture(scope="module")
def gpus():
    """``gpus(n)``: a nccl world of n ranks; it waits in memory while another is asked
    for."""
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
