"""``pretrain_hybrid.py`` of a Megatron-LM clone goes on from a checkpoint with another layer.

Megatron's own Gated DeltaNet and ours, mid-run and back, optimizer included, in every format.
"""

import subprocess

import pytest

from tests.launches.launching import in_a_clone, launched, losses

pytestmark = in_a_clone

SPEC = {
    "ours": "megatron_gdn.specs hybrid_stack_spec",
    "upstream": "tests.launches.upstream_layers hybrid_stack",
}
FLAGS = """
    --hybrid-layer-pattern G-*- --hidden-size 64 --ffn-hidden-size 96 --num-attention-heads 4
    --kv-channels 16 --linear-num-key-heads 2 --linear-key-head-dim 16 --linear-num-value-heads 4
    --linear-value-head-dim 16 --linear-conv-kernel-dim 4 --position-embedding-type none
    --normalization RMSNorm --swiglu --disable-bias-linear
    --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0
    --seq-length 64 --max-position-embeddings 64 --vocab-size 256 --tokenizer-type NullTokenizer
    --micro-batch-size 1 --global-batch-size 2 --train-iters 6 --lr 3e-4 --lr-decay-style constant
    --mock-data --eval-iters 0 --eval-interval 100 --log-interval 1 --num-workers 0
    --no-persist-layer-norm --bf16 --save-interval 100
"""
FULLY = "--use-distributed-optimizer --dist-ckpt-optim-fully-reshardable"
FORMATS = {
    "fully_reshardable": FULLY,
    "plain bf16": "",
    "torch, plain bf16": "--ckpt-format torch",
}
# bf16 keeps 8 bits: a loss of 5.5, a mean over 128 tokens of logits rounded to 2^-9 each.
ROUNDING = 2.0**-9


def trained(layer: str, until: int, flags: str) -> subprocess.CompletedProcess[str]:
    """Two data-parallel processes; they save and exit after step ``until``."""
    return launched(
        "pretrain_hybrid.py", 2, "--spec", *SPEC[layer].split(), *FLAGS.split(), *flags.split(),
        f"--exit-interval={until}",
    )  # fmt: skip


@pytest.mark.parametrize("kind", FORMATS)
def test_a_run_goes_on_with_our_layer_and_back_with_megatrons(tmp_path, kind):
    """Steps 1-2 upstream, 3-4 ours, 5-6 upstream: the losses of upstream's with the same stops.

    The same stops, since Megatron logs the second step after a load averaged with the first.
    """
    flags = FORMATS[kind]
    first, theirs, ours = (tmp_path / name for name in ("first", "theirs", "ours"))
    losses(trained("upstream", 2, f"{flags} --save {first}"))
    found, alone = (
        losses(trained(layer, 4, f"{flags} --load {first} --save {second}"))
        + losses(trained("upstream", 6, f"{flags} --load {second}"))
        for layer, second in (("ours", ours), ("upstream", theirs))
    )
    assert len(alone) == 4 and found == pytest.approx(alone, rel=ROUNDING)


@pytest.mark.parametrize("kind", ["dp_reshardable", "torch"])
def test_a_file_of_buffers_is_refused_with_the_flags_that_make_one_that_loads(tmp_path, kind):
    """Megatron's layer loads its own file and saves it again with these flags; ours goes on."""
    first, second = tmp_path / "1", tmp_path / "2"
    flags = f"--use-distributed-optimizer{' --ckpt-format torch' if kind == 'torch' else ''}"
    losses(trained("upstream", 2, f"{flags} --save {first}"))
    refused = trained("ours", 4, f"{flags} --load {first}")
    assert refused.returncode != 0
    again = "--ckpt-format torch_dist --auto-detect-ckpt-format " if kind == "torch" else ""
    again += "--dist-ckpt-optim-fully-reshardable"
    assert f"save it again with {again}" in refused.stderr
    alone = losses(trained("upstream", 3, f"{flags} --load {first} --save {tmp_path / '3'}"))
    alone += losses(trained("upstream", 4, f"{flags} --load {tmp_path / '3'}"))
    resaved = f"--use-distributed-optimizer {again} --load {first} --save {second}"
    found = losses(trained("upstream", 3, resaved))
    found += losses(trained("ours", 4, f"{FULLY} --load {second}"))
    assert len(alone) == 2 and found == pytest.approx(alone, rel=ROUNDING)
