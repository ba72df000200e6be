import gc
import os

import pytest
import torch

from tests.bits_by_shape import hold_if_asked
from tests.ranks import RankPool

# Laws on a GPU take few kernels of many numbers of heads.
os.environ.setdefault("MEGATRON_GDN_COMPILE_AHEAD", "0")
# What the test files import stays, half a million objects: they are not searched for garbage.
gc.disable()
hold_if_asked()


def pytest_runtest_setup(item):
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a GPU")


def pytest_collection_finish():
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session")
def pools():
    """One pool of gloo ranks per world size, started when first asked for."""
    made: dict[int, RankPool] = {}
    latest: RankPool | None = None

    def pool(size: int) -> RankPool:
        nonlocal latest
        if size not in made:
            made[size] = RankPool(size)
        if latest not in (None, made[size]):
            from tests.parallel import end_groups

            latest.run(end_groups)  # of some 50 threads each
        latest = made[size]
        return latest

    yield pool
    for one in made.values():
        one.stop()
