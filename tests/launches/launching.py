"""Scripts of a Megatron-LM clone, run over processes of this machine, and what they
print."""

import atexit
import functools
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.examples.launching import ROOT
from tests.launches.on_cpu import WITHOUT_GPU

CLONE = os.environ.get("MEGATRON_LM")
PATIENCE_S = 550
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
    pytest.mark.skipif(
        CLONE is None, reason="MEGATRON_LM=folder names a clone of Megatron-LM"
    ),
]


@functools.cache
def _server() -> subprocess.Popen[str]:
    """A process that has imported what the clone's scripts import, from which ranks are
    forked."""
    assert CLONE is not None
    server = subprocess.Popen(
        [sys.executable, "-m", "tests.launches.on_cpu", "serve", CLONE],
        env=os.environ | {"PYTHONPATH": str(ROOT), "TORCHDYNAMO_DISABLE": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    atexit.register(server.communicate)
    return server


def launched(
    script, processes, *flags, connections="1", launcher=False, torchrun=False
) -> subprocess.CompletedProcess[str]:
    """``script`` with these flags, behind ``-m megatron_gdn.launch`` where
    ``launcher``; torch's FSDP2 wants no ``connections`` of CUDA.

    The ranks have the environment that torchrun gives them; if ``torchrun``, it starts
    them.
    """
    assert CLONE is not None
    arguments = [
        *["megatron_gdn.launch"] * launcher,
        str(Path(CLONE) / script),
        *flags,
        *WITHOUT_GPU.split(),
    ]
    given = {"CUDA_DEVICE_MAX_CONNECTIONS": connections}
    if torchrun:
        given |= {"PYTHONPATH": str(ROOT), "TORCHDYNAMO_DISABLE": "1"}
        # As a module: a clone has a package `tests` of its own, which would be found
        # first.
        start = (
            "-m",
            "torch.distributed.run",
            "--standalone",
            f"--nproc_per_node={processes}",
        )
        return subprocess.run(
            [sys.executable, *start, "-m", "tests.launches.on_cpu", *arguments],
            env={k: v for k, v in {**os.environ, **given}.items() if v is not None},
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
    with tempfile.TemporaryDirectory() as folder:
        log = f"{folder}/log"
        asked = {"processes": processes, "arguments": arguments, "environment": given}
        server = _server()
        print(
            json.dumps({**asked, "log": log, "seconds": PATIENCE_S}),
            file=server.stdin,
            flush=True,
        )
        code = int(server.stdout.readline())
        said = (
            Path(f"{log}.{kind}").read_text(errors="replace") for kind in ("out", "err")
        )
        return subprocess.CompletedProcess(arguments, code, *said)


def losses(done: subprocess.CompletedProcess[str]) -> list[float]:
    """The losses that a launch printed, one a step; it must have ended well."""
    errors = re.findall(r".*Error: .*", done.stderr)
    assert done.returncode == 0, "\n".join([*errors, done.stderr[-6000:]])
    return [
        float(loss)
        for loss in re.findall(r"iteration +\d+/.*lm loss: (\S+)", done.stdout)
    ]


def held_out_losses(done: subprocess.CompletedProcess[str]) -> list[float]:
    return [float(loss) for loss in re.findall(r"lm loss value: (\S+)", done.stdout)]
