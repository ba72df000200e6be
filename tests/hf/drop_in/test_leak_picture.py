"""The picture of the docs is drawn by its command."""

import re

import pytest

from tests.processes import python


@pytest.mark.slow
def test_the_picture_shows_the_leak_and_that_a_patched_model_has_none(tmp_path):
    image = tmp_path / "leaks.png"
    done = python("examples/show_leaks.py", image)
    assert done.stderr == ""
    found = dict(re.findall(r"(\w+): a document changes another by up to (\S+)", done.stdout))
    assert float(found["transformers"]) > 1e-2 and float(found["patched"]) == 0
    assert image.read_bytes().startswith(b"\x89PNG")
