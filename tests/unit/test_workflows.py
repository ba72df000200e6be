"""The workflows of the repository run commands that are documented, and only a tag
publishes."""

import json
import re
import shlex
import tomllib
from pathlib import Path

import pytest
import yaml

from megatron_gdn.__main__ import COMMANDS
from tests.examples.commands import blocks_of, lines_of
from tests.processes import ROOT

GITHUB = ROOT / ".github"
WORKFLOWS = sorted((GITHUB / "workflows").glob("*.yml"))
RELEASE = GITHUB / "workflows" / "release.yml"
PUBLISHING = re.compile(
    r"pypi-publish|twine upload|(uv|hatch|flit|poetry) publish|gh release"
)


def parsed(path: Path) -> dict:
    return yaml.safe_load(path.read_text())


def steps_of(workflow: dict) -> list[dict]:
    return [step for job in workflow["jobs"].values() for step in job["steps"]]


def commands_in(workflow: dict) -> list[str]:
    return [
        line for step in steps_of(workflow) for line in lines_of(step.get("run", ""))
    ]


def may_publish(job: dict) -> bool:
    """Does the job upload a distribution, or may it write anything at all?"""
    rights = job.get("permissions", {})
    writes = rights == "write-all" or "write" in dict(rights).values()
    return writes or PUBLISHING.search(str(job["steps"])) is not None


def triggers_of(workflow: dict) -> dict:
    return workflow[True]  # YAML 1.1 reads the key `on` so


def published_by_a_tag_alone(workflow: dict) -> bool:
    """Is a pushed tag the only event that starts the workflow?"""
    triggers = triggers_of(workflow)
    return set(triggers) == {"push"} and set(triggers["push"]) == {"tags"}


def test_there_are_two_workflows():
    assert [path.name for path in WORKFLOWS] == ["release.yml", "test.yml"]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_every_command_is_a_target_of_make_or_of_the_page_of_releases(path):
    makefile = (ROOT / "Makefile").read_text()
    (phony,) = re.findall(r"^\.PHONY: (.*)$", makefile, flags=re.MULTILINE)
    targets = phony.split()
    page = [
        line for b in blocks_of(ROOT / "docs/releasing.md") for line in lines_of(b.code)
    ]
    commands = commands_in(parsed(path))
    assert commands
    for command in commands:
        if not command.startswith("make "):
            assert command in page
            continue
        _, target, *settings = shlex.split(re.sub(r"\$\{\{.*?\}\}", "value", command))
        assert target in targets
        for setting in settings:
            assert f"$({setting.partition('=')[0]})" in makefile, command


def test_the_page_of_releases_has_the_commands_of_the_workflow_in_their_order():
    page = [
        line for b in blocks_of(ROOT / "docs/releasing.md") for line in lines_of(b.code)
    ]
    assert commands_in(parsed(RELEASE)) == page


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_a_workflow_reads_only_and_its_actions_have_exact_versions(path):
    workflow = parsed(path)
    assert workflow["permissions"] == {"contents": "read"}
    for step in steps_of(workflow):
        if "uses" in step:
            assert re.fullmatch(r"[\w-]+/[\w-]+@v\d+\.\d+\.\d+", step["uses"])


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_no_push_to_a_branch_starts_a_job_that_may_publish(path):
    workflow = parsed(path)
    publishing = [job for job in workflow["jobs"].values() if may_publish(job)]
    assert not publishing or published_by_a_tag_alone(workflow)


def test_what_is_published_was_checked_and_a_person_approves_it():
    jobs = parsed(RELEASE)["jobs"]
    (publish,) = [job for job in jobs.values() if may_publish(job)]
    assert publish["permissions"] == {"id-token": "write"}
    assert publish["environment"] == "pypi"
    assert publish["if"] == "startsWith(github.ref, 'refs/tags/v')"
    assert publish["needs"] == "check" and jobs["check"]["needs"] == "build"
    assert publish["steps"][-1]["with"]["attestations"] is True
    # A checkout would put the clone on the path of the wheel's check.
    checked = [step.get("uses", "") for step in jobs["check"]["steps"]]
    assert not any(action.startswith("actions/checkout@") for action in checked)


def test_the_versions_that_are_tested_are_the_green_rows_of_the_page():
    lines = (ROOT / "docs/versions.jsonl").read_text().splitlines()
    green = [row["row"] for row in map(json.loads, lines) if row["result"] == "green"]
    pinned = (ROOT / ".python-version").read_text().strip()
    wanted = {(pinned, "")}
    wanted |= {
        (row.partition("==")[2], "") for row in green if row.startswith("python==")
    }
    wanted |= {
        (pinned, row.partition("==")[2]) for row in green if row.startswith("torch==")
    }
    matrix = parsed(GITHUB / "workflows/test.yml")["jobs"]["test"]["strategy"][
        "matrix"
    ]["include"]
    assert {(row["python"], row["torch"]) for row in matrix} == wanted


def test_hooks_before_a_commit_are_the_quick_commands_of_make_lint():
    makefile = (ROOT / "Makefile").read_text()
    (lint,) = re.findall(r"^lint:.*\n((?:\t.*\n)+)", makefile, flags=re.MULTILINE)
    commands = lint.replace("$(BIN)", ".venv/bin").replace("\t", "").splitlines()
    (repository,) = parsed(ROOT / ".pre-commit-config.yaml")["repos"]
    hooks = [hook["entry"] for hook in repository["hooks"]]
    assert hooks == [c for c in commands if "ruff" in c] + ["codespell"]


def test_the_form_for_faults_asks_for_what_the_doctor_prints():
    fields = parsed(GITHUB / "ISSUE_TEMPLATE/bug.yml")["body"]
    (doctor,) = [field for field in fields if field.get("id") == "doctor"]
    assert "`python -m megatron_gdn doctor`" in doctor["attributes"]["label"]
    assert "doctor" in COMMANDS and doctor["validations"]["required"]


def test_the_citation_names_what_the_package_names():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    citation = parsed(ROOT / "CITATION.cff")
    assert citation["license"] == project["license"]
    assert citation["authors"] == project["authors"]
