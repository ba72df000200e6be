"""A random case that fails prints a script, which fails in the same way."""

import os
import re
import subprocess
import sys

import pytest

from tests import reproductions
from tests.processes import ROOT

FAILING = """
from enum import StrEnum

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

class Cut(StrEnum):
    ZIGZAG = "zigzag"

@settings(max_examples=50, derandomize=True, database=None)
@given(st.lists(st.integers(0, 9)), st.booleans())
def test_drawn(lengths, packed):
    assert sum(lengths) < 5, "drawn"

@settings(max_examples=50, derandomize=True, database=None)
@given(st.lists(st.integers(0, 9)), st.sampled_from(Cut))
def test_drawn_by_a_name(lengths, cut):
    assert sum(lengths) < 5, f"drawn, {cut.value}"

@settings(max_examples=50, derandomize=True, database=None)
@given(st.data())
def test_drawn_within(data):
    assert data.draw(st.integers(0, 9)) < 5, "drawn within"

@pytest.mark.parametrize("kind", ["a"])
@pytest.mark.parametrize("seed", [3, 4])
def test_seeds(seed, kind):
    assert seed != 4, f"seed {seed} of kind {kind}"

@pytest.mark.parametrize("seed", [7])
def test_with_a_fixture(seed, tmp_path):
    assert seed != 7, "with a fixture"

@pytest.mark.parametrize("number", [1])
def test_that_is_not_random(number):
    assert not number
"""


@pytest.fixture(scope="module")
def scripts(tmp_path_factory) -> tuple[list[str], dict]:
    """What a run of `FAILING` prints as scripts, and how to run Python beside it."""
    folder = tmp_path_factory.mktemp("failing")
    (folder / "test_failing.py").write_text(FAILING)
    paths = os.pathsep.join((str(folder), str(ROOT)))
    where = {"cwd": folder, "env": os.environ | {"PYTHONPATH": paths}}
    command = [sys.executable, "-m", "pytest", "-p", "tests.reproductions"]
    command += ["-c", os.devnull, "--rootdir", folder, "-p", "no:cacheprovider"]
    done = subprocess.run([*command, folder], capture_output=True, text=True, **where)
    found = re.findall(r"-+ this case alone -+\n(.*?)\n(?=[-_=]{9})", done.stdout, re.S)
    return found, where


@pytest.mark.slow  # in interpreters of their own
@pytest.mark.parametrize(
    ("place", "told"),
    [
        (0, "drawn"),
        (1, "drawn, zigzag"),
        (2, "drawn within"),
        (3, "seed 4 of kind a"),
        (4, "with a fixture"),
    ],
)
def test_a_failing_random_case_prints_a_script_of_itself(scripts, place, told):
    found, where = scripts
    assert len(found) == 5, "the last test is not random"
    script = found[place]
    assert script.count("\n") < 12
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, **where
    )
    assert done.returncode == 1
    assert told in done.stdout + done.stderr


def test_a_script_is_prepared_by_the_conftests_of_its_folders(monkeypatch):
    monkeypatch.setitem(sys.modules, "tests.examples.conftest", None)
    assert reproductions._prepared("tests.examples.test_resuming").splitlines() == [
        "import tests.conftest",
        "import tests.examples.conftest",
        "tests.conftest.pytest_pycollect_makemodule()",
    ]
