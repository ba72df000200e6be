"""The script that runs compute-sanitizer reads what the tools print."""

import re
from pathlib import Path

import pytest

from tests.processes import ROOT, until

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
        (124, {}, "timed out"),
        (-9, {"passed": 2, "errors": 0}, "timed out"),
        (0, {"skipped": 2}, "skipped"),
        (5, {}, "no test"),
    ],
)
def test_only_a_tool_that_ended_and_found_nothing_is_ok(sanitize, status, row, state):
    assert sanitize.state_of(row, status, "memcheck") == state


def test_every_case_chooses_tests(sanitize):
    for name, (file, chosen) in sanitize.CASES.items():
        text = (ROOT / file).read_text()
        for word in re.findall(r"test_\w+", chosen):
            assert f"def {word}" in text, name


def test_a_command_that_takes_too_long_is_ended_with_all_that_it_started(
    sanitize, tmp_path
):
    log = tmp_path / "log"
    script = "sleep 100 & echo $!; wait"
    status = sanitize.run_logged(["bash", "-c", script], log, 1)
    assert status in sanitize.TIMED_OUT
    child = Path("/proc") / log.read_text().split()[0] / "stat"

    def is_over() -> bool:
        try:
            return "Z" in child.read_text()
        except OSError:
            return True

    until(is_over)  # a killed process may stand in the table for a moment
