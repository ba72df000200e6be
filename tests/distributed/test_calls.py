"""The way of a steady forward stays short in every scheme (``benchmarks/count_calls.py``)."""

import pytest

from tests.distributed import call_laws as laws

# Measured plus a few. Most of the calls are the plain rule's arithmetic, which a GPU has no part
# in; who passes a bound has put work into every forward of every layer.
MOST = {
    (1, "auto", False): 145,
    (1, "auto", True): 180,
    (2, "headwise", False): 200,
    (2, "chunkwise", False): 315,
}


@pytest.mark.parametrize(("cp", "mode", "packed"), MOST, ids=str)
def test_a_steady_forward_calls_few_functions(pools, cp, mode, packed):
    for entries in pools(cp).run(laws.steady_entries, cp, mode, packed):
        assert sum(entries.values()) <= MOST[cp, mode, packed], entries
        checks = {"forward_arguments.py"} | (set() if packed else {"packing.py"})
        assert not checks & {name.split(":")[0] for name in entries}, "nothing to look at was given"
