import logging

import pytest
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_gdn.compat import observe
from megatron_gdn.compat.one_process import run_megatron_on_cpu
from tests.parallel import end_groups, parallel


@pytest.fixture(scope="package")
def world(tmp_path_factory):
    run_megatron_on_cpu()
    store = tmp_path_factory.mktemp("gloo") / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield
    end_groups()  # none is kept for the next world
    dist.destroy_process_group()


@pytest.fixture
def one_rank(world):
    """Megatron's parallel state on a single rank."""
    with parallel():
        yield
    assert not parallel_state.model_parallel_is_initialized()


@pytest.fixture
def log(caplog):
    """What the package says, though it said it before."""
    observe.log_once.cache_clear()
    caplog.set_level(logging.INFO)
    return caplog
