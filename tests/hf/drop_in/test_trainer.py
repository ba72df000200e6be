"""transformers' Trainer over context-parallel ranks, through torchrun."""

import math
import re

import pytest
import torch

from tests.hf.tiny_models import build
from tests.processes import python

pytest.importorskip("accelerate")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="runs on the CPU")


def torchrun(ranks: int, *words: str) -> str:
    start = "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"
    return python(*start, *words, timeout=400).stdout


@pytest.mark.parametrize(
    ("ranks", "replicas"),
    [pytest.param(2, 1, marks=pytest.mark.slow), pytest.param(4, 2, marks=pytest.mark.nightly)],
)
def test_losses_gradients_and_evaluation_are_those_of_a_plain_loop(ranks, replicas):
    """With accumulated batches; what would train on something else is refused."""
    said = torchrun(ranks, "-m", "tests.hf.drop_in.trainer_script", str(replicas))
    assert "the same as a plain loop" in said


@pytest.mark.nightly
def test_the_example_trains_and_saves_what_transformers_loads(tmp_path):
    said = torchrun(
        2, "examples/finetune_with_trainer.py", "--steps", "11", "--save", str(tmp_path)
    )
    first, last = (float(x) for x in re.findall(r"loss (\d+\.\d+)", said))
    assert first == pytest.approx(math.log(256), abs=0.2) and last < first - 1
    loaded = type(build("Qwen3_5ForCausalLM")).from_pretrained(tmp_path)
    assert loaded.model.layers[0].linear_attn.A_log.dtype == torch.float32
