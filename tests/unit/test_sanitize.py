"""The script that runs compute-sanitizer reads what the tools print."""

import re

import pytest

from tests.processes import ROOT

MEMCHECK = """
========= Invalid __global__ read of size 4 bytes
=========     at front_forward_kernel+0x1a0 in kernels.py:12
=========     by thread (0,0,0) in block (0,0,0)
=========     at void at::native::copy<float>(float*)+0x20
========= ERROR SUMMARY: 3 errors
"""
RACECHECK = """
========= Error: Race reported between Write access at main_kernel+0x15 and Read access
========= RACECHECK SUMMARY: 2 hazards displayed (1 error, 1 warning)
"""
CLEAN = "========= ERROR SUMMARY: 0 errors\n"


@pytest.fixture
def sanitize(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import sanitize

    return sanitize


def test_errors_and_the_kernels_that_have_them_are_read(sanitize):
    assert sanitize.read_log(MEMCHECK) == {
        "errors": 3,
        "named": ["at::native::copy", "front_forward_kernel"],
    }
    assert sanitize.read_log(RACECHECK) == {
        "errors": 1,
        "warnings": 1,
        "named": ["main_kernel"],
    }
    assert sanitize.read_log(CLEAN) == {"errors": 0}


@pytest.mark.parametrize(
    ("status", "row", "state"),
    [
        (0, {"passed": 2, "errors": 0}, "ok"),
        (0, {"passed": 2}, "no summary"),
        (97, {"passed": 2, "errors": 1}, "errors"),
        (1, {"passed": 2, "failed": 1, "errors": 0}, "failed"),
        (None, {}, "timed out"),
        (0, {"skipped": 2}, "skipped"),
        (5, {}, "no test"),
    ],
)
def test_only_a_tool_that_ended_and_found_nothing_is_ok(sanitize, status, row, state):
    assert sanitize.state_of(row, status, "memcheck") == state


def test_every_case_chooses_tests_and_the_table_has_a_line_for_it(sanitize):
    rows = []
    for name, case in sanitize.CASES.items():
        text = (ROOT / case.file).read_text()
        for word in re.findall(r"test_\w+", case.chosen):
            assert f"def {word}" in text, name
        rows.append({"case": name, "tool": sanitize.ALONE, "state": "ok", "passed": 1})
    table = sanitize.table(rows, (sanitize.ALONE, *sanitize.TOOLS))
    for name in sanitize.CASES:
        assert f"| {name} | 1 | ok | not run |" in table
