"""The way of a steady forward stays short in every scheme
(``benchmarks/count_calls.py``)."""

import pytest

from benchmarks.count_calls import steady_way
from tests.ranks import on_ranks

# Calls and files, measured plus a few, without the arithmetic of the plain twins, which
# a GPU has no part in. Who passes a bound has put work into every forward of every
# layer.
MOST = {
    (1, "auto", False): (40, 12),
    (1, "decode", False): (35, 12),
    (1, "auto", True): (48, 15),
    (2, "headwise", False): (67, 19),
    (2, "chunkwise", False): (59, 18),
}


@pytest.mark.parametrize(("cp", "mode", "packed"), MOST, ids=str)
@on_ranks(cp="cp")
def test_a_steady_forward_calls_few_functions(cp, mode, packed):
    way = steady_way(cp, mode, packed)
    calls, files = MOST[cp, mode, packed]
    assert way.own <= calls, way.entries
    assert way.own_files <= files, way.entries
    checks = {"arguments.py"} | (set() if packed else {"packing.py"})
    assert not checks & {name.split(":")[0] for name in way.entries}, (
        "nothing to look at was given"
    )
