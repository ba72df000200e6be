"""The flags that `python -m megatron_gdn.models NAME --flags` prints, in a clone of Megatron-LM."""

import math
from pathlib import Path

import pytest

from megatron_gdn.models import find
from megatron_gdn.models.__main__ import launch_flags, parse
from tests.launches.launching import CLONE, in_a_clone, launched, losses

pytestmark = in_a_clone
# What the page says is still to be added: data, tokenizer, optimizer.
MORE = [
    *("--mock-data", "--tokenizer-type", "NullTokenizer", "--vocab-size", "1000"),
    *("--train-iters", "3", "--global-batch-size", "2", "--lr", "1e-3", "--log-interval", "1"),
    *("--eval-interval", "10", "--eval-iters", "1"),
]


@pytest.mark.parametrize("kind", ["hybrid", "gpt"])
def test_the_flags_of_a_model_train_it(kind):
    flags = launch_flags(find("tiny"), parse(f"tiny --model {kind} --length 64 --tp 2".split()))
    first, *_, last = losses(launched(f"pretrain_{kind}.py", 2, *flags, *MORE))
    assert last < first and first == pytest.approx(math.log(1000), abs=0.5)


@pytest.mark.parametrize("kind", ["hybrid", "gpt"])
def test_the_scripts_tell_megatron_the_lengths_of_packed_documents(kind):
    """As the table of docs/models.md says."""
    assert CLONE is not None
    script, loop = (
        (Path(CLONE) / name).read_text()
        for name in (f"pretrain_{kind}.py", "megatron/training/training.py")
    )
    by_scheduler = kind == "gpt" and "sequence_packing_scheduler" in loop
    assert "update_seqlen_stats_from_cu_seqlens(" in script or by_scheduler
