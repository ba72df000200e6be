"""``pretrain_gpt.py`` of a clone builds our layers by a function that ``--spec`` names."""

import pytest

from tests.launches.launching import SMALL, in_a_clone, launched, losses

pytestmark = in_a_clone

FLAGS = f"""{SMALL}
    --spec megatron_gdn.specs gpt_block_spec --experimental-attention-variant gated_delta_net
    --linear-attention-freq 2 --num-layers 4 --vocab-size 256 --tokenizer-type NullTokenizer
    --mock-data --micro-batch-size 1 --global-batch-size 4 --train-iters 4 --lr 3e-3
    --lr-warmup-iters 1 --eval-iters 1 --eval-interval 4
"""


def test_each_virtual_pipeline_stage_gets_its_layers(tmp_path):
    flags = [*FLAGS.split(), "--use-distributed-optimizer", "--dist-ckpt-optim-fully-reshardable"]
    saved = [*flags, f"--save={tmp_path}", "--save-interval=2"]
    one = losses(launched("pretrain_gpt.py", 1, *saved))
    assert one[-1] < one[0]
    stages = ["--pipeline-model-parallel-size=2", "--num-layers-per-virtual-pipeline-stage=1"]
    start = [f"--load={tmp_path}", "--ckpt-step=2", "--no-load-rng"]
    two = losses(launched("pretrain_gpt.py", 2, *flags, *stages, *start))
    third, fourth = one[2:]
    # The second step that a launch logs is averaged with the first.
    assert two == pytest.approx([third, (third + fourth) / 2], rel=1e-5)
