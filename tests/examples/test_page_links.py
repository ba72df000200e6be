"""Links of every page lead to files and headings that exist, also where GitHub shows the page."""

import re
from pathlib import Path

import pytest

from tests.examples.commands import pages, tokens_of
from tests.examples.launching import ROOT

PAGES = [*pages(ROOT), ROOT / "CHANGELOG.md"]
MADE = ("docs/_build",)
FOLDERS = ("megatron_gdn", "specs", "examples", "benchmarks", "tests", "docs")


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and MyST make them."""
    tokens = list(tokens_of(page))
    headings = [tokens[i + 1].content for i, t in enumerate(tokens) if t.type == "heading_open"]
    return {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}


def broken(page: Path) -> list[str]:
    found = []
    for token in tokens_of(page):
        link = token.attrs.get("href", token.attrs.get("src", ""))
        if not link or "://" in link:
            continue
        name, _, heading = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        if not target.exists() or (heading and heading not in anchors(target)):
            found.append(link)
    return found


def absent(page: Path) -> list[str]:
    """The files that a page names from the root of the repository, and that are not there."""
    spans = [t.content.partition("::")[0] for t in tokens_of(page) if t.type == "code_inline"]
    names = [s for s in spans if s.startswith(FOLDERS) and re.fullmatch(r"[\w/.]+/[\w.]*", s)]
    return [name for name in names if not (ROOT / name).exists() and name not in MADE]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    assert broken(page) == []


@pytest.mark.parametrize("page", pages(ROOT), ids=lambda page: str(page.relative_to(ROOT)))
def test_files_that_a_page_names_exist(page):
    assert absent(page) == []


def test_a_broken_link_would_be_seen(tmp_path):
    (tmp_path / "page.md").write_text(
        "# A page\n[a](#a-page) [b](#b) [c](other.md) ![d](x.png)\n\n| [e](no.md#f) |\n|-|\n"
        "`tests/ranks.py` `tests/no.py` `megatron_gdn.ops`\n"
    )
    assert broken(tmp_path / "page.md") == ["#b", "other.md", "x.png", "no.md#f"]
    assert absent(tmp_path / "page.md") == ["tests/no.py"]


def test_readme_has_a_link_to_every_page_but_those_of_the_api():
    text = (ROOT / "README.md").read_text()
    # README leads to what these include.
    included = {"index.md", "contributing.md", "changelog.md", "performance.md", "tests.md"}
    docs = [page.name for page in (ROOT / "docs").glob("*.md")]
    assert [name for name in docs if f"docs/{name}" not in text and name not in included] == []


def test_the_page_of_the_tests_names_every_folder():
    tests = ROOT / "tests"
    folders = {path.parent.relative_to(tests).parts[0] for path in tests.glob("*/**/test_*.py")}
    rows = {t.content for t in tokens_of(tests / "README.md") if t.type == "code_inline"}
    assert {f"{folder}/" for folder in folders} <= rows
