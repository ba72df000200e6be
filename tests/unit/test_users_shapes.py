"""The script that measures users' shapes in one call runs from end to end, small, on a CPU."""

import json

import pytest
import torch

from tests.processes import ROOT, python

# megatron-core's layer runs on a CPU with stand-ins of fla's kernels.
SCRIPT = """
import runpy, sys
from tests.upstream import upstream_on_cpu
upstream_on_cpu()
sys.path.insert(0, "benchmarks")
sys.argv[0] = "benchmarks/users_shapes.py"
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def run(*flags: str) -> str:
    return python("-c", SCRIPT, *flags, TORCHDYNAMO_DISABLE="1").stdout


@pytest.fixture
def shapes(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return __import__("lib.shapes", fromlist=["CELLS"])


@pytest.mark.skipif(torch.cuda.is_available(), reason="the CPU's smoke check")
def test_every_layer_of_a_cell_is_measured_and_held_to_megatron_core(tmp_path):
    out = tmp_path / "results.jsonl"
    said = run("--toy", "--cells", "1", "2", "6", "--out", str(out))
    records = [json.loads(line) for line in out.read_text().splitlines()]
    assert not [record for record in records if "failed" in record]
    layers = ["upstream", "ours", "floor", "ours-light", "ours-full"]
    assert [record["layer"] for record in records] == [*layers, *2 * [*layers, "ours-uncut"]]
    for record in records:
        if record["layer"].startswith("ours"):
            assert record["correct"] and record["eager"]["median"] > 0
        if record["layer"] in ("ours-light", "ours-full"):  # the plain rule keeps every bit
            assert set(record["from ours"].values()) == {0.0}
    saved = {record["layer"]: record["saved"] for record in records[:5] if "saved" in record}
    assert saved["ours"] > saved["ours-light"] > saved["ours-full"]
    assert "eager, beside megatron-core: 0." in said or "megatron-core: 1." in said


@pytest.mark.skipif(torch.cuda.is_available(), reason="the CPU's smoke check")
def test_a_layer_that_fails_does_not_end_the_run(tmp_path):
    """megatron-core's layer refuses packed documents with the stand-ins of a CPU."""
    out = tmp_path / "results.jsonl"
    run("--toy", "--cells", "10", "--out", str(out))
    records = [json.loads(line) for line in out.read_text().splitlines()]
    assert "failed" in records[0] and records[0]["layer"] == "upstream"
    assert all("failed" not in record for record in records[1:]) and len(records) == 5


def test_without_time_no_cell_begins():
    assert run("--toy", "--cells", "1", "--seconds", "1").count("not begun") == 1


def test_the_cells_have_every_shape_that_is_asked_for(shapes):
    cells = shapes.CELLS
    assert {cell.heads for cell in cells} == {(16, 32), (8, 32), (4, 8), (4, 12), (2, 4)}
    assert {cell.hidden for cell in cells} == {2048, 4096, 5120}
    assert {cell.batch for cell in cells} == set(shapes.BATCHES)
    assert {cell.linears for cell in cells} == {"te", "local"}
    assert len({cell.name for cell in cells}) == len(cells)
    for gates in ("fast", "slow"):
        assert {cell.batch for cell in cells if cell.gates == gates} == set(shapes.BATCHES)
    assert {goal.cell for goal in shapes.GOALS} <= set(cells[:4])


@pytest.mark.skipif(torch.cuda.is_available(), reason="the CPU's smoke check")
def test_cells_whose_kernels_are_not_compiled_are_left_out():
    said = run("--cells", "1", "--compile-seconds", "1")
    assert "not begun, its kernels are not compiled" in said and "not measured" in said
