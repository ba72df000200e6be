"""What the laws of launches over several GPUs say of their records."""

import json

import pytest

from tests.launches import divided_launches as laws
from tests.launches import record

CASES = laws.CASES[4]


def records_of(**losses):
    return {
        name: {
            "case": name,
            "layer": "",
            "gpus": 4,
            "losses": {4: 8.0, 5: 4.0, 6: value},
        }
        for name, value in losses.items()
    }


def test_a_launch_may_be_twice_as_far_as_megatrons_own_layer_is():
    records = records_of(dense=2.0, upstream=2.0, tp4=2.03, dp4=2.05)
    records |= records_of(**{"upstream-tp4": 1.98})
    assert laws.hold(records, CASES) == [
        "dp4: 0.02499999999999991 from dense, 2.0e-02 allowed"
    ]
    assert records["tp4"]["distance"] == pytest.approx(0.015)
    assert records["tp4"]["spread"] == pytest.approx(0.01)


def test_a_launch_that_changes_the_layer_may_be_twice_as_far_as_the_layers_are():
    one_gpu = {"dense": 2.0, "upstream": 2.04, "upstream-tp4": 2.05, "tp2-cp2": 2.0}
    records = records_of(**one_gpu, **{"tp2-cp2 to upstream": 2.07})
    assert laws.hold(records, CASES) == []
    records |= records_of(**{"tp2-cp2 to upstream": 2.09})
    (said,) = laws.hold(records, CASES)
    assert said.startswith("tp2-cp2 to upstream: 0.044")


def test_equal_bits_are_asked_of_the_deterministic_launch():
    records = records_of(dense=2.0, upstream=2.0, deterministic=2.0)
    others = {"upstream-tp4": 1.0, "deterministic again": 2.000001}
    records |= records_of(**others)
    (said,) = laws.hold(records, CASES)
    assert said.startswith("deterministic again") and said.endswith("0.0e+00 allowed")


def test_a_launch_that_failed_or_ended_early_is_named():
    records = records_of(dense=2.0, upstream=2.0, tp4=2.0, dp4=2.0)
    records |= records_of(**{"upstream-tp4": 1.98})
    records["tp4"]["failed"] = "killed after 120 s"
    del records["dp4"]["losses"][6]
    assert laws.hold(records, CASES) == [
        "tp4: killed after 120 s",
        "dp4: None from dense, 2.0e-02 allowed",
    ]


def test_without_megatrons_own_layer_nothing_is_held():
    assert laws.hold(records_of(dense=2.0, tp4=2.0), CASES) == [
        "no launch with Megatron's own layer to measure bf16's spread by"
    ]


def test_records_become_rows_of_the_table_of_launches(tmp_path, monkeypatch):
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
    assert laws.table(file) == 0
    page = (tmp_path / "page.md").read_text()
    assert "| `--tp 4` | dp 4 | 1e-03 |" in page
    assert "| `pretrain_hybrid.py` | 1 | trains |" in page
    assert "| `megatron_gdn.launch pretrain_hybrid.py` | dp 4 | fails |" in page
    assert "\nRun: core_r0.19.0 at f8837c04ef." in page


def test_the_table_says_where_a_launch_went_on_from_and_what_it_is_held_to():
    def words(name):
        case = CASES[name]
        held_to = laws.held_to_of(name, case)
        start = laws.start_in_words(case, CASES)
        return start, laws.held_to_in_words(case, held_to, CASES)

    assert words("tp4") == ("", "one GPU")
    assert words("experts-upstream") == ("", "")
    assert words("deterministic again") == ("", "the same launch")
    assert words("killed, resumed") == (
        "--load, killed while it saved",
        "the run that saved",
    )
    saved_by = f"--load, saved by {laws.DATA['ways']['4']['tp2-cp2']['flags']}"
    assert words("tp2-cp2 to upstream") == (saved_by, "the run that saved")
