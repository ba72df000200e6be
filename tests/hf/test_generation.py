"""Imported models generate the tokens that transformers generates, each with its own cache."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_gdn.hf import read_hf_config
from tests.hf.generation_laws import continuations, mamba2_continuations

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("name", "kind"),
    [("next", "hybrid"), ("dense", "hybrid"), ("dense", "gpt")],
)
def test_greedy_tokens_are_those_of_transformers(pools, hf_folder, name, kind):
    ((ours, theirs, margin),) = pools(1).run(continuations, hf_folder(name), kind)
    assert margin > 1e-4, "two tokens are as likely; this model tells nothing"
    assert ours == theirs


def test_greedy_tokens_of_a_mamba2_model_are_those_of_transformers(pools):
    ((ours, theirs, margin),) = pools(1).run(mamba2_continuations)
    assert margin > 1e-4, "two tokens are as likely; this model tells nothing"
    assert ours == theirs


@pytest.mark.slow
def test_the_example_generates_from_a_folder(hf_folder):
    folder = hf_folder("dense")
    flags = ["--tokens", "5", "17", "3", "--count", "6"]
    done = subprocess.run(
        [sys.executable, "examples/generate.py", folder, *flags],
        cwd=ROOT,
        env=os.environ | {"TORCHDYNAMO_DISABLE": "1"},  # compiling takes most of its time
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    # No notes of absent packages; that MTP weights are not loaded is worth a line.
    (said,) = done.stderr.splitlines()
    assert "were not loaded" in said
    tokens, rate = done.stdout.splitlines()[-2:]
    numbers = [int(token) for token in tokens.split()]
    assert numbers[:3] == [5, 17, 3] and len(numbers) == 9
    assert all(0 <= number < read_hf_config(folder).vocab_size for number in numbers)
    assert rate.startswith("6 tokens at ")
