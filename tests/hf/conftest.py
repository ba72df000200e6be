"""Folders of tiny models, each made once a session."""

from pathlib import Path

import pytest

from megatron_gdn.hf.__main__ import main
from tests.hf.tiny_models import FOLDERS, make_folder


@pytest.fixture(scope="session")
def hf_folder(tmp_path_factory):
    """``hf_folder(name)``: the folder of one of `FOLDERS`; do not write into it."""
    made = {}

    def make(name: str) -> Path:
        if name not in made:
            made[name] = tmp_path_factory.mktemp("hf") / name.replace(" ", "_")
            make_folder(name, made[name])
        return made[name]

    return make


@pytest.fixture
def refused(capsys):
    """``refused(*command)``: what the command line says of it."""

    def said(*command: object) -> str:
        assert main([*map(str, command)]) == 2
        return capsys.readouterr().err

    return said


@pytest.fixture(params=FOLDERS)
def any_folder(request, hf_folder):
    return hf_folder(request.param)
