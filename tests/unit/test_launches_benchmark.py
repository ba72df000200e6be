"""What the benchmark of whole launches reads from Megatron's log."""

from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
# Megatron's lines; the second has the means of the first two steps.
LINE = (
    " [2026-11-25 06:45:18.92] iteration {:8d}/       4 | consumed samples:            8 |"
    " elapsed time per iteration (ms): {:.1f} | learning rate: 3.000000E-04 | global batch size:"
    "     4 | lm loss: {:.6E} | loss scale: 1.0 | grad norm: 4.129 |\n"
)
LOG = (
    LINE.format(1, 900, 6) + "[Rank 0] (after 1 iterations) memory (MB) | allocated: 1.00 | max "
    "allocated: 20.50 | reserved: 3.00 | max reserved: 40.00\n"
    + LINE.format(2, 500, 5) + LINE.format(3, 90, 3) + LINE.format(4, 80, 2)
)  # fmt: skip


@pytest.fixture
def launches(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return __import__("launches")


@pytest.fixture
def record(launches, tmp_path):
    launch = object.__new__(launches.Launch)
    launch.log = tmp_path / "log"
    launch.log.write_text(LOG)
    return launches.record_of(launch)


def test_times_losses_and_peak_are_read(record):
    assert record["losses"] == {1: 6, 2: 4, 3: 3, 4: 2}
    assert record["first_ms"] == [900, 100] and record["peak"] == 20.5
    assert record["step_ms"] == {"median": 95, "least": 80, "p10": 80, "p90": 900, "n": 4}


def test_losses_after_a_checkpoint_are_held_to_those_printed_before(launches, record):
    later = {"losses": {3: 3.03, 4: 2, 5: 1}}
    assert launches.resumed(record, later) == {
        "first_step": 3, "steps_in_both": 2, "furthest": pytest.approx(0.01),
    }  # fmt: skip


def test_the_table_sets_our_layer_beside_megatrons(launches, record):
    ours = record | {"case": "fp8", "layer": "ours"}
    times = dict.fromkeys(("median", "least", "p10", "p90"), 190)
    theirs = record | {"case": "fp8", "layer": "upstream", "step_ms": times}
    slower = theirs | {"step_ms": {"median": 200}}
    killed = record | {"case": "killed", "layer": "ours"}
    _, *rows = launches.launch_table([ours, theirs, slower, killed, {"case": "4096"}])
    assert [row[1:4] for row in rows] == [
        ["ours", "95.0", "0.50"],
        ["megatron-core", "190.0", "1.00"],
    ]
