"""What an index shows of the package: its metadata and the page of the project."""

import shutil
import tomllib
from email import message_from_string

import pytest
from markdown_it import MarkdownIt

from tests.processes import ROOT, python

BUILD = (
    "import sys; from setuptools import build_meta; "
    "print(build_meta.prepare_metadata_for_build_wheel(sys.argv[1]))"
)


@pytest.fixture(scope="module")
def metadata(tmp_path_factory):
    """The METADATA of the wheel, built from the files that it is made of."""
    clone = tmp_path_factory.mktemp("clone")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for name in ("pyproject.toml", "LICENSE", project["readme"]):
        (clone / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, clone / name)
    (clone / "megatron_gdn").mkdir()
    (clone / "megatron_gdn/__init__.py").touch()
    built = tmp_path_factory.mktemp("built")
    folder = python("-c", BUILD, built, cwd=clone).stdout.split()[-1]
    return message_from_string((built / folder / "METADATA").read_text())


def links_of(text: str) -> list[str]:
    """Every address that a page in Markdown leads to or shows."""
    found = []
    for token in MarkdownIt("commonmark").enable("table").parse(text):
        for each in [token, *(token.children or ())]:
            found += [
                str(each.attrs[key]) for key in ("href", "src") if key in each.attrs
            ]
    return found


def test_the_page_of_an_index_has_no_link_into_the_repository(metadata):
    links = links_of(metadata.get_payload())
    assert links
    assert [link for link in links if "://" not in link] == []


def test_the_page_of_an_index_names_the_package_as_it_is_installed(metadata):
    assert f"pip install {metadata['Name']}\n" in metadata.get_payload()
    assert metadata["Description-Content-Type"] == "text/markdown"


def test_addresses_of_the_project_are_written_before_a_release(metadata):
    """The repository names none; the stanza says where its owner writes them."""
    urls = metadata.get_all("Project-URL", [])
    stanza = (ROOT / "pyproject.toml").read_text().count("# [project.urls]\n")
    assert bool(urls) != bool(stanza)
