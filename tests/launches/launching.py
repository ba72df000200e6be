"""Scripts of a Megatron-LM clone, run over processes of this machine, and what they print."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_gdn.specs.layer import VARIABLE
from tests.examples.launching import ROOT
from tests.launches.on_cpu import WITHOUT_GPU

CLONE = os.environ.get("MEGATRON_LM")
# Of two equal flags Megatron takes the last.
SMALL = """
    --hidden-size 64 --ffn-hidden-size 96 --num-attention-heads 4 --kv-channels 16
    --linear-num-key-heads 2 --linear-key-head-dim 16 --linear-num-value-heads 4
    --linear-value-head-dim 16 --linear-conv-kernel-dim 4 --position-embedding-type rope
    --normalization RMSNorm --swiglu --disable-bias-linear
    --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0
    --seq-length 64 --max-position-embeddings 64 --log-interval 1 --num-workers 0
    --no-persist-layer-norm
"""
# A hybrid model that two processes train in seconds, with either layer.
SPEC = {
    "ours": "megatron_gdn.specs hybrid_stack_spec",
    "upstream": "tests.launches.upstream_layers hybrid_stack",
}
FLAGS = f"""{SMALL}
    --hybrid-layer-pattern G-*- --position-embedding-type none
    --vocab-size 256 --tokenizer-type NullTokenizer
    --micro-batch-size 1 --global-batch-size 2 --train-iters 6 --lr 3e-4 --lr-decay-style constant
    --mock-data --eval-iters 0 --eval-interval 100 --save-interval 100
"""
in_a_clone = [
    pytest.mark.slow,
    pytest.mark.skipif(CLONE is None, reason="MEGATRON_LM=folder names a clone of Megatron-LM"),
]


def launched(script, processes, *flags, options="", connections="1", launcher=False):
    """``script`` with these flags, ``options`` of our layers in the environment, behind ``-m
    megatron_gdn.launch`` where ``launcher``; torch's FSDP2 wants no ``connections`` of CUDA."""
    assert CLONE is not None
    environment = {k: v for k, v in os.environ.items() if k != "CUDA_DEVICE_MAX_CONNECTIONS"}
    if connections is not None:
        environment["CUDA_DEVICE_MAX_CONNECTIONS"] = connections
    return subprocess.run(
        [
            sys.executable, "-m", "torch.distributed.run", "--standalone",
            f"--nproc_per_node={processes}",
            # As a module: a clone has a package `tests` of its own, which would be found first.
            "-m", "tests.launches.on_cpu", *["megatron_gdn.launch"] * launcher,
            str(Path(CLONE) / script), *flags, *WITHOUT_GPU.split(),
        ],
        env=environment
        | {"PYTHONPATH": str(ROOT), VARIABLE: options, "TORCHDYNAMO_DISABLE": "1"},
        capture_output=True, text=True, timeout=550, check=False,
    )  # fmt: skip


def losses(done: subprocess.CompletedProcess[str]) -> list[float]:
    """The losses that a launch printed, one a step; it must have ended well."""
    errors = re.findall(r".*Error: .*", done.stderr)
    assert done.returncode == 0, "\n".join([*errors, done.stderr[-6000:]])
    return [float(loss) for loss in re.findall(r"iteration +\d+/.*lm loss: (\S+)", done.stdout)]


def held_out_losses(done: subprocess.CompletedProcess[str]) -> list[float]:
    return [float(loss) for loss in re.findall(r"lm loss value: (\S+)", done.stdout)]
