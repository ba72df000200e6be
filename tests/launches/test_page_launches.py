"""The whole launches of the pages run in a clone of Megatron-LM.

    make test-launches MEGATRON_LM=folder

As they stand on the page, bf16 and parallel sizes included, but on a CPU and with a tiny model.
"""

import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.examples.commands import launches_of
from tests.examples.launching import ROOT
from tests.launches.on_cpu import WITHOUT_GPU

CLONE = os.environ.get("MEGATRON_LM") or None
VOCABULARY = 256
# Given after the page's flags, of which the last one counts. Sizes, and how long it trains.
TINY = f"""
    --hidden-size 64 --ffn-hidden-size 96 --num-attention-heads 4 --kv-channels 16
    --linear-num-key-heads 4 --linear-key-head-dim 16 --linear-num-value-heads 8
    --linear-value-head-dim 16 --seq-length 64 --max-position-embeddings 64
    --vocab-size {VOCABULARY} --global-batch-size 2 --train-iters 3 --lr-warmup-iters 1
    --log-interval 1 --eval-iters 1
"""


def trained(script: str, size: int, *flags: str) -> list[float]:
    """The losses that ``script`` of the clone prints, step by step, over ``size`` processes."""
    command = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={size}"]
    run = [str(ROOT / "tests/launches/on_cpu.py"), str(Path(CLONE) / script), *flags]
    done = subprocess.run(
        [sys.executable, *command, *run, *TINY.split(), *WITHOUT_GPU.split()],
        env=os.environ | {"PYTHONPATH": str(ROOT), "CUDA_DEVICE_MAX_CONNECTIONS": "1"},
        capture_output=True, text=True, timeout=500, check=False,
    )  # fmt: skip
    assert done.returncode == 0, re.findall(r".*Error: .*", done.stderr) or done.stderr[-6000:]
    return [float(loss) for loss in re.findall(r"iteration +\d.*lm loss: (\S+)", done.stdout)]


@pytest.mark.slow
@pytest.mark.skipif(CLONE is None, reason="set MEGATRON_LM to the folder of a Megatron-LM clone")
@pytest.mark.parametrize("script", ["pretrain_hybrid.py", "pretrain_gpt.py"])
def test_a_launch_of_the_pages_trains(script):
    """Tensor and sequence parallelism over two, context parallelism over two, as on the page."""
    losses = trained(script, 4, *launches_of(ROOT)[script])
    # An untrained model knows nothing of the tokens.
    assert losses == pytest.approx([math.log(VOCABULARY)] * 3, rel=0.1)


@pytest.mark.slow
@pytest.mark.skipif(CLONE is None, reason="set MEGATRON_LM to the folder of a Megatron-LM clone")
@pytest.mark.parametrize("parallel", ["context", "data"])
def test_two_processes_train_it_too(parallel):
    sizes = ["--tensor-model-parallel-size", "1"]
    sizes += ["--context-parallel-size", "2" if parallel == "context" else "1"]
    losses = trained("pretrain_hybrid.py", 2, *launches_of(ROOT)["pretrain_hybrid.py"], *sizes)
    assert losses == pytest.approx([math.log(VOCABULARY)] * 3, rel=0.1)


@pytest.mark.slow
@pytest.mark.skipif(CLONE is None, reason="set MEGATRON_LM to the folder of a Megatron-LM clone")
def test_from_the_meta_device_it_trains_alike():
    """Megatron moves such a model without a reset of its modules; here no FSDP resets them."""
    sizes = ["--tensor-model-parallel-size", "1", "--context-parallel-size", "1"]
    flags = [*launches_of(ROOT)["pretrain_hybrid.py"], *sizes]
    here = trained("pretrain_hybrid.py", 1, *flags)
    assert here == pytest.approx([math.log(VOCABULARY)] * 3, rel=0.1)
    assert trained("pretrain_hybrid.py", 1, *flags, "--init-model-with-meta-device") == here
