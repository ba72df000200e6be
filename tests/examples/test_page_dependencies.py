"""The page of dependencies names what pyproject.toml names, with its extras, and nothing else."""

import re
import tomllib

import pytest

from tests.examples.launching import ROOT

PAGE = ROOT / "docs" / "dependencies.md"


def asked_for() -> set[tuple[str, str]]:
    """(package, extra) of every requirement; the extra of a plain one is "required"."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = {"required": project["dependencies"]}
    extras |= {f"[{name}]": asked for name, asked in project["optional-dependencies"].items()}
    return {
        (re.match(r"[\w-]+", requirement)[0], extra)
        for extra, requirements in extras.items()
        for requirement in requirements
        if not requirement.startswith(f"{project['name']}[")  # extras of our own
    }


def named_on(page: str) -> set[tuple[str, str]]:
    table = page.partition("\n## ")[0]
    rows = re.findall(r"^\| `([\w-]+)` \| ([^|]+) \|", table, flags=re.MULTILINE)
    return {(name, extra.strip("` ")) for name, extras in rows for extra in extras.split(",")}


def test_every_requirement_is_on_the_page_under_its_extras_and_no_other_is():
    assert named_on(PAGE.read_text()) == asked_for()


@pytest.mark.parametrize("change", ["| `furo` | `[docs]` |", "| `torch` | required |"])
def test_a_missing_row_would_be_seen(change):
    page = PAGE.read_text()
    assert named_on(page.replace(change, "| furo | |")) != named_on(page)
