"""Imported models generate the tokens that transformers generates, each with its own cache."""

import re
import runpy

import pytest

from megatron_gdn.hf import read_hf_config
from tests.hf.generation_laws import continuations, mamba2_continuations
from tests.processes import ROOT, python


@pytest.mark.parametrize(
    ("name", "kind"), [("next", "hybrid"), ("dense", "hybrid"), ("dense", "gpt")]
)
def test_greedy_tokens_are_those_of_transformers(pools, hf_folder, name, kind):
    ((ours, theirs, margin),) = pools(1).run(continuations, hf_folder(name), kind)
    assert margin > 1e-4, "two tokens are as likely; this model tells nothing"
    assert ours == theirs


def test_greedy_tokens_of_a_mamba2_model_are_those_of_transformers(pools):
    ((ours, theirs, margin),) = pools(1).run(mamba2_continuations)
    assert margin > 1e-4, "two tokens are as likely; this model tells nothing"
    assert ours == theirs


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--tokens", "999"], "token 999 is not of this model, whose 67 tokens are 0 to 66."),
        (["--tokens", "-1"], "token -1 is not of this model"),
        (["--text", "hello"], "--text needs a tokenizer, and .* has none; use --tokens."),
        (["--count", "0"], "--count 0: use 1 or more."),
        (["--cou", "5"], "unrecognized arguments: --cou 5"),
        (["--tokens", "1", "--text", "a"], "not allowed with argument --tokens"),
    ],
)
def test_the_example_refuses_in_a_line_before_it_builds_a_model(hf_folder, capsys, flags, words):
    example = runpy.run_path(str(ROOT / "examples/generate.py"))
    with pytest.raises(SystemExit) as stopped:
        example["arguments"]([str(hf_folder("dense")), *flags])
    last = capsys.readouterr().err.splitlines()[-1]
    assert stopped.value.code == 2
    assert last.startswith("generate.py: error: ") and re.search(words, last)


def test_the_example_names_a_folder_without_a_model(tmp_path, capsys):
    example = runpy.run_path(str(ROOT / "examples/generate.py"))
    with pytest.raises(SystemExit):
        example["arguments"]([str(tmp_path)])
    said = capsys.readouterr().err
    assert f"{tmp_path}/config.json does not exist" in said and said.count("\n") == 1


@pytest.mark.slow
def test_the_example_generates_from_a_folder(hf_folder):
    folder = hf_folder("dense")
    flags = ["--tokens", "5", "17", "3", "--count", "6"]
    # Compiling takes most of its time.
    done = python("examples/generate.py", folder, *flags, TORCHDYNAMO_DISABLE="1")
    # No notes of absent packages; that MTP weights are not loaded is worth a line.
    (said,) = done.stderr.splitlines()
    assert "were not loaded" in said
    tokens, rate = done.stdout.splitlines()[-2:]
    numbers = [int(token) for token in tokens.split()]
    assert numbers[:3] == [5, 17, 3] and len(numbers) == 9
    assert all(0 <= number < read_hf_config(folder).vocab_size for number in numbers)
    assert rate.startswith("6 tokens at ")
