"""On two GPUs over nccl in bf16: TP2 and CP2 are as exact as one rank."""

import pytest
import torch

from tests.gpu import two_gpu_laws as laws
from tests.ranks import RankPool

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]


@pytest.fixture(scope="module")
def gpus():
    pool = RankPool(2, backend="nccl")
    yield pool
    pool.stop()


def assert_as_exact(answers) -> None:
    for answer in answers:
        assert answer["backend"] == "fla"
        for name, (two, one) in answer["errors"].items():
            print(f"{name}: two ranks {two:.2e} one rank {one:.2e}")
            # Partial sums of bf16 outputs are rounded once more before they are added.
            assert two <= 1.5 * one + 2**-9, name


@pytest.mark.parametrize("lengths", [None, (64, 192, 4, 256)], ids=["batch", "packed"])
@pytest.mark.parametrize(
    ("tp", "cp", "sp"), [(2, 1, False), (2, 1, True), (1, 2, False)], ids=["tp2", "tp2-sp", "cp2"]
)
def test_two_ranks_are_as_exact_as_one(gpus, tp, cp, sp, lengths):
    assert_as_exact(gpus.run(laws.bf16_error_of_two_ranks_is_that_of_one, tp, cp, sp, lengths))


@pytest.mark.parametrize("lengths", [None, (64, 192, 4, 256)], ids=["batch", "packed"])
def test_two_ranks_that_share_one_key_head_are_as_exact_as_one(gpus, lengths):
    law = laws.bf16_error_of_two_ranks_is_that_of_one
    assert_as_exact(gpus.run(law, 1, 2, False, lengths, key_heads=1))
