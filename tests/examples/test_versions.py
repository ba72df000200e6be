"""The page of versions, and the bounds that pip reads, say what was run."""

import tomllib

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from megatron_gdn.compat.tested import TESTED_VERSIONS
from tests import versions
from tests.versions import (
    MEGATRON_LM,
    PAGE,
    ROOT,
    Row,
    filled,
    recorded,
    sentence,
    table,
)

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
ASKED = {
    one.name: one.specifier
    for text in PROJECT["dependencies"] + PROJECT["optional-dependencies"]["hf"]
    for one in [Requirement(text)]
}
RUN = {
    line["row"]: line["result"]
    for line in recorded()
    if line["result"] != "not installed"
}
RELEASES = [tuple(row.split("==")) for row in RUN if row.partition("==")[0] in ASKED]


def test_the_table_of_the_page_is_of_the_record():
    assert filled(PAGE.read_text(), "versions", table(recorded())) == PAGE.read_text()


def test_readme_and_the_page_say_which_versions_were_tested():
    for page in (ROOT / "README.md", PAGE):
        assert filled(page.read_text(), "tested", sentence()) == page.read_text()


def versions_run(package: str) -> list[tuple[int, ...]]:
    """The first two numbers of every version of ``package`` that a green row had
    installed."""
    green = [
        line
        for line in recorded()
        if line["result"] == "green" and "commit" not in line
    ]
    return sorted(
        Version(line[package]).release[:2] for line in green if package in line
    )


@pytest.mark.parametrize(
    "package", ["python", "torch", "megatron-core", "transformers"]
)
def test_what_is_called_tested_begins_and_ends_with_green_rows(package):
    run = versions_run(package)
    ends = tuple(Version(end).release for end in TESTED_VERSIONS[package])
    assert ends == (run[0], run[-1])


@pytest.mark.parametrize("package", ["accelerate", "flash-linear-attention"])
def test_what_has_no_row_is_tested_in_its_pinned_version(package):
    pins = dict(
        line.split("==")
        for line in (ROOT / "constraints.txt").read_text().splitlines()[1:]
    )
    newest = Version(TESTED_VERSIONS[package].newest).release
    assert newest == Version(pins[package]).release[:2]


def test_the_classifiers_name_the_tested_pythons_and_what_an_index_page_sorts_by():
    classifiers = PROJECT["classifiers"]
    prefix = "Programming Language :: Python :: 3."
    named = [
        int(one.removeprefix(prefix)) for one in classifiers if one.startswith(prefix)
    ]
    oldest, newest = (Version(end).minor for end in TESTED_VERSIONS["python"])
    assert named == list(range(oldest, newest + 1))
    for kind in ("Development Status", "Operating System", "Topic"):
        assert any(one.startswith(f"{kind} :: ") for one in classifiers)
    assert PROJECT["authors"]


def test_every_tested_version_may_be_installed():
    extras = PROJECT["optional-dependencies"]
    asked = [
        *PROJECT["dependencies"],
        *extras["hf-train"],
        *extras["hf"],
        *extras["fla"],
    ]
    for text in [*asked, *extras["te"]]:
        requirement = Requirement(text)
        for end in TESTED_VERSIONS.get(requirement.name, ()):
            assert requirement.specifier.contains(f"{end}.9"), requirement


def test_the_row_newest_pins_nothing_and_runs_every_folder():
    row = Row.of("newest")
    assert row.requirement(None) == "" and versions.kept_pins(row) == []
    assert versions.TESTS[row.package] == ["tests"]
    pinned = versions.kept_pins(Row.of("python==3.13"))
    assert "transformers==5.23.0" in pinned


def test_a_row_that_was_not_run_is_in_the_table_as_such():
    names = {line["row"] for line in recorded()}
    for name in versions.ROWS:
        (line,) = (
            line for line in table(recorded()).splitlines() if f"| `{name}` " in line
        )
        assert ("not run" in line) == (name not in names)


@pytest.mark.parametrize(("package", "version"), RELEASES)
def test_pip_installs_what_is_green_and_refuses_what_is_red(package, version):
    green = RUN[f"{package}=={version}"] == "green"
    assert ASKED[package].contains(version) == green, f"{package} {ASKED[package]}"


@pytest.mark.parametrize("package", ["torch", "megatron-core", "transformers"])
def test_the_lower_bound_is_in_the_oldest_green_row(package):
    rows = [version for name, version in RELEASES if name == package]
    green = [Version(v) for v in rows if RUN[f"{package}=={v}"] == "green"]
    if not green:
        pytest.skip("no row of it is green yet")
    (lower,) = (s.version for s in ASKED[package] if s.operator == ">=")
    assert min(green).release[: len(Version(lower).release)] == Version(lower).release


def test_a_branch_is_taken_from_a_clone_or_fetched(tmp_path):
    row = Row.of("megatron-core@main")
    assert row.requirement(None) == f"megatron-core @ git+{MEGATRON_LM}@main"
    assert row.requirement(tmp_path) == f"megatron-core @ file://{tmp_path}/mlm-main"


@pytest.mark.parametrize("text", ["torch", "torch@main", "numpy==2.0", "torch>=2.7"])
def test_what_is_no_row_is_refused_before_anything_is_run(text):
    with pytest.raises(ValueError, match="give package==version with one of torch, "):
        Row.of(text)


@pytest.mark.parametrize(
    ("name", "result", "status"),
    [
        ("torch==2.8.0", "green", 0),
        ("torch==2.8.0", "red", 1),
        ("torch==2.8.0", "not installed", 1),
        ("torch==2.9.0", "red", 1),
        ("torch==2.7.0", "red", 0),
    ],
)
def test_the_command_fails_if_a_row_fails_that_is_not_known_to_be_red(
    monkeypatch, name, result, status
):
    """The weekly run of the workflow reads the status alone."""
    monkeypatch.setattr(versions, "run", lambda row, *_: {"row": row, "result": result})
    monkeypatch.setattr(versions, "record", lambda line: None)
    monkeypatch.setattr("sys.argv", ["versions.py", name])
    assert versions.main() == status
