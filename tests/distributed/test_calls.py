"""The way of a steady forward stays short in every scheme (``benchmarks/count_calls.py``)."""

import pytest

from tests.distributed import call_laws as laws

# Measured plus a few, without the arithmetic of the plain twins, which a GPU has no part in. Who
# passes a bound has put work into every forward of every layer.
MOST = {
    (1, "auto", False): 50,
    (1, "auto", True): 90,
    (2, "headwise", False): 102,
    (2, "chunkwise", False): 123,
}


@pytest.mark.parametrize(("cp", "mode", "packed"), MOST, ids=str)
def test_a_steady_forward_calls_few_functions(pools, cp, mode, packed):
    for calls, entries in pools(cp).run(laws.steady_way, cp, mode, packed):
        assert calls <= MOST[cp, mode, packed], entries
        checks = {"arguments.py"} | (set() if packed else {"packing.py"})
        assert not checks & {name.split(":")[0] for name in entries}, "nothing to look at was given"
