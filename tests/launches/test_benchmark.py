"""The benchmarks of launches run in a clone of Megatron-LM, tiny, on a CPU."""

import json

import pytest

from tests.launches.launching import in_a_clone
from tests.processes import python

pytestmark = in_a_clone


@pytest.fixture
def run(tmp_path):
    """``run(name, *flags)``: the records of a benchmark, by case and layer."""

    def recorded(name, *flags):
        out = tmp_path / "records.jsonl"
        flags = (*flags, "--tiny", "--out", out)
        python("benchmarks/run.py", name, *flags, timeout=550)
        lines = map(json.loads, out.read_text().splitlines())
        return {(line["case"], line["layer"]): line for line in lines}

    return recorded


def test_both_layers_train_with_documents_packed(run):
    records = run("launches", "--cases", "packed")
    theirs, ours = (records["packed", layer] for layer in ("upstream", "ours"))
    assert ours["losses"]["30"] == pytest.approx(theirs["losses"]["30"], rel=0.05)


def test_losses_go_on_after_a_kill(run):
    cases = ["dense", "upstream", "upstream-tp2", "tp2", "killed", "killed, resumed"]
    records = run("launch-laws", "--set", "gpus=2", "limit=500", "--cases", *cases)
    resumed = records["killed, resumed", "ours"]
    assert resumed["held_to"] == "tp2" and list(resumed["losses"])[-1] == "9"
    # the same launch on a CPU, whose sums have one order: only printed digits round
    assert resumed["distance"] < 1e-6
