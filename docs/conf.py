"""The documentation site: `make docs` builds it in docs/_build. A warning is an error there."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from megatron_gdn import __version__  # noqa: E402

project = html_title = "megatron_gdn"
author = "the megatron_gdn developers"
version = release = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_show_sourcelink = html_show_copyright = False

myst_heading_anchors = 3  # pages link to headings, as they do on GitHub

autodoc_default_options = {"members": True, "member-order": "bysource"}
autodoc_typehints_format = "short"
python_maximum_signature_line_length = 88
napoleon_use_ivar = True
default_role = "code"


def _keep_lines(app, what, name, obj, options, lines: list[str]) -> None:
    """An indented block after a line that ends in a colon, and a blank one, is kept as it is.

    Docstrings have equations and examples there.
    """
    for i in range(len(lines) - 2):
        line, blank, block = lines[i : i + 3]
        ends_in_colon = line.endswith(":") and not line.endswith("::")
        indent = len(line) - len(line.lstrip())
        if ends_in_colon and not blank.strip() and block.startswith(" " * (indent + 1)):
            lines[i] = f"{line}:"


def setup(app) -> None:
    app.connect("autodoc-process-docstring", _keep_lines, priority=100)  # before napoleon
