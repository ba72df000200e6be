"""The list of masters in a plain state dict of ``Float16OptimizerWithFloat16Params``.

``--ckpt-format torch`` writes such state dicts. Megatron lists one fp32 master for each 16-bit
parameter and assigns them by their order. A layer with a 16-bit ``A_log`` has two masters more, so
its list does not fit a layer with an fp32 one: an error where sizes differ, another parameter's
values where they are equal. Here an fp32 parameter is listed as its own master, in Adam's order,
so both layers write one list and read it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from torch import Tensor

_LIST = "fp32_from_fp16_params"


def with_every_master(state_dict: Callable) -> Callable:
    """Wrap ``state_dict``. In ``sharded_state_dict``, which lists others, it changes nothing."""

    @wraps(state_dict)
    def state_dict_with_every_master(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        state = state_dict(self, *args, **kwargs)
        if not getattr(self, "_in_sharded_state_dict", False) and _LIST in state:
            state[_LIST] = [list(group["params"]) for group in self.optimizer.param_groups]
        return state

    return state_dict_with_every_master


def take_native_masters(optimizer: Any, state: dict[str, Any]) -> dict[int, Tensor]:
    """Remove the masters of fp32 parameters from the list of ``state``.

    Returns:
        Index of a parameter in Adam -> its master; empty for a list without them.

    Raises:
        ValueError: the list is neither that of all parameters nor that of the 16-bit ones.
    """
    saved = state.get(_LIST)
    own = [[tuple(p.shape) for p in group] for group in optimizer.fp32_from_float16_groups]
    if saved is None or [[tuple(p.shape) for p in group] for group in saved] == own:
        return {}
    groups = [group["params"] for group in optimizer.optimizer.param_groups]
    every = [[tuple(p.shape) for p in group] for group in groups]
    if [[tuple(p.shape) for p in group] for group in saved] != every:
        raise ValueError(
            f"the checkpoint lists {sum(map(len, saved))} fp32 masters, the model has "
            f"{sum(map(len, every))} parameters, or their shapes differ. It was written by another "
            f"model, or before fp32 parameters were listed. --ckpt-format torch_dist with "
            f"--dist-ckpt-optim-fully-reshardable stores masters by name; --no-load-optim loads "
            f"the parameters alone."
        )
    half = {id(master) for group in optimizer.fp32_from_float16_groups for master in group}
    pairs = [list(zip(*both, strict=True)) for both in zip(groups, saved, strict=True)]
    state[_LIST] = [[master for p, master in group if id(p) in half] for group in pairs]
    flat = [pair for group in pairs for pair in group]
    return {index: master for index, (p, master) in enumerate(flat) if id(p) not in half}
