"""The benchmark of launches runs in a clone of Megatron-LM, tiny, on a CPU."""

import json
import os
import subprocess
import sys

import pytest

from tests.examples.launching import ROOT
from tests.launches.launching import CLONE, in_a_clone

pytestmark = in_a_clone


def test_losses_go_on_after_a_kill(tmp_path):
    """And both layers train with documents packed."""
    done = subprocess.run(
        [
            str(ROOT / "benchmarks" / "launches.sh"),
            str(CLONE),
            "--toy",
            "--out",
            str(tmp_path),
            "--rows",
            "resumed",
            "packed",
        ],
        env=os.environ | {"PYTHON": sys.executable},
        capture_output=True,
        text=True,
        timeout=550,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    records = map(json.loads, (tmp_path / "launches.jsonl").read_text().splitlines())
    _, resumed, ours, upstream = records
    assert resumed["first_step"] == 11 and resumed["steps_in_both"] >= 5
    assert resumed["furthest"] < 1e-6
    assert ours["losses"]["30"] == pytest.approx(upstream["losses"]["30"], rel=0.05)
    assert "inter-document-masking` | ours | " in done.stdout
