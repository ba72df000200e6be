"""The command as a whole, short of compiling."""

import json
import shlex
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", minversion="3.6")

from megatron_gdn.gdn.flash_qla.builds import Heads
from megatron_gdn.warm_up import needs
from megatron_gdn.warm_up.__main__ import main
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


def test_what_is_there_is_left_alone_and_a_run_is_told_once_all_is(
    tmp_path, monkeypatch, capsys, hidden
):
    monkeypatch.setenv("TILELANG_CACHE_DIR", str(tmp_path))
    monkeypatch.delitem(sys.modules, "tilelang", raising=False)
    file, heads = tmp_path / "kernel", (Heads(16, 32, torch.float16), Heads(16, 32, torch.bfloat16))
    ready = [of.ready("cut", 132) for of in heads]

    def compile() -> bool:
        (tmp_path / "tries").open("a").write("1")
        if not (tmp_path / "nvcc").exists():
            raise RuntimeError("no nvcc")
        file.touch()
        return True

    kernel = Task("kernel", compile, found=file.exists)
    monkeypatch.setattr(needs, "tasks_of", lambda *of: [kernel, Task("Triton's", lambda: False)])
    command = ["--heads", "16:32", "--parts", "cut", "--operands", "fp16", "bf16"]
    assert main(command) == 1 and not any(path.exists() for path in ready)
    said = capsys.readouterr()
    assert "RuntimeError: no nvcc" in said.err and "1 of 2 failed" in said.out
    (tmp_path / "nvcc").touch()
    assert main(command) == 0 and all(path.exists() for path in ready)
    assert "2 of 2 are ready" in (said := capsys.readouterr().out) and "1 were compiled" in said
    assert main(command) == 0
    assert "1 of 2 are there" in (said := capsys.readouterr().out) and "all were there" in said
    assert (tmp_path / "tries").read_text() == "11"
