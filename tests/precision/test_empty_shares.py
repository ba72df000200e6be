"""Checkpoints of an optimizer whose fp32 bucket is too small to give every rank a
parameter."""

import pytest
import torch.distributed as dist

from tests.distributed.layer_laws import require_same_bits
from tests.parallel import parallel
from tests.precision.training import (
    DISTRIBUTED,
    Training,
    build,
    load,
    made_up_step,
    raised,
    save,
    sharded_state,
    shares,
)

paddings = pytest.mark.parametrize(
    "padded", [False, True], ids=["padded to 128", "padded to 2^16"]
)
# One layer of two heads. The fp32 bucket is [parameter: 0, 1] [gap: 2 .. 63]
# [parameter: 64, 65] [padding to 128, or to 65536 for NCCL's bandwidth]: at dp 8 ranks
# 0 and 4 have a parameter, 1 to 3 a part of the gap, the others padding. Padded to
# 65536, rank 0 has all, the others not one share.
SIZES = {
    "pattern": "G",
    "hidden_size": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 4,
    "linear_value_head_dim": 4,
}


def trained(kind: str, ddp: dict) -> Training:
    training = build(kind, ddp, **SIZES)
    for step in range(2):
        made_up_step(training, step)
    return training


def train_and_save(kind: str, folder: str, ddp: dict) -> int:
    """How many fp32 parameters have a share on this rank."""
    with parallel():
        training = trained(kind, ddp)
        # Where one rank cannot say what it saves, the others would wait for it in the
        # save.
        errors = [None] * dist.get_world_size()
        dist.all_gather_object(errors, raised(lambda: sharded_state(training)))
        assert not any(errors), errors
        save(training, folder)
        return sum(map(len, training.megatron_optimizer.model_fp32_groups))


def resumed_equals_uninterrupted(kind: str, folder: str, ddp: dict) -> None:
    """Bit for bit: every share of parameters and optimizer, after the load and a step
    later."""
    with parallel():
        uninterrupted = trained(kind, ddp)
        now = shares(uninterrupted)
        made_up_step(uninterrupted, 2)
        later = shares(uninterrupted)
        training = build(kind, ddp, seed=99, **SIZES)
        load(training, folder)
        require_same_bits(shares(training), now)
        made_up_step(training, 2)
        require_same_bits(shares(training), later)


@pytest.mark.parametrize(
    ("ddp", "held"),
    [
        ({"pad_buckets_for_high_nccl_busbw": True}, [2, 0]),
        ({"overlap_grad_reduce": True, "bucket_size": 64}, [1, 1]),
    ],
    ids=["a rank without parameters", "several buckets"],
)
@pytest.mark.parametrize("kind", DISTRIBUTED)
def test_it_is_resumed_where_it_was_saved(pools, tmp_path, kind, ddp, held):
    assert pools(2).run(train_and_save, kind, str(tmp_path), ddp) == held
    pools(2).run(resumed_equals_uninterrupted, kind, str(tmp_path), ddp)


@pytest.mark.slow
@paddings
@pytest.mark.parametrize("kind", DISTRIBUTED)
def test_it_is_saved_and_resumed_at_any_data_parallel_size(
    pools, tmp_path, kind, padded
):
    ddp = {"pad_buckets_for_high_nccl_busbw": padded}
    held = pools(8).run(train_and_save, kind, str(tmp_path), ddp)
    assert held == ([2] + [0] * 7 if padded else [1, 0, 0, 0, 1, 0, 0, 0])
    pools(8).run(resumed_equals_uninterrupted, kind, str(tmp_path), ddp)
    pools(2).run(resumed_equals_uninterrupted, kind, str(tmp_path), ddp)
