"""The picture of the docs is drawn by its command."""

import re
import subprocess
import sys

import pytest

from tests.examples.launching import ROOT


@pytest.mark.slow
def test_the_picture_shows_the_leak_and_that_a_patched_model_has_none(tmp_path):
    image = tmp_path / "leaks.png"
    done = subprocess.run(
        [sys.executable, "examples/show_leaks.py", str(image)],
        cwd=ROOT, capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 0 and done.stderr == "", done.stderr
    found = dict(re.findall(r"(\w+): a document changes another by up to (\S+)", done.stdout))
    assert float(found["transformers"]) > 1e-2 and float(found["patched"]) == 0
    assert image.read_bytes().startswith(b"\x89PNG")
