"""docs/api.md says what the docstrings say."""

import runpy

from tests.examples.launching import ROOT


def test_the_api_page_is_made_of_the_docstrings_as_they_are():
    script = runpy.run_path(str(ROOT / "docs" / "make_api.py"))
    assert script["PAGE"].read_text() == script["page"](), "run: .venv/bin/python docs/make_api.py"
