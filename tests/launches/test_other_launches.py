"""Launches of a clone: a function for ``--spec``, the flags that models print, layers
in parts."""

import math
from pathlib import Path

import pytest

from megatron_gdn.models import find
from megatron_gdn.models.__main__ import launch_flags, parse
from tests.launches.launching import (
    CLONE,
    SMALL,
    held_out_losses,
    in_a_clone,
    launched,
    losses,
)
from tests.launches.record import recorded
from tests.launches.test_parallel_launches import DATA, GPT, MODELS, SIZES, SPECS

pytestmark = in_a_clone

FLAGS = f"""{SMALL}
    --spec megatron_gdn.specs gpt_block_spec --experimental-attention-variant gated_delta_net
    --linear-attention-freq 2 --num-layers 4 --vocab-size 256 --tokenizer-type NullTokenizer
    --mock-data --micro-batch-size 1 --global-batch-size 4 --train-iters 4 --lr 3e-3
    --lr-warmup-iters 1 --eval-iters 1 --eval-interval 4
"""


def test_each_virtual_pipeline_stage_gets_its_layers(tmp_path):
    flags = [
        *FLAGS.split(),
        "--use-distributed-optimizer",
        "--dist-ckpt-optim-fully-reshardable",
    ]
    saved = [*flags, f"--save={tmp_path}", "--save-interval=2"]
    one = losses(launched("pretrain_gpt.py", 1, *saved))
    assert one[-1] < one[0]
    stages = [
        "--pipeline-model-parallel-size=2",
        "--num-layers-per-virtual-pipeline-stage=1",
    ]
    start = [f"--load={tmp_path}", "--ckpt-step=2", "--no-load-rng"]
    two = losses(launched("pretrain_gpt.py", 2, *flags, *stages, *start))
    third, fourth = one[2:]
    # The second step that a launch logs is averaged with the first.
    assert two == pytest.approx([third, (third + fourth) / 2], rel=1e-5)


# What the page says is still to be added: data, tokenizer, optimizer.
MORE = [
    *("--mock-data", "--tokenizer-type", "NullTokenizer", "--vocab-size", "1000"),
    *(
        "--train-iters",
        "3",
        "--global-batch-size",
        "2",
        "--lr",
        "1e-3",
        "--log-interval",
        "1",
    ),
    *("--eval-interval", "10", "--eval-iters", "1"),
]


@pytest.mark.parametrize("kind", ["hybrid", "gpt"])
def test_the_flags_of_a_model_train_it(kind):
    flags = launch_flags(
        find("tiny"), parse(f"tiny --model {kind} --length 64 --tp 2".split())
    )
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


EXPERTS = f"{MODELS['gpt'][1]} --num-experts 4 --expert-model-parallel-size 2 --bf16"
OVERLAPPED = "--overlap-moe-expert-parallel-comm"


def trained(flags: str) -> list[float]:
    """Two processes of two micro-batches a step each."""
    every = f"{SPECS[GPT]} {SIZES} {EXPERTS} {DATA['']} {flags}"
    done = launched(GPT, 2, *every.split(), connections="32")
    return [*losses(done), *held_out_losses(done)]


def test_layers_in_parts_take_the_steps_of_whole_ones():
    with recorded(
        GPT, 2, f"{EXPERTS} {OVERLAPPED}", "the launch without the last flag"
    ) as result:
        result.equals(trained(OVERLAPPED), trained(""), rel=1e-6)
