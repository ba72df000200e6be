"""What the commands say before any of them does its work."""

import json
import os
import re
import subprocess
import sys
from importlib import import_module
from unittest.mock import patch

import pytest

from megatron_gdn import __version__
from megatron_gdn.__main__ import COMMANDS
from tests.processes import ROOT, python

# A torch that cannot be imported.
WITHOUT_TORCH = """
import runpy, sys
sys.modules["torch"] = None
sys.argv = sys.argv[1:]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""

WITHOUT_TORCH_A_SCRIPT = """
import os, runpy, sys
sys.modules["torch"] = None
sys.argv = sys.argv[1:]
sys.path.insert(0, os.path.dirname(os.path.abspath(sys.argv[0])))
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def command(*arguments: str, ends: int = 0) -> subprocess.CompletedProcess:
    return python("-c", WITHOUT_TORCH, *arguments, ends=ends)


def test_the_package_lists_its_commands():
    said = command("megatron_gdn").stdout
    assert list(COMMANDS) == ["doctor", "launch", "warm_up", "models", "hf"]
    for name, about in COMMANDS.items():
        assert f"python -m megatron_gdn.{name} " in said and about in said
    error = command("megatron_gdn", "doctr", ends=2).stderr
    assert "did you mean doctor?" in error and error.count("\n") == 1
    assert (
        command("megatron_gdn", "--version").stdout == f"megatron-gdn {__version__}\n"
    )


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_may_follow_a_space(name):
    by_dot = command(f"megatron_gdn.{name}", "--help").stdout
    assert command("megatron_gdn", name, "--help").stdout == by_dot


@pytest.mark.parametrize("name", COMMANDS)
def test_help_is_printed_without_torch_and_without_markup(name):
    done = command(f"megatron_gdn.{name}", "--help")
    assert done.stdout.startswith("usage: python -m megatron_gdn") and not done.stderr
    assert "``" not in done.stdout and ":mod:" not in done.stdout


@pytest.mark.parametrize(
    ("given", "near"),
    [
        ("doctor --head 16:32", "--heads"),
        ("warm_up --heads 16:32 --operand bf16", "--operands"),
        ("warm_up --heads 16:32 --kernels tritn", "triton"),
        ("models tiny --flag", "--flags"),
        ("hf export a b --lik c", "--like"),
        ("hf flags a --modl gpt", "--model"),
        ("hf exprt a b", "export"),
        ("launch --hepl", "--help"),
    ],
)
def test_a_wrong_option_is_answered_with_the_nearest_in_one_line(given, near):
    name, *words = given.split()
    error = command(f"megatron_gdn.{name}", *words, ends=2).stderr
    assert error.startswith("error: ") and error.count("\n") == 1
    assert f"did you mean {near}?" in error


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("doctor --heads 1:", "KEY:VALUE, such as 16:32; .* are at most 16384"),
        ("doctor --head-dim ", "a whole number from 1 to 16384"),
        ("doctor --tokens ", "a whole number from 1 to 1048576"),
        ("warm_up --tp ", "a whole number from 1 to 1024"),
        ("warm_up --cp ", "a whole number from 1 to 1024"),
        ("warm_up --processes ", "a whole number from 1 to 4096"),
        ("warm_up --multiprocessors ", "a whole number from 1 to 1024"),
    ],
)
def test_the_largest_numbers_of_options_stay(given, said, capsys):
    largest = int(said.split()[-1])
    for number in (0, largest + 1):
        # The last option lets a command that takes the number do no work.
        name, *words = f"{given}{number} --no-work".split()
        with pytest.raises(SystemExit):
            import_module(f"megatron_gdn.{name}.__main__").main(words)
        error = capsys.readouterr().err
        assert re.search(rf" {words[1]} is not {said} \(see --help\)\n$", error), error


@pytest.mark.parametrize(
    ("name", "words", "fails"),
    [
        ("models.__main__", ["tiny"], "_figure_lines"),
        ("warm_up.__main__", ["--heads", "2:4"], "_compile"),
        ("launch", ["script.py"], "script_file"),
        ("launch", [__file__], "import_module"),
    ],
)
def test_an_error_that_no_input_explains_keeps_its_traceback(name, words, fails):
    command = import_module(f"megatron_gdn.{name}")
    with (
        patch.object(command, fails, side_effect=ZeroDivisionError),
        patch.object(sys, "argv", []),
        patch.object(sys, "path", ["", *sys.path]),
        patch.dict(os.environ),
        pytest.raises(ZeroDivisionError),
    ):
        command.main(words)


def test_an_option_that_help_does_not_show_is_not_suggested():
    error = command(
        "megatron_gdn.warm_up", "--heads", "16:32", "--dry-run", ends=2
    ).stderr
    assert error == "error: unrecognized arguments: --dry-run (see --help)\n"


WITHOUT_EXTRAS = """
import sys
sys.modules.update(dict.fromkeys(["safetensors", "transformers", "tqdm", "accelerate", "fla"]))
from megatron_gdn.__main__ import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize(
    "given", ["import a b", "export a b --like c", "compare a b", "flags a"]
)
def test_the_commands_of_hugging_face_name_what_to_install(given):
    error = python("-c", WITHOUT_EXTRAS, "hf", *given.split(), ends=2).stderr
    said = "error: this command needs safetensors, which is not installed: pip install "
    assert error.startswith(f"{said}'megatron-gdn[hf]'") and error.count("\n") == 1


def test_the_example_answers_a_wrong_flag_once_and_before_torch_is_loaded():
    script = (
        "examples/pretrain_hybrid.py",
        "--nproc-per-node",
        "2",
        "--trian-iters",
        "3",
    )
    done = python("-c", WITHOUT_TORCH_A_SCRIPT, *script, ends=2)
    said = (
        "pretrain_hybrid.py: error: unrecognized arguments: --trian-iters 3 (--help "
        "lists"
    )
    assert (
        done.stderr.startswith(said)
        and done.stderr.count("\n") == 1
        and not done.stdout
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [([], "give the script to run"), (["x" * 300], "File name too long: 'xxx")],
)
def test_launch_refuses_what_is_no_script(words, said, capsys):
    launch = import_module("megatron_gdn.launch")
    with pytest.raises(SystemExit) as end:
        sys.exit(launch.main(words))
    assert end.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and said in error and error.count("\n") == 1


def test_launch_names_a_script_that_is_not_there_in_one_sentence(tmp_path):
    launch = "-c", WITHOUT_TORCH, "megatron_gdn.launch", "nofile.py"
    done = python(*launch, ends=2, MEGATRON_LM=str(tmp_path))
    said = (
        f"error: no script 'nofile.py' in {ROOT} or {tmp_path}; give the path of a "
        "file, or `git"
    )
    assert done.stderr.startswith(said)
    assert done.stderr.count("\n") == 1 and ". " not in done.stderr and not done.stdout


@pytest.mark.slow
def test_flags_are_printed_one_a_line_without_upstreams_warnings():
    done = python("-m", "megatron_gdn.models", "tiny", "--flags")
    assert not done.stderr
    lines = done.stdout.splitlines()
    assert all(line.startswith("--") for line in lines) and len(lines) > 20
    assert all(line.endswith(" \\") for line in lines[:-1])
    echo = "import json, sys; print(json.dumps(sys.argv[1:]))"
    pasted = f"{sys.executable} -c '{echo}' {done.stdout}"
    words = json.loads(
        subprocess.run(pasted, shell=True, capture_output=True, text=True).stdout
    )
    command = import_module("megatron_gdn.models.__main__")
    model = import_module("megatron_gdn.models").find("tiny")
    assert words == command.launch_flags(model, command.parse(["tiny"]))
