"""The command as a whole, short of compiling."""

import json
import shlex
from pathlib import Path

import pytest

pytest.importorskip("triton", minversion="3.6")

from megatron_gdn.warm_up import needs
from megatron_gdn.warm_up.command import main
from megatron_gdn.warm_up.tasks import Task
from tests.examples.commands import commands_of, pages
from tests.warm_up.test_needs import CONFIG, LAUNCH

ROOT = Path(__file__).parents[2]
COMMAND = "-m megatron_gdn.warm_up "


@pytest.fixture
def hidden(monkeypatch):
    """The command hides the GPUs of its process."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


def test_every_command_of_the_docs_lists_what_it_would_compile(
    tmp_path, monkeypatch, capsys, hidden
):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "launch.sh").write_text(LAUNCH)
    monkeypatch.chdir(tmp_path)
    commands = [c for c in commands_of(*pages(ROOT)) if COMMAND in c]
    assert len(set(commands)) >= 3
    for command in dict.fromkeys(commands):
        argv = shlex.split(command.partition(COMMAND)[2])
        assert main([*argv, "--kernels", "triton", "--dry-run"]) == 0
        assert "launches" in capsys.readouterr().out


def test_what_cannot_be_compiled_is_said_on_one_line(tmp_path, capsys, hidden):
    for argv, said in {
        "--heads 16:31": "multiple of num_key_heads=16",
        "--heads 16:32 --tp 3": "use one of 1, 2, 4, 8, 16",
        f"--config {tmp_path / 'no.json'}": "does not exist",
        "--heads 2:4 --head-dim 64": "head dims of 128, not 64 and 64",
        "--heads 1:3": "an even number of value heads",
    }.items():
        assert main(argv.split()) == 2
        error = capsys.readouterr().err
        assert error.startswith("error: ") and said in error and error.count("\n") == 1


def test_before_a_step_nothing_is_compiled_where_its_own_kernels_are_there(
    monkeypatch, capsys, hidden
):
    def tasks(soon_is_there: bool) -> list[Task]:
        return [
            Task("soon", lambda: True, found=lambda: soon_is_there, soon=True),
            Task("other", lambda: False, found=lambda: False),
            Task("Triton's", lambda: True, soon=True),
        ]

    def run(soon_is_there: bool) -> str:
        monkeypatch.setattr(needs, "tasks_of", lambda *of: tasks(soon_is_there))
        assert main(["--heads", "16:32", "--unless-first-part-is-there"]) == 0
        return capsys.readouterr().out

    assert "a first step takes are there" in run(True)
    assert "2 were compiled" in run(False)
