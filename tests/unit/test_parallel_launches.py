"""What the benchmark of launches over several GPUs says of its records."""

import json

import pytest

from tests.launches import record
from tests.processes import ROOT


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return __import__("launch_laws")


def cases_of(script):
    return {name: case for wave in script.WAVES[4] for name, case in wave.items()}


def records_of(script, **losses):
    return {
        name: {
            "case": name,
            "layer": "",
            "gpus": 4,
            "losses": {4: 8.0, 5: 4.0, 6: value},
        }
        for name, value in losses.items()
    }


def test_a_launch_may_be_twice_as_far_as_megatrons_own_layer_is(script):
    records = records_of(script, dense=2.0, upstream=2.0, tp4=2.03, dp4=2.05)
    records |= records_of(script, **{"upstream-tp4": 1.98})
    assert script.hold(records, cases_of(script)) == [
        "dp4: 0.02499999999999991 from dense, 2.0e-02 allowed"
    ]
    assert records["tp4"]["distance"] == pytest.approx(0.015)
    assert records["tp4"]["spread"] == pytest.approx(0.01)


def test_a_launch_that_changes_the_layer_may_be_twice_as_far_as_the_layers_are(script):
    one_gpu = {"dense": 2.0, "upstream": 2.04, "upstream-tp4": 2.05, "tp2-cp2": 2.0}
    records = records_of(script, **one_gpu, **{"tp2-cp2 to upstream": 2.07})
    assert script.hold(records, cases_of(script)) == []
    records |= records_of(script, **{"tp2-cp2 to upstream": 2.09})
    (said,) = script.hold(records, cases_of(script))
    assert said.startswith("tp2-cp2 to upstream: 0.044")


def test_equal_bits_are_asked_of_the_deterministic_launch(script):
    records = records_of(script, dense=2.0, upstream=2.0, deterministic=2.0)
    records |= records_of(
        script, **{"upstream-tp4": 1.0, "deterministic again": 2.000001}
    )
    (said,) = script.hold(records, cases_of(script))
    assert said.startswith("deterministic again") and said.endswith("0.0e+00 allowed")


def test_a_launch_that_failed_or_ended_early_is_named(script):
    records = records_of(script, dense=2.0, upstream=2.0, tp4=2.0, dp4=2.0)
    records |= records_of(script, **{"upstream-tp4": 1.98})
    records["tp4"]["failed"] = "killed after 120 s"
    del records["dp4"]["losses"][6]
    assert script.hold(records, cases_of(script)) == [
        "tp4: killed after 120 s",
        "dp4: None from dense, 2.0e-02 allowed",
    ]


def test_without_megatrons_own_layer_nothing_is_held(script):
    assert script.hold(records_of(script, dense=2.0, tp4=2.0), cases_of(script)) == [
        "no launch with Megatron's own layer to measure bf16's spread by"
    ]


def test_records_become_rows_of_the_table_of_launches(script, tmp_path, monkeypatch):
    monkeypatch.setattr(record, "RECORDS", tmp_path / "launches.jsonl")
    monkeypatch.setattr(record, "PAGE", tmp_path / "page.md")
    (tmp_path / "launches.jsonl").write_text("")
    (tmp_path / "page.md").write_text("<!-- launches -->\n<!-- end -->\n")
    setting = {
        "environment": {"torch": "2.11.0", "megatron-lm": "f8837c04ef"},
        "date": "a day",
    }
    setting["divide"] = 4
    lines = [
        {
            "case": "tp4",
            "gpus": 4,
            "flags": "--tp 4",
            "held_to": "dense",
            "distance": 0.0012,
        },
        {"case": "dense", "gpus": 1, "flags": ""},
        {
            "case": "kda-divided",
            "gpus": 4,
            "flags": "",
            "held_to": "kda",
            "failed": "died",
        },
    ]
    file = tmp_path / "gpus.jsonl"
    file.write_text("".join(json.dumps(line | setting) + "\n" for line in lines))
    assert script.table(file) == 0
    page = (tmp_path / "page.md").read_text()
    assert "| `--tp 4` | dp 4 | 1e-03 |" in page
    assert "| `pretrain_hybrid.py` | 1 | trains |" in page
    assert "| `megatron_gdn.launch pretrain_hybrid.py` | dp 4 | fails |" in page
    assert "\nRun: core_r0.19.0 at f8837c04ef." in page


def test_the_table_says_where_a_launch_went_on_from_and_what_it_is_held_to(script):
    cases = cases_of(script)

    def words(name):
        case = cases[name]
        held_to = script.held_to_of(name, case)
        start = script.start_in_words(case, cases)
        return start, script.held_to_in_words(case, held_to, cases)

    assert words("tp4") == ("", "one GPU")
    assert words("experts-upstream") == ("", "")
    assert words("deterministic again") == ("", "the same launch")
    assert words("killed, resumed") == (
        "--load, killed while it saved",
        "the run that saved",
    )
    saved_by = f"--load, saved by {script.DATA['ways']['4']['tp2-cp2']['flags']}"
    assert words("tp2-cp2 to upstream") == (saved_by, "the run that saved")
