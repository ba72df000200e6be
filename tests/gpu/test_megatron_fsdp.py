"""On two GPUs over nccl: Megatron-FSDP trains a hybrid model, fp32 gates included, as
DDP does."""

import pytest
import torch

from tests.gpu import fsdp_laws as laws

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def truth(gpus):
    return gpus(2).run(laws.losses, "ddp", torch.float32)


def test_an_fp32_model_trains_as_under_ddp(gpus, truth):
    laws.require_exact_in_fp32(truth, gpus(2).run(laws.losses, "fsdp", torch.float32))


@pytest.mark.parametrize("strategy", ["optim_grads_params", "optim_grads", "no_shard"])
def test_a_bf16_model_with_fp32_gates_trains_as_exactly_as_under_ddp(
    gpus, truth, strategy
):
    ddp = gpus(2).run(laws.losses, "ddp", torch.bfloat16)
    fsdp = gpus(2).run(laws.losses, "fsdp", torch.bfloat16, strategy=strategy)
    laws.require_as_exact_as_ddp(truth, ddp, fsdp)


def test_gradients_of_two_dtypes_are_divided_by_the_ranks_once(gpus):
    """A bf16 gradient has a relative error of at most 2**-9 before the sum and after
    it."""
    ddp, fsdp = (gpus(2).run(laws.gradient_norm, how) for how in ("ddp", "fsdp"))
    torch.testing.assert_close(fsdp, ddp, rtol=2**-7, atol=0)
