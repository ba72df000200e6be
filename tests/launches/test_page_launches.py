"""The whole launches of the pages in a clone of Megatron-LM, on a CPU with a tiny
model."""

import math

import pytest

from tests.examples.commands import launches_of
from tests.examples.launching import ROOT
from tests.launches.launching import in_a_clone, launched, losses
from tests.launches.record import recorded

pytestmark = in_a_clone

VOCABULARY = 256
# Given after the page's flags, of which the last one counts. Sizes, and how long it
# trains.
TINY = f"""
    --hidden-size 64 --ffn-hidden-size 96 --num-attention-heads 4 --kv-channels 16
    --linear-num-key-heads 4 --linear-key-head-dim 16 --linear-num-value-heads 8
    --linear-value-head-dim 16 --seq-length 64 --max-position-embeddings 64
    --vocab-size {VOCABULARY} --global-batch-size 2 --train-iters 3 --lr-warmup-iters 1
    --log-interval 1 --eval-iters 1
"""

# One process in place of the page's tensor and context parallelism.
ONE = "--tensor-model-parallel-size 1 --context-parallel-size 1"


def trained(
    script: str, processes: int, changed: str = "", torchrun=False
) -> list[float]:
    with recorded(script, processes, f"as printed {changed}") as result:
        flags = [*launches_of(ROOT)[script], *changed.split(), *TINY.split()]
        steps = losses(launched(script, processes, *flags, torchrun=torchrun))
        assert steps == pytest.approx([math.log(VOCABULARY)] * 3, rel=0.1)
        result.trains()
    return steps


@pytest.mark.parametrize("script", ["pretrain_hybrid.py", "pretrain_gpt.py"])
def test_a_launch_of_the_pages_trains(script):
    """The first by torchrun, as printed."""
    trained(script, 4, torchrun=script == "pretrain_hybrid.py")


@pytest.mark.parametrize("changed", ["--tensor-model-parallel-size 1", ONE])
def test_two_processes_train_it_too(changed):
    """Over two context-parallel ranks, and over two data-parallel ones."""
    trained("pretrain_hybrid.py", 2, changed)


def test_from_the_meta_device_it_trains_alike():
    """Megatron moves such a model without a reset of its modules; here no FSDP resets
    them."""
    here = trained("pretrain_hybrid.py", 1, ONE)
    assert (
        trained("pretrain_hybrid.py", 1, f"{ONE} --init-model-with-meta-device") == here
    )


def test_under_torchs_fsdp2_it_trains_as_with_the_distributed_optimizer():
    """Both keep fp32 masters of equal weights; gradients are summed in bf16 and in
    fp32."""
    page = [
        f for f in launches_of(ROOT)["pretrain_hybrid.py"] if f != "--sequence-parallel"
    ]
    page += [*ONE.split(), *TINY.split()]
    fsdp2 = [f for f in page if f != "--use-distributed-optimizer"]
    with recorded(
        "pretrain_hybrid.py",
        2,
        f"as printed {ONE} --use-torch-fsdp2",
        "the distributed optimizer",
    ) as result:
        here = losses(
            launched(
                "pretrain_hybrid.py", 2, *fsdp2, "--use-torch-fsdp2", connections=None
            )
        )
        result.equals(here, losses(launched("pretrain_hybrid.py", 2, *page)), rel=1e-4)
