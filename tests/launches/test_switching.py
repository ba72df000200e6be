"""``pretrain_hybrid.py`` of a Megatron-LM clone goes on from a checkpoint with another layer.

Megatron's own Gated DeltaNet and ours, mid-run and back, optimizer included, in every format.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.examples.launching import ROOT
from tests.launches.on_cpu import WITHOUT_GPU

CLONE = os.environ.get("MEGATRON_LM")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CLONE is None, reason="MEGATRON_LM=folder names a clone of Megatron-LM"),
]

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


def launched(layer: str, until: int, flags: str) -> subprocess.CompletedProcess:
    """Two data-parallel processes; they save and exit after step ``until``."""
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    # As a module: a clone has a package `tests` of its own, which would be found first.
    script = ["-m", "tests.launches.on_cpu", str(Path(CLONE) / "pretrain_hybrid.py")]
    return subprocess.run(
        [
            sys.executable, *command, *script, "--spec", *SPEC[layer].split(), *FLAGS.split(),
            *WITHOUT_GPU.split(), *flags.split(), f"--exit-interval={until}",
        ],
        env=os.environ
        | {"PYTHONPATH": str(ROOT), "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
        | {"TORCHDYNAMO_DISABLE": "1"},
        capture_output=True, text=True, timeout=550, check=False,
    )  # fmt: skip


def losses(done: subprocess.CompletedProcess) -> list[float]:
    assert done.returncode == 0, done.stderr[-6000:]
    return [float(loss) for loss in re.findall(r"iteration +\d.*lm loss: (\S+)", done.stdout)]


@pytest.mark.parametrize("kind", FORMATS)
def test_a_run_goes_on_with_our_layer_and_back_with_megatrons(tmp_path, kind):
    """Steps 1-2 upstream, 3-4 ours, 5-6 upstream: the losses of upstream's with the same stops.

    The stops are the same because Megatron's mock data differ in the second step after a load.
    """
    flags = FORMATS[kind]
    first, theirs, ours = (tmp_path / name for name in ("first", "theirs", "ours"))
    losses(launched("upstream", 2, f"{flags} --save {first}"))
    found, alone = (
        losses(launched(layer, 4, f"{flags} --load {first} --save {second}"))
        + losses(launched("upstream", 6, f"{flags} --load {second}"))
        for layer, second in (("ours", ours), ("upstream", theirs))
    )
    print("LOSSES", kind, alone, found)
    assert len(alone) == 4 and found == pytest.approx(alone, rel=ROUNDING)


@pytest.mark.parametrize("kind", ["dp_reshardable", "torch"])
def test_a_file_of_buffers_is_refused_with_the_flags_that_make_one_that_loads(tmp_path, kind):
    """Megatron's layer loads its own file and saves it again with these flags; ours goes on."""
    first, second = tmp_path / "1", tmp_path / "2"
    flags = f"--use-distributed-optimizer{' --ckpt-format torch' if kind == 'torch' else ''}"
    losses(launched("upstream", 2, f"{flags} --save {first}"))
    refused = launched("ours", 4, f"{flags} --load {first}")
    assert refused.returncode != 0
    again = "--ckpt-format torch_dist --auto-detect-ckpt-format " if kind == "torch" else ""
    again += "--dist-ckpt-optim-fully-reshardable"
    assert f"save it again with {again}" in refused.stderr
    alone = losses(launched("upstream", 3, f"{flags} --load {first} --save {tmp_path / '3'}"))
    alone += losses(launched("upstream", 4, f"{flags} --load {tmp_path / '3'}"))
    resaved = f"--use-distributed-optimizer {again} --load {first} --save {second}"
    found = losses(launched("upstream", 3, resaved))
    found += losses(launched("ours", 4, f"{FULLY} --load {second}"))
    print("LOSSES", kind, alone, found)
    assert len(alone) == 2 and found == pytest.approx(alone, rel=ROUNDING)
