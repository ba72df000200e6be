import gc
import os
from collections import Counter, defaultdict
from itertools import combinations

import pytest

from tests import reproductions
from tests.ranks import RankPool, fork_server
from tests.reproductions import pytest_runtest_makereport  # noqa: F401 - a hook

# Laws on a GPU take few kernels of many numbers of heads.
os.environ.setdefault("MEGATRON_GDN_COMPILE_AHEAD", "0")
# What the test files import stays, half a million objects: they are not searched for
# garbage.
gc.disable()
# A slow test takes about as long as this number of quick tests.
QUICK_TESTS_PER_SLOW_TEST = 30


def pytest_pycollect_makemodule():
    """Before a test file is imported. xdist's first process imports none, and no
    torch."""
    from tests.bits_by_shape import hold_if_asked
    from tests.filled_memory import fill_new_memory

    hold_if_asked()
    fill_new_memory()
    reproductions.pytest_pycollect_makemodule()


def pytest_runtest_setup(item):
    import torch

    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a GPU")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(items, config):
    """Leave to the nightly run what marks `each_value` and `each_pair` need not run.

    Workers of xdist take the longest files first, so that they end together.
    """
    _leave_to_nightly(items)  # before ``-m`` is read
    result = yield
    if hasattr(config, "workerinput"):
        length = Counter()
        for item in items:
            length[item.path] += 1
            if item.get_closest_marker("slow"):
                length[item.path] += QUICK_TESTS_PER_SLOW_TEST - 1
        items.sort(key=lambda item: -length[item.path])
    return result


def _leave_to_nightly(items):
    for size, mark in ((1, "each_value"), (2, "each_pair")):
        cases_of = defaultdict(list)
        for item in items:
            if item.get_closest_marker(mark) and not _runs_elsewhere(item):
                slow = bool(item.get_closest_marker("slow"))
                cases_of[item.path, item.originalname, slow].append(item)
        for cases in cases_of.values():
            _cover(cases, size)


def _runs_elsewhere(item):
    return any(item.get_closest_marker(name) for name in ("gpu", "nightly"))


def _cover(cases, size):
    """Mark cases nightly, but a few that have every value (or pair of values) of the
    parameters."""

    def shown(case):
        values = sorted(
            (name, id(value)) for name, value in case.callspec.params.items()
        )
        return set(combinations(values, min(size, len(values))))

    seen = set()
    rest = list(cases)
    while rest:
        case = max(rest, key=lambda case: len(shown(case) - seen))
        if shown(case) <= seen:
            break
        seen |= shown(case)
        rest.remove(case)
    for case in rest:
        case.add_marker("nightly")


def pytest_collection_finish():
    gc.freeze()
    gc.enable()


@pytest.hookimpl(wrapper=True, tryfirst=True)  # before pytest changes warnings and logs
def pytest_runtestloop(session):
    if any("pools" in getattr(item, "fixturenames", ()) for item in session.items):
        fork_server()
    return (yield)


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
