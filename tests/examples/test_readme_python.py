"""README's Python runs as printed: each block from an empty file, in an empty folder.

All that is filled in are the folders of weights that a reader has. A block that goes on with the
model of "In a Megatron model" says so and is pasted below it.
"""

import os
import subprocess
import sys

import pytest

from megatron_gdn.hf import compare_folders
from tests.examples.commands import blocks_of
from tests.examples.launching import ROOT

README = ROOT / "README.md"
MODEL = "model = HybridModel("
# Block -> a line of it. Every block of the page has one.
BLOCKS = {
    "a spec": "module=GatedDeltaNet,",
    "a model": MODEL,
    "generation": "tokens = generate(model",
    "weights": "load_hf_weights(model",
    "transformers": "patch(model)",
}


def block(name: str) -> str:
    (found,) = (code for code in blocks_of(README, "python") if BLOCKS[name] in code)
    return found


def run(code: str, folder) -> str:
    """What a fresh process prints that runs ``code`` from a file of its own."""
    (folder / "pasted.py").write_text(code)
    done = subprocess.run(
        [sys.executable, "pasted.py"],
        cwd=folder, env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def hf_folder(tmp_path_factory):
    from tests.hf.tiny_models import as_published, build

    folder = tmp_path_factory.mktemp("qwen")
    as_published(build("Qwen3_5ForCausalLM"), folder)
    return folder


def test_every_block_is_run_here():
    assert len(blocks_of(README, "python")) == len(BLOCKS)
    assert len({block(name) for name in BLOCKS}) == len(BLOCKS)


def test_the_model_trains_and_generates(tmp_path):
    printed = run(block("a spec") + block("a model") + block("generation"), tmp_path)
    loss, *checked = printed.splitlines()
    assert float(loss) == pytest.approx(5.5, abs=0.5) and checked
    # As a page says what a line prints, so it is.
    assert "print(loss.mean().item())  # about 5.5" in block("a model")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["a spec", "a model"])
def test_a_block_runs_alone(tmp_path, name):
    run(block(name), tmp_path)


def test_weights_make_the_way_there_and_back(tmp_path, hf_folder):
    folders = f"HF_FOLDER, NEW_FOLDER = {str(hf_folder)!r}, 'back'\n"
    check = "\nprint(config.hidden_dropout, config.attention_dropout)"
    assert run(folders + block("weights") + check, tmp_path).split() == ["0.0", "0.0"]
    assert list(compare_folders(hf_folder, tmp_path / "back")) == []


def test_a_patched_model_of_transformers_says_what_the_page_shows(tmp_path, hf_folder):
    printed = run(f"HF_FOLDER = {str(hf_folder)!r}\n" + block("transformers"), tmp_path)
    patched, leaks = printed.splitlines()
    shown = README.read_text()
    # The last digits of the largest output are the weights' own.
    assert patched in shown and leaks.partition(", largest output")[0] in shown
