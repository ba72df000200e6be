"""The first things a reader runs: `make`, the quickstart, the command behind
docs/evidence.md."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch

from tests.processes import ROOT, imported_python, python


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="says what the CPU prints")
def test_the_quickstart_trains_one_layer_on_packed_documents():
    done = python("examples/quickstart.py")
    assert done.stderr == ""
    first, *gradients = done.stdout.splitlines()
    assert first == "backend reference, output (128, 1, 64), gradients:"
    names = [line.split()[0] for line in gradients]
    parts = ["in_proj", "conv1d", "out_norm", "out_proj"]
    assert names == ["dt_bias", "A_log", *(f"{part}.weight" for part in parts)]
    assert all(float(line.split()[-1]) > 0 for line in gradients)


@pytest.mark.slow
def test_a_policy_gradient_step_is_the_same_on_trees_and_packed_separately(tmp_path):
    """fp64: some hundred roundings of at most 1e-16, of gradients near 1."""
    script = shutil.copy(ROOT / "examples/grpo_on_trees.py", tmp_path)
    tokens, loss, gradients = imported_python(Path(script)).splitlines()
    assert Path(script).with_suffix(".err").read_text() == ""
    assert tokens == "as trees 495 tokens, packed separately 1416"
    assert float(loss.split()[-1]) < 1e-12
    assert float(gradients.split()[-1]) < 1e-12 and float(gradients.split()[5]) > 0.01


@pytest.mark.nightly
def test_the_three_layers_agree_at_the_start_and_the_picture_is_drawn(tmp_path):
    small = "--set", "steps=3", "rows=2", "tokens=48", "--out", tmp_path / "small"
    python("benchmarks/run.py", "loss-curves", *small, OMP_NUM_THREADS="1")
    record, *steps = map(
        json.loads, (tmp_path / "small.jsonl").read_text().splitlines()
    )
    assert [step["step"] for step in steps] == [1, 2, 3]
    assert set(record["parting"]) < set(steps[0])
    assert record["parting"].keys() > {"megatron-core", "transformers"}
    # A forward pass in fp32, and then two steps: far from what another equation would
    # give.
    for apart in record["parting"].values():
        assert apart["first"] < 1e-6
        assert apart["largest"] < 1e-5
    assert steps[2]["megatron_gdn"] < steps[0]["megatron_gdn"]
    assert (tmp_path / "small.png").read_bytes().startswith(b"\x89PNG")


def test_the_page_states_what_was_recorded():
    page = (ROOT / "docs" / "evidence.md").read_text()
    record, *steps = map(
        json.loads, (ROOT / "docs" / "evidence.jsonl").read_text().splitlines()
    )
    assert len(steps) == record["steps"]
    assert record["date"] in page
    for name, version in record["versions"].items():
        assert f"{name} {version}" in page
    for name, apart in record["parting"].items():
        numbers = [
            f"{apart[key]:.1e}" for key in ("first", "largest", "last tenth's mean")
        ]
        row = rf"\| {re.escape(name)} +\|" + r" \|".join(
            f" +{re.escape(n)}" for n in numbers
        )
        assert re.search(row, page), row
    assert f"{steps[-1]['megatron_gdn']:.3f}" in page
