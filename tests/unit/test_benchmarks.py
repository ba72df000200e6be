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
    assert f"by Megatron's script: {model[0]} of the step" in readme


# megatron-core's layer runs on a CPU with stand-ins of fla's kernels.
SCRIPT = """
import runpy, sys
from tests.processes import ROOT
from tests.upstream import upstream_on_cpu
upstream_on_cpu()
sys.path.insert(0, str(ROOT / "benchmarks"))
sys.argv[0] = str(ROOT / "benchmarks/run.py")
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
except SystemExit as end:
    assert not end.code, end.code
"""
on_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="the CPU's smoke check")


@pytest.fixture
def run(tmp_path):
    """``run(name, *flags)``: what the benchmark prints, and its records."""

    def said_and_recorded(*flags: str):
        script = tmp_path / "script.py"
        out = tmp_path / "results.jsonl"
        script.write_text(SCRIPT)
        said = imported_python(script, *flags, "--tiny", "--out", out)
        lines = out.read_text().splitlines() if out.exists() else []
        return said, [json.loads(line) for line in lines]

    return said_and_recorded


@pytest.mark.slow
@on_cpu
def test_every_layer_of_a_case_is_measured_and_held_to_megatron_core(run):
    cases = ["16/32 h2048 1x4096 te fast", "4/8 h4096 4x4096 te slow"]
    said, records = run("shapes", "--cases", *cases)
    assert not [record for record in records if "failed" in record]
    layers = ["upstream", "ours", "floor", "ours-light", "ours-full"]
    assert [record["layer"] for record in records] == 2 * layers
    for record in records:
        if record["layer"].startswith("ours"):
            assert record["correct"] and record["forward_backward"]["median"] > 0
        # the plain rule keeps every bit
        if record["layer"] in ("ours-light", "ours-full"):
            assert set(record["from ours"].values()) == {0.0}
    saved = {r["layer"]: r["saved"] for r in records[:5] if "saved" in r}
    assert saved["ours"] > saved["ours-light"] > saved["ours-full"]
    theirs, ours = (r["forward_backward"]["median"] for r in records[:2])
    assert f"{ours / theirs:.3f}" in said


@pytest.mark.slow
@on_cpu
def test_a_layer_that_fails_does_not_end_the_run(run):
    """megatron-core's layer refuses packed documents with the stand-ins of a CPU."""
    _, records = run("layer", "--cases", "thd32768")
    assert "failed" in records[0] and records[0]["layer"] == "upstream"
    assert all("failed" not in record for record in records[1:]) and len(records) == 5


def test_without_time_nothing_begins(run):
    said, records = run("layer", "--cases", "1x4096", "--seconds", "0")
    assert said.count("not begun") == 4 and not records


@pytest.mark.slow
@on_cpu
@pytest.mark.parametrize(
    ("name", "case", "layers"),
    [
        ("gdn2", "thd8192-16", ["ours", "ours, light"]),
        ("gdp", "1x8192 n4", ["ours", "ours, fla", "ours, light"]),
        ("kda", "thd8192-16", ["ours", "ours, full gates"]),
    ],
)
def test_layers_of_other_mixers_are_timed(run, name, case, layers):
    _, records = run(name, "--cases", case, "--layers", *layers)
    assert [record["layer"] for record in records] == layers
    for record in records:
        assert all(record[way]["median"] > 0 for way in ("forward", "forward_backward"))


@pytest.mark.slow
@on_cpu
def test_a_floor_has_the_projections_the_rule_and_the_bytes(run):
    _, records = run("mamba2", "--cases", "1x8192", "thd8192-16")
    floors = [record["floor"] for record in records if record["layer"] == "floor"]
    assert len(floors) == 2
    for floor in floors:
        parts = [floor[name] for name in ("projections", "rule", "bytes")]
        for total, *each in zip(floor["total"], *parts, strict=True):
            assert total == pytest.approx(sum(each)) and min(each) > 0


@pytest.mark.slow
@on_cpu
@pytest.mark.parametrize("name", ["fp8-errors", "mamba2-errors"])
def test_errors_against_fp64_are_those_of_bf16(run, name):
    """Every tensor is rounded to bf16 a few times, and not to less."""
    _, records = run(name)
    assert len(records) == {"fp8-errors": 2, "mamba2-errors": 4}[name]
    assert all(2**-11 < record["furthest"] < 2**-5 for record in records)


@pytest.fixture
def cases(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return __import__("lib.cases").cases


def test_a_case_is_what_its_name_says(cases):
    case = cases.parse("4/8 h4096 8x4096 te slow")
    assert (case.batch, case.tokens, case.offsets) == (8, 4096, None)
    assert (case.linears, case.gates) == ("te", "slow")
    assert case.sizes == {"heads": [4, 8], "hidden": 4096}
    assert cases.parse("thd100,63,1").offsets == [0, 100, 163, 164]
    assert cases.parse("thd8192x2048").lengths == (2048,) * 4
    assert cases.parse("thd8192x2048 n4", smaller=64).lengths == (32,) * 4
    assert len(cases.parse("thd32768").lengths) == 32
    for name in ("thd8192-16", "thd8192~512"):
        lengths = cases.parse(name, multiple=8).lengths
        assert sum(lengths) == 8192 and min(lengths) > 0 and len(set(lengths)) > 4
    with pytest.raises(SystemExit, match="'8by4' of the case '1x1 8by4'"):
        cases.parse("1x1 8by4")
    with pytest.raises(SystemExit, match="how many tokens"):
        cases.parse("te")


def test_every_row_of_the_registry_names_a_function_and_cases_that_are_read(
    script, cases
):
    for name, row in script("run").registry().items():
        module, function = row["run"].split(":")
        folder = ROOT if module.startswith("tests.") else ROOT / "benchmarks"
        source = (folder / f"{module.replace('.', '/')}.py").read_text()
        assert f"\ndef {function}(session: Session) -> None:" in source, name
        for case in row.get("cases", []):
            assert cases.parse(case).tokens, name


def test_what_runs_on_gpus_are_rows_with_tests_that_are_there(script):
    on_gpus = script("on_gpus")
    rows = script("run").registry()
    assert on_gpus.ROWS.keys() < rows.keys()
    for name in on_gpus.ROWS:
        for command in on_gpus.testing([name]).values():
            files = [word for word in command if word.startswith("tests/")]
            assert files and all((ROOT / file).exists() for file in files), name
        command = on_gpus.measuring(name, ROOT)
        asked = command[command.index("benchmarks/run.py") + 1 :]
        assert script("run").arguments(asked).name == name
    for command in on_gpus.compiling(["grid", "fp8"]).values():
        assert (ROOT / command[1]).exists() or command[2] == "megatron_gdn.warm_up"
