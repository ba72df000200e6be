"""Saves and loads everything a run needs to continue as if it had never stopped.

Layout, as Megatron writes it: ``FOLDER/iter_0000160/`` holds one distributed checkpoint and
``FOLDER/latest_checkpointed_iteration.txt`` the number of the newest complete one.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch

from pretraining.feed import Feed

_METADATA = {"distrib_optim_sharding_type": "fully_reshardable"}
_LATEST = "latest_checkpointed_iteration.txt"


def save_checkpoint(folder: Path, iteration: int, training: Any, feed: Feed) -> Path:
    """Write one checkpoint; every rank calls it. An interrupted save leaves the last one valid."""
    from megatron.core import dist_checkpointing

    target = _folder_of(folder, iteration)
    if torch.distributed.get_rank() == 0:
        target.mkdir(parents=True, exist_ok=True)
    torch.distributed.barrier()
    state = _sharded_state(training, is_loading=False)
    state |= {
        "iteration": iteration,
        "consumed_micro_batches": feed.consumed,
        "data": feed.identity(),
        "opt_param_scheduler": training.scheduler.state_dict(),
        "world_size": torch.distributed.get_world_size(),
    }
    dist_checkpointing.save(state, str(target), content_metadata=_METADATA)
    torch.distributed.barrier()
    if torch.distributed.get_rank() == 0:
        (folder / _LATEST).write_text(str(iteration))
    return target


def load_checkpoint(folder: Path, step: int | None, training: Any, feed: Feed) -> int:
    """Restore model, optimizer, schedule, data position and random state; returns the iteration.

    Raises:
        FileNotFoundError: no such checkpoint.
        ValueError: the run's data or batch shape differ from what the checkpoint was made with.
    """
    from megatron.core import dist_checkpointing
    from megatron.core.utils import unwrap_model

    source = find_checkpoint(folder, step)
    common = dist_checkpointing.load_common_state_dict(str(source))
    _check_data(common["data"], feed.identity(), source)
    state = _sharded_state(training, is_loading=True)
    if common["world_size"] != torch.distributed.get_world_size():
        # Random states belong to ranks; nothing in this model draws from them after the start.
        del state["rng"]
    state = dist_checkpointing.load(state, str(source))
    unwrap_model(training.model).load_state_dict(state["model"])
    training.optimizer.load_state_dict(state["optimizer"])
    training.scheduler.load_state_dict(state["opt_param_scheduler"])
    feed.consumed = state["consumed_micro_batches"]
    if "rng" in state:
        _set_rng_state(state["rng"])
    return state["iteration"]


def find_checkpoint(folder: Path, step: int | None = None) -> Path:
    """The folder of one step's checkpoint, the newest when ``step`` is None."""
    latest = folder / _LATEST
    if not latest.is_file():
        raise FileNotFoundError(
            f"{folder} holds no finished checkpoint (there is no {_LATEST}); check --load or "
            "--save, or start without --resume."
        )
    wanted = _folder_of(folder, int(latest.read_text()) if step is None else step)
    if not wanted.is_dir():
        existing = sorted(int(p.name[len("iter_") :]) for p in folder.glob("iter_*"))
        raise FileNotFoundError(
            f"{folder} has no checkpoint of step {step}; it has steps "
            f"{', '.join(map(str, existing))}."
        )
    return wanted


def _folder_of(folder: Path, iteration: int) -> Path:
    return folder / f"iter_{iteration:07d}"


def _sharded_state(training: Any, is_loading: bool) -> dict[str, Any]:
    from megatron.core.dist_checkpointing.mapping import ShardedObject
    from megatron.core.utils import unwrap_model

    model_state = unwrap_model(training.model).sharded_state_dict(metadata=_METADATA)
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    return {
        "model": model_state,
        "optimizer": training.optimizer.sharded_state_dict(
            model_state, is_loading=is_loading, metadata=_METADATA
        ),
        "rng": ShardedObject("rng", _rng_state(), (world,), (rank,)),
    }


def _check_data(saved: dict[str, Any], now: dict[str, Any], source: Path) -> None:
    different = [
        f"{key} was {saved.get(key)}, is {now[key]}" for key in now if saved.get(key) != now[key]
    ]
    if different:
        raise ValueError(
            f"{source} was made with other data, so its position means nothing here: "
            f"{'; '.join(different)}. Use the same --data and batch flags."
        )


def _rng_state() -> dict[str, Any]:
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    return {
        "python": random.getstate(),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(),
        "tracker": get_cuda_rng_tracker().get_states(),
    }


def _set_rng_state(state: dict[str, Any]) -> None:
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    random.setstate(state["python"])
    torch.set_rng_state(state["torch"])
    torch.cuda.set_rng_state(state["cuda"])
    get_cuda_rng_tracker().set_states(state["tracker"])
