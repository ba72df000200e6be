"""The way of a steady forward stays short in every scheme
(``benchmarks/counts.py``)."""

import sys
from pathlib import Path

import pytest

from tests.ranks import on_ranks

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from counts import count, files_of, steady_forward, step_of  # noqa: E402

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
    entries = steady_forward(cp, mode, packed)
    calls, files = MOST[cp, mode, packed]
    assert sum(entries.values()) <= calls, entries
    assert len(files_of(entries)) <= files, entries
    checks = {"mixers/arguments.py"} | (set() if packed else {"mixers/packing.py"})
    assert not checks & files_of(entries), "nothing to look at was given"


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
    """Forward and backward of two layers."""
    step = step_of(mode, "GG", packed=False)
    step()
    found = count(step)
    assert found[owner]["collectives"] == 2 * messages
    assert found["ours: checks of agreement"]["collectives"] == 1
    assert "collectives" not in found["ours: stages of the layer"]
