"""Every block of the pages says what it is, and their links and dependencies are
there."""

import ast
import re
import tomllib
from pathlib import Path

import pytest

from benchmarks.lib.pages import filled
from tests.examples.commands import (
    Block,
    blocks_of,
    changed_lines,
    launches_of,
    lines_of,
    pages,
    tokens_of,
)
from tests.examples.launching import ROOT
from tests.examples.test_page_commands import RUN_BY
from tests.examples.test_page_python import BLOCKS, FRAMEWORKS
from tests.launches import record


def not_run(block: Block) -> str | None:
    """Why no test runs the block; None if one does, or if there is nothing to run."""
    match block.language:
        case "python" if block.page.parent == FRAMEWORKS:
            laws = ROOT / "tests/frameworks" / f"{block.page.stem}_laws.py"
            read = (
                laws.is_file()
                and f'page_lines("{block.page.stem}")' in laws.read_text()
            )
            return None if read else f"{laws.name} does not read the page"
        case "python":
            held = [line for line in BLOCKS.values() if line in block.code]
            return (
                None
                if len(held) == 1
                else "give it a row in BLOCKS of test_page_python.py"
            )
        case "bash":
            lines = lines_of(block.code)
            if lines[0].startswith("--spec"):
                return None
            missing = [line for line in lines if line not in RUN_BY]
            return (
                f"RUN_BY of test_page_commands.py lacks {missing}" if missing else None
            )
        case "text":
            if any(
                line in RUN_BY or line.startswith("$ ") for line in lines_of(block.code)
            ):
                return "it has commands: call it bash"
            return "it is Python: call it python" if is_python(block.code) else None
        case language if language and language.startswith("{"):
            return None
    return "say what it is after the fence: python, bash or text"


def is_python(code: str) -> bool:
    try:
        return bool(ast.parse(code).body)
    except SyntaxError:
        return False


def test_every_block_of_every_page_is_run_or_has_nothing_to_run():
    blocks = blocks_of(*pages(ROOT))
    assert len(blocks) > 50
    faults = [
        f"{b.page.relative_to(ROOT)}: {why}\n{b.code}"
        for b in blocks
        if (why := not_run(b))
    ]
    assert not faults, "\n".join(faults)


PAGES = [*pages(ROOT), ROOT / "CHANGELOG.md"]
MADE = ("docs/_build",)
FOLDERS = ("megatron_gdn", "specs", "examples", "benchmarks", "tests", "docs")


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and MyST make them."""
    tokens = list(tokens_of(page))
    headings = [
        tokens[i + 1].content for i, t in enumerate(tokens) if t.type == "heading_open"
    ]
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
    """The files that a page names from the root of the repository, and that are not
    there."""
    spans = [
        t.content.partition("::")[0] for t in tokens_of(page) if t.type == "code_inline"
    ]
    names = [
        s for s in spans if s.startswith(FOLDERS) and re.fullmatch(r"[\w/.]+/[\w.]*", s)
    ]
    return [name for name in names if not (ROOT / name).exists() and name not in MADE]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    assert broken(page) == []


@pytest.mark.parametrize(
    "page", pages(ROOT), ids=lambda page: str(page.relative_to(ROOT))
)
def test_files_that_a_page_names_exist(page):
    assert absent(page) == []


def names_in_code() -> set[str]:
    """Every name that the code of this repository defines, reads or passes."""
    found = set()
    for folder in ("megatron_gdn", "specs", "tests", "benchmarks", "examples"):
        for path in (ROOT / folder).rglob("*.py"):
            found.add(path.stem)
            for node in ast.walk(ast.parse(path.read_text())):
                for field in ("name", "id", "attr", "arg", "module"):
                    found.update(str(getattr(node, field, "")).split("."))
    return found


def test_names_of_code_that_a_contributor_reads_exist():
    """Functions and attributes in CONTRIBUTING.md, where a renamed one would stay."""
    rules = (ROOT / "CONTRIBUTING.md").read_text().partition("## Rules")[2]
    named = set()
    for text in re.findall(r"`([^`]+)`", rules):
        named.update(re.findall(r"\w+(?=\()", text))  # calls
        named.update(re.findall(r"^[a-z]+(?:_[a-z]+)*$", text))
    assert {"choose", "begin", "repeats", "why_not"} <= named
    assert named <= names_in_code(), named - names_in_code()


def test_readme_has_a_link_to_every_page_but_those_of_the_api():
    text = (ROOT / "README.md").read_text()
    # README leads to what these include.
    included = {
        "index.md",
        "index_page.md",
        "contributing.md",
        "changelog.md",
        "performance.md",
        "tests.md",
    }
    docs = [page.name for page in (ROOT / "docs").glob("*.md")]
    assert [
        name for name in docs if f"docs/{name}" not in text and name not in included
    ] == []


def test_the_first_screen_of_readme_names_no_page_twice():
    text = (ROOT / "README.md").read_text()
    screen = text.partition("<!-- first screen -->")[2]
    screen = screen.partition("<!-- end of first screen -->")[0]
    names = re.findall(r"\]\(([\w/]+\.md)", screen)
    assert names and len(set(names)) == len(names)


def test_pages_have_one_name_in_readme_in_the_site_and_as_their_heading():
    text = (ROOT / "README.md").read_text().partition("## Documentation")[2]
    for name, page in re.findall(r"\[([^]]+)\]\(([\w/]+\.md)\)", text):
        assert (ROOT / page).read_text().partition("\n")[0] == f"# {name}"


def test_the_page_of_the_tests_names_every_folder():
    tests = ROOT / "tests"
    folders = {
        path.parent.relative_to(tests).parts[0] for path in tests.glob("*/**/test_*.py")
    }
    rows = {
        t.content for t in tokens_of(tests / "README.md") if t.type == "code_inline"
    }
    assert {f"{folder}/" for folder in folders} <= rows


PAGE = ROOT / "docs" / "dependencies.md"


def asked_for() -> set[tuple[str, str]]:
    """(package, extra) of every requirement; the extra of a plain one is "required"."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = {"required": project["dependencies"]}
    extras |= {
        f"[{name}]": asked for name, asked in project["optional-dependencies"].items()
    }
    return {
        (re.match(r"[\w-]+", requirement)[0], extra)
        for extra, requirements in extras.items()
        for requirement in requirements
        if not requirement.startswith(f"{project['name']}[")  # extras of our own
    }


def named_on(page: str) -> set[tuple[str, str]]:
    table = page.partition("\n## ")[0]
    rows = re.findall(r"^\| `([\w-]+)` \| ([^|]+) \|", table, flags=re.MULTILINE)
    return {
        (name, extra.strip("` "))
        for name, extras in rows
        for extra in extras.split(",")
    }


def test_every_requirement_is_on_the_page_under_its_extras_and_no_other_is():
    assert named_on(PAGE.read_text()) == asked_for()


def test_the_lines_that_change_are_those_of_the_launches():
    hybrid, gpt = changed_lines(ROOT)
    for script, flags in (("pretrain_hybrid.py", hybrid), ("pretrain_gpt.py", gpt)):
        whole = launches_of(ROOT)[script]
        assert flags == whole[: len(flags)]


def test_the_table_of_launches_is_of_what_was_recorded():
    assert (
        filled(record.PAGE.read_text(), {"launches": record.table()})
        == record.PAGE.read_text()
    )


@pytest.mark.parametrize(
    ("launch", "processes", "model", "division"),
    [
        ("--hybrid-layer-pattern G-*-", "1", "G-*-", "1"),
        ("--hybrid-layer-pattern G-*-", "2", "G-*-", "dp 2"),
        (
            "--pipeline-model-parallel-size 2 --hybrid-layer-pattern G-|*-",
            "2",
            "G-*-",
            "pp 2",
        ),
        (
            "--num-experts 4 --bf16 --tensor-model-parallel-size 2 --sequence-parallel "
            "--context-parallel-size 2 , Megatron's own layer",
            "4",
            "--bf16 , Megatron's own layer",
            "tp 2 cp 2",
        ),
        ("as printed", "4", "as printed", "as printed"),
    ],
)
def test_a_launch_is_named_by_its_model_and_its_division(
    launch, processes, model, division
):
    assert record.Shortened.of(launch, processes) == (model, division)


def test_every_recorded_launch_ended_well():
    """A launch of a branch that the table has no column for would be left out in
    silence."""
    failed = [line for line in record.read() if line["result"] == "fails"]
    assert not failed
    assert {line["branch"] for line in record.read()} <= set(record.BRANCHES)
