"""The figures of the pages are those of the records under ``benchmarks/results``."""

import pytest

from tests.processes import ROOT, python

pytest.importorskip("matplotlib", reason="the pages' pictures are drawn with it")


@pytest.fixture
def script(monkeypatch):
    """``script(name)``: a script of the benchmarks as a module, with its folder on the path."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return __import__


def test_the_tables_of_the_pages_are_of_the_results(script):
    report = script("report")
    for page, tables in report.pages().items():
        assert report.filled(page.read_text(), tables) == page.read_text(), page.name


def test_the_picture_of_readme_shows_what_readme_says(script):
    rows = script("report").beside()
    shares = {group: [] for group in dict.fromkeys(row.group for row in rows)}
    for row in rows:
        shares[row.group].append(f"{row.ms[0] / row.ms[1]:.2f}")
    layer, parallel, model = shares.values()
    readme = (ROOT / "README.md").read_text()
    assert f"One GPU: {min(layer)} to {max(layer)} of megatron-core's time" in readme
    assert "131072 tokens: {} of the time by head exchange, {} by state".format(*parallel) in readme
    assert "A whole model: {} of the step, and {} with packed documents".format(*model) in readme


def test_the_formula_gives_what_the_page_says(script):
    model = script("model_context_parallel")
    constants = model.Constants.measured()
    page = (ROOT / "docs" / "context_parallel.md").read_text()
    for record in model.read("context_parallel.jsonl"):
        of = {"headwise": model.headwise_ms, "chunkwise": model.chunkwise_ms}.get(record["layer"])
        if of is not None and record["case"].isdigit():
            formula = of(int(record["case"]) / record["cp"], record["cp"], constants)
            case = f"| {record['case']} | {record['cp']} | {record['layer']} |"
            (row,) = (line for line in page.splitlines() if line.startswith(case))
            assert f"| {formula:.2f} " in row and f"| {model.median(record):.2f} |" in row


@pytest.mark.slow
def test_rounding_is_simulated():
    assert "fp16" in python("benchmarks/rounding.py").stdout
