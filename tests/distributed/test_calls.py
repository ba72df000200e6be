"""The way of a steady forward stays short in every scheme
(``benchmarks/count_calls.py``)."""

import sys
from pathlib import Path

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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "owner", "messages"),
    [
        ("headwise", "ours: exchange of heads", 4),
        ("chunkwise", "ours: histories and states", 6),
    ],
    ids=["headwise", "chunkwise"],
)
@on_ranks(tp=2, cp=2)
def test_a_step_sends_what_each_layer_needs_and_is_checked_once(mode, owner, messages):
    """Forward and backward of two layers, in ``benchmarks/count_step.py``."""
    sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
    from count_step import count, step_of

    step = step_of(mode, "GG", packed=False)
    step()
    found = count(step)
    assert found[owner]["collectives"] == 2 * messages
    assert found["ours: checks of agreement"]["collectives"] == 1
    assert "collectives" not in found["ours: stages of the layer"]
