"""The documentation site: `make docs` builds it in docs/_build. A warning is an error
there."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from megatron_gdn import __version__  # noqa: E402

project = html_title = "megatron_gdn"
author = "the megatron_gdn developers"
version = release = __version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
]
exclude_patterns = ["_build", "index_page.md"]
html_theme = "furo"
html_static_path, html_css_files = ["_static"], ["site.css"]
html_show_sourcelink = html_show_copyright = False

myst_heading_anchors = 3  # pages link to headings, as they do on GitHub

autodoc_default_options = {"members": True, "member-order": "bysource"}
autodoc_typehints_format = "short"
python_maximum_signature_line_length = 88
napoleon_use_ivar = True
default_role = "code"


def _keep_lines(app, what, name, obj, options, lines: list[str]) -> None:
    """An indented block after a line that ends in a colon, and a blank one, is kept as
    it is.

    Docstrings have equations and examples there. In a module's docstring, which has no
    sections of arguments, every indented block is kept.
    """
    for i in reversed(range(len(lines) - 2)):
        line, blank, block = lines[i : i + 3]
        indent = len(line) - len(line.lstrip())
        if (
            not line.strip()
            or blank.strip()
            or not block.startswith(" " * (indent + 1))
        ):
            continue
        if line.endswith(":") and not line.endswith("::"):
            lines[i] = f"{line}:"
        elif what == "module" and not indent:
            lines[i + 1 : i + 2] = ["", ".. code-block:: text", ""]


def _skip_places(app, what, name, obj, skip, options) -> bool | None:
    """Leave out what Python writes of a tuple's field; the class describes its
    fields."""
    return (
        True
        if (getattr(obj, "__doc__", "") or "").startswith("Alias for field")
        else None
    )


def setup(app) -> None:
    # before napoleon
    app.connect("autodoc-process-docstring", _keep_lines, priority=100)
    app.connect("autodoc-skip-member", _skip_places)
