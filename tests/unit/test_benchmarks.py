"""The benchmarks' scripts run, and the pages' figures and pictures are those of their
records."""

import json

import pytest
import torch

from tests.processes import ROOT, imported_python


@pytest.fixture
def script(monkeypatch):
    """``script(name)``: a script of the benchmarks as a module, with its folder on the
    path."""
    pytest.importorskip("matplotlib", reason="the pages' pictures are drawn with it")
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return __import__


def test_the_tables_of_the_pages_are_of_the_results(script):
    report = script("report")
    for page, tables in report.pages().items():
        assert report.filled(page.read_text(), tables) == page.read_text(), page.name


def test_every_launch_on_gpus_has_its_card(script):
    cards = script("cards")
    held = {file.name: file.read_text() for file in cards.CARDS.iterdir()}
    assert held == cards.cards()


def test_a_card_says_whether_a_reference_was_met(script):
    cards = script("cards")
    (record,) = (r for r in cards.read("launches_gpus.jsonl") if r["case"] == "pp2")
    for difference, verified in ((1e-6, True), (0.1, False)):
        loss = cards.yaml.safe_load(cards.card(record, "one GPU", difference))["loss"]
        assert loss["verified"] is verified
        assert loss["largest difference"] == difference
    assert "verified" not in cards.card(record, "none", None)


def test_the_picture_of_readme_shows_what_readme_says(script):
    rows = script("report").beside()
    shares = {group: [] for group in dict.fromkeys(row.group for row in rows)}
    for row in rows:
        shares[row.group].append(f"{row.ms[0] / row.ms[1]:.2f}")
    layer, parallel, model = shares.values()
    readme = (ROOT / "README.md").read_text()
    assert f"One GPU: {min(layer)} to {max(layer)} of megatron-core's time" in readme
    assert (
        "131072 tokens: {} of the time by head exchange, {} by state".format(*parallel)
        in readme
    )
    assert (
        "A whole model: {} of the step, and {} with packed documents".format(*model)
        in readme
    )


# megatron-core's layer runs on a CPU with stand-ins of fla's kernels.
SCRIPT = """
import runpy, sys
from tests.processes import ROOT
from tests.upstream import upstream_on_cpu
upstream_on_cpu()
sys.path.insert(0, str(ROOT / "benchmarks"))
sys.argv[0] = str(ROOT / "benchmarks/users_shapes.py")
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.fixture
def run(tmp_path):
    """``run(*flags)``: what the benchmark prints, and its records."""

    def said_and_recorded(*flags: str, name: str = "users_shapes"):
        script = tmp_path / "script.py"
        out = tmp_path / "results.jsonl"
        script.write_text(SCRIPT.replace("users_shapes", name))
        said = imported_python(script, *flags, "--out", out)
        lines = out.read_text().splitlines() if out.exists() else []
        return said, [json.loads(line) for line in lines]

    return said_and_recorded


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="the CPU's smoke check")
def test_every_layer_of_a_cell_is_measured_and_held_to_megatron_core(run):
    said, records = run("--toy", "--cells", "1", "2", "6")
    assert not [record for record in records if "failed" in record]
    layers = ["upstream", "ours", "floor", "ours-light", "ours-full"]
    assert [record["layer"] for record in records] == [
        *layers,
        *2 * [*layers, "ours-uncut"],
    ]
    for record in records:
        if record["layer"].startswith("ours"):
            assert record["correct"] and record["eager"]["median"] > 0
        # the plain rule keeps every bit
        if record["layer"] in ("ours-light", "ours-full"):
            assert set(record["from ours"].values()) == {0.0}
    saved = {
        record["layer"]: record["saved"] for record in records[:5] if "saved" in record
    }
    assert saved["ours"] > saved["ours-light"] > saved["ours-full"]
    theirs, ours = (record["eager"]["median"] for record in records[:2])
    assert f"eager, beside megatron-core: {ours / theirs:.3f} (at most 0.5) " in said


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="the CPU's smoke check")
def test_a_layer_that_fails_does_not_end_the_run(run):
    """megatron-core's layer refuses packed documents with the stand-ins of a CPU."""
    _, records = run("--toy", "--cells", "10")
    assert "failed" in records[0] and records[0]["layer"] == "upstream"
    assert all("failed" not in record for record in records[1:]) and len(records) == 5


def test_without_time_no_cell_begins(run):
    assert run("--toy", "--cells", "1", "--seconds", "1")[0].count("not begun") == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="the CPU's smoke check")
def test_cells_whose_kernels_are_not_compiled_are_left_out(run):
    said, _ = run("--cells", "1", "--compile-seconds", "1")
    assert "not begun, its kernels are not compiled" in said and "not measured" in said


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="the CPU's smoke check")
@pytest.mark.parametrize(("name", "records"), [("bench_gdn2", 2), ("bench_gdp", 6)])
def test_other_delta_layers_are_timed(run, name, records):
    """Batches and documents; of a Gated DeltaProduct for two numbers of updates, and
    each stage."""
    _, written = run("--tiny", name=name)
    assert len(written) == records


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="the CPU's smoke check")
def test_every_stage_of_kimi_delta_attention_is_timed(run):
    _, records = run("--tiny", "--lower-bound", "-5", name="bench_kda")
    layers = {"ours", "ours, full gates"}
    cases = ["2x96", "thd160"]
    assert [record["case"] for record in records] == 2 * cases
    of_cases, of_stages = records[:2], records[2:]
    assert all(record[layer]["both"] for record in of_cases for layer in layers)
    for record in of_stages:
        assert record["stages"].keys() == layers
        for times in record["stages"].values():
            stages = {"in_proj", "beta_proj", "out_proj", "rule", "the layer"}
            assert stages < times.keys()
            assert all(forward >= 0 for forward, _ in times.values())
