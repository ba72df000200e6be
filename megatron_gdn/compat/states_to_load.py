"""``ChainedOptimizer.state_dict`` gives a fresh optimizer the states that a file is loaded into.

``--ckpt-format torch_dcp``, a format of ``--use-torch-fsdp2``, loads into the optimizer's own
tensors. For them Megatron's script calls ``optimizer.state_dict(is_loading=True)``. The optimizers
in a ``ChainedOptimizer`` take this argument or need none, but it does not take it, so no such file
loads, with any layer. torch's Adam counts its steps in a tensor per parameter, which Megatron does
not create.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch


def with_states_to_load(state_dict: Callable) -> Callable:
    """Wrap ``state_dict``; without ``is_loading`` it changes nothing."""

    @wraps(state_dict)
    def state_dict_with_states(self, is_loading: bool = False) -> Any:
        if is_loading:
            for one in self.chained_optimizers:
                if not one.is_stub_optimizer:
                    one.init_state_fn(one.optimizer, one.config)
                    _count_steps(one.optimizer)
        return state_dict(self)

    return state_dict_with_states


def _count_steps(optimizer: torch.optim.Optimizer) -> None:
    """Give each state of torch's Adam its counter; fused ones keep theirs in parameter groups."""
    if isinstance(optimizer, torch.optim.Adam):
        for state in optimizer.state.values():
            state.setdefault("step", torch.zeros((), dtype=torch.float32))
