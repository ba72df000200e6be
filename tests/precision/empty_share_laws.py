"""Run on every rank: optimizer states of which most data-parallel ranks hold no share."""

import torch
import torch.distributed as dist

from tests.parallel import parallel
from tests.precision.fault_laws import raised
from tests.precision.training import Training, build, load, made_up_step, save, sharded_state

# One layer of two heads. The fp32 bucket is [parameter: 0, 1] [gap: 2 .. 63] [parameter: 64, 65]
# [padding to 128, or to 65536 for NCCL's bandwidth]: at dp 8 ranks 0 and 4 have a parameter, 1 to 3
# a part of the gap, the others padding. Padded to 65536, rank 0 has all, the others not one share.
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
        # Where one rank cannot say what it saves, the others would wait for it in the save.
        errors = [None] * dist.get_world_size()
        dist.all_gather_object(errors, raised(lambda: sharded_state(training)))
        assert not any(errors), errors
        save(training, folder)
        return sum(map(len, training.megatron_optimizer.model_fp32_groups))


def resumed_equals_uninterrupted(kind: str, folder: str, ddp: dict) -> None:
    """Bit for bit: every share of parameters and optimizer, after the load and a step later."""
    with parallel():
        uninterrupted = trained(kind, ddp)
        now = shares(uninterrupted)
        made_up_step(uninterrupted, 2)
        later = shares(uninterrupted)
        training = build(kind, ddp, seed=99, **SIZES)
        load(training, folder)
        assert_equal(shares(training), now)
        made_up_step(training, 2)
        assert_equal(shares(training), later)


def shares(training: Training) -> dict[str, torch.Tensor]:
    """Copies of all parameters, and of this rank's shares of their masters and Adam's state."""
    optimizer = training.megatron_optimizer
    adam = optimizer.optimizer
    found = {}
    for name, parameter in training.model.named_parameters():
        found[name] = parameter
        if parameter in optimizer.model_param_group_index_map:
            group, index = optimizer.model_param_group_index_map[parameter]
            master = adam.param_groups[group]["params"][index]
            state = adam.state.get(master, {})
            found |= {f"{name} {key}": value for key, value in [("master", master), *state.items()]}
    return {key: value.detach().clone() for key, value in found.items()}


def assert_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys(), one.keys() ^ other.keys()
    different = [key for key, value in one.items() if not torch.equal(value, other[key])]
    assert not different, different
