"""``pretrain_gpt.py`` of a clone builds our layers by a function that ``--spec`` names."""

import pytest

from tests.launches.launching import in_a_clone, launched, losses

pytestmark = in_a_clone

FLAGS = """
    --spec megatron_gdn.specs gpt_block_spec --experimental-attention-variant gated_delta_net
    --linear-attention-freq 2 --num-layers 4 --hidden-size 64 --ffn-hidden-size 96
    --num-attention-heads 4 --linear-num-key-heads 2 --linear-key-head-dim 16
    --linear-num-value-heads 4 --linear-value-head-dim 16 --linear-conv-kernel-dim 4
    --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear
    --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0
    --seq-length 64 --max-position-embeddings 64 --vocab-size 256 --tokenizer-type NullTokenizer
    --mock-data --micro-batch-size 1 --global-batch-size 4 --train-iters 4 --lr 3e-3
    --lr-warmup-iters 1 --eval-iters 1 --eval-interval 4 --log-interval 1 --num-workers 0
    --no-persist-layer-norm
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
