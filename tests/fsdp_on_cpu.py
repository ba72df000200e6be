"""Stand-ins for what torch's FSDP2 and Megatron-FSDP ask of GPUs."""

from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist


class MeshOfCPUs(dist.DeviceMesh):
    """Whatever device is asked for."""

    @staticmethod
    def from_group(group: Any, *device_type: str, **kwargs: Any) -> dist.DeviceMesh:
        return dist.DeviceMesh.from_group(group, **{**kwargs, "device_type": "cpu"})


def one_collective_at_a_time(coalesce: Callable) -> Callable:
    """``coalesce``, whose collectives end in it: gloo would run two of a group at
    once."""

    @contextmanager
    def in_turn(*args: Any, **kwargs: Any):
        with coalesce(*args, **kwargs) as event:
            yield event
        event.wait()

    return in_turn


def fill_states_of_empty_shards(adam: torch.optim.Optimizer) -> None:
    """torch's Adam gets a state for every parameter, whose shapes Megatron gathers."""
    if not isinstance(adam, torch.optim.Adam | torch.optim.AdamW):
        return
    counts = [state["step"] for state in adam.state.values()] or [torch.tensor(0.0)]
    for group in adam.param_groups:
        for shard in group["params"]:
            empty = {
                "step": counts[0].clone(),
                "exp_avg": torch.zeros_like(shard),
                "exp_avg_sq": torch.zeros_like(shard),
            }
            # Put back in the order of the parameters, which is the same on every rank.
            adam.state[shard] = adam.state.pop(shard, empty)
