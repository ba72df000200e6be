"""The examples, the benchmark and the picture of the drop-in run from their commands."""

import json
import math
import re

import pytest
import torch

from tests.hf.tiny_models import build
from tests.processes import python

on_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="runs on the CPU")


def torchrun(ranks: int, *words: str) -> str:
    pytest.importorskip("accelerate")
    start = "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"
    return python(*start, *words, timeout=400).stdout


@on_cpu
@pytest.mark.parametrize(
    ("ranks", "replicas"),
    [pytest.param(2, 1, marks=pytest.mark.slow), pytest.param(4, 2, marks=pytest.mark.nightly)],
)
def test_losses_gradients_and_evaluation_are_those_of_a_plain_loop(ranks, replicas):
    said = torchrun(ranks, "-m", "tests.hf.drop_in.trainer_script", str(replicas))
    assert "the same as a plain loop" in said


@on_cpu
@pytest.mark.nightly
def test_the_example_trains_and_saves_what_transformers_loads(tmp_path):
    said = torchrun(
        2, "examples/finetune_with_trainer.py", "--steps", "11", "--save", str(tmp_path)
    )
    first, last = (float(x) for x in re.findall(r"loss (\d+\.\d+)", said))
    assert first == pytest.approx(math.log(256), abs=0.2) and last < first - 1
    loaded = type(build("Qwen3_5ForCausalLM")).from_pretrained(tmp_path)
    assert loaded.model.layers[0].linear_attn.A_log.dtype == torch.float32


@pytest.mark.slow
@on_cpu
def test_the_benchmark_runs_tiny_on_the_cpu():
    said = python("benchmarks/bench_hf_dropin.py", "--tiny").stdout.splitlines()
    records = [json.loads(line) for line in said if line.startswith("{")]
    assert len(records) == 6
    patched = [record for record in records if record["layer"] != "transformers"]
    assert len(patched) == 4
    for record in patched:
        assert record["ms"]["median"] > 0
        # fp32 beside float64: the layer that was timed computes what it should.
        assert all(error < 1e-5 for error in record["error"].values()), record


@pytest.mark.slow
def test_the_picture_shows_the_leak_and_that_a_patched_model_has_none(tmp_path):
    image = tmp_path / "leaks.png"
    done = python("examples/show_leaks.py", image)
    assert done.stderr == ""
    found = dict(re.findall(r"(\w+): a document changes another by up to (\S+)", done.stdout))
    assert float(found["transformers"]) > 1e-2 and float(found["patched"]) == 0
    assert image.read_bytes().startswith(b"\x89PNG")
