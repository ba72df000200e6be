"""Saves and loads everything that a run needs to continue as if it had never
stopped."""

from __future__ import annotations

import argparse
import queue
import random
import shutil
import time
from pathlib import Path
from typing import Any, cast

import torch
from torch.distributed.checkpoint.api import CheckpointException

from pretraining import settings
from pretraining.failures import ask_the_disk, first_line, last_line
from pretraining.feed import Feed
from pretraining.folders import LATEST, PARTIAL, checkpoint_of, write_whole

_METADATA = {"distrib_optim_sharding_type": "fully_reshardable"}


def save_checkpoint(
    folder: Path, iteration: int, training: Any, feed: Feed, settings_json: str
) -> Path:
    """Write one checkpoint; every rank calls it.

    It gets its name when it is complete, so a save that is cut off leaves the
    checkpoint before it.

    Raises:
        OSError: the disk is full, or refuses for another reason.
        RuntimeError: the save failed on some rank for a reason that is not the disk's.
    """
    from megatron.core import dist_checkpointing

    _write_in_this_process()
    is_first = torch.distributed.get_rank() == 0
    target = checkpoint_of(folder, iteration)
    partial = target.with_name(target.name + PARTIAL)
    if is_first:
        for cut_off in folder.glob(f"iter_*{PARTIAL}"):
            shutil.rmtree(cut_off)
        partial.mkdir(parents=True)
    torch.distributed.barrier()
    state = _sharded_state(training, is_loading=False)
    state |= {
        "iteration": iteration,
        "consumed_micro_batches": feed.consumed,
        "data": feed.identity(),
        "opt_param_scheduler": training.scheduler.state_dict(),
        "world_size": torch.distributed.get_world_size(),
    }
    try:
        dist_checkpointing.save(state, str(partial), content_metadata=_METADATA)
        torch.distributed.barrier()
        if is_first:
            (partial / settings.FILE).write_text(settings_json)
            # complete, but the run was continued from an earlier one
            if target.exists():
                shutil.rmtree(target)
            partial.rename(target)
            write_whole(folder / LATEST, str(iteration))
    except BaseException as error:  # torch's CheckpointException is no Exception
        refusal = ask_the_disk(partial)
        refusals = {}
        if isinstance(error, CheckpointException):  # every rank has it
            refusals = _refusals_of_ranks(refusal)
        if is_first:
            time.sleep(1)  # the other ranks ask it too
            shutil.rmtree(partial, ignore_errors=True)  # it fills the disk for nothing
        if refusal:
            raise refusal from error
        if isinstance(error, Exception):
            raise
        cause = last_line(error)
        if isinstance(error, CheckpointException):
            cause = _causes_of_ranks(error, refusals)
        raise RuntimeError(f"saving {target} failed: {cause}") from error
    torch.distributed.barrier()
    return target


def _refusals_of_ranks(refusal: OSError | None) -> dict[int, str]:
    """What the disk of each rank says, of the ranks whose disk refuses."""
    said: list[str | None] = [None] * torch.distributed.get_world_size()
    own = first_line(refusal) if refusal else None
    torch.distributed.all_gather_object(said, own)
    return {rank: words for rank, words in enumerate(said) if words}


def _causes_of_ranks(error: CheckpointException, refusals: dict[int, str]) -> str:
    """The ranks that failed, each with what its disk says or with its error.

    Megatron tells the errors of the writers to rank 0 alone.
    """
    causes = {rank: last_line(failure) for rank, (failure, _) in error.failures.items()}
    causes |= refusals
    if not causes:
        return "on another rank"
    return "; ".join(f"rank {rank}: {causes[rank]}" for rank in sorted(causes))


def load_checkpoint(
    source: Path, args: argparse.Namespace, training: Any, feed: Feed
) -> int:
    """Restore model, optimizer, schedule, data position and random state; returns the
    iteration.

    ``args`` give the schedule its ends.

    Raises:
        ValueError: the run's data, batch shape or model differ from the checkpoint's.
    """
    from megatron.core import dist_checkpointing
    from megatron.core.utils import unwrap_model

    common = dist_checkpointing.load_common_state_dict(str(source))
    _check_data(common["data"], feed.identity(), source)
    # Megatron finds the optimizer's groups again by these ends, among others.
    former = common["opt_param_scheduler"]
    _set_ends(training.optimizer, former["max_lr"], former["min_lr"])
    state = _sharded_state(training, is_loading=True)
    if common["world_size"] != torch.distributed.get_world_size():
        # Random states belong to ranks; nothing in this model draws from them after the
        # start.
        del state["rng"]
    state, left_over, lacking = cast(
        tuple[dict[str, Any], set[str], set[str]],
        dist_checkpointing.load(state, str(source), strict="return_all"),
    )
    _check_model(left_over, lacking, source)
    unwrap_model([training.model])[0].load_state_dict(state["model"])
    training.optimizer.load_state_dict(state["optimizer"])
    _set_ends(training.optimizer, args.lr, args.min_lr)
    training.scheduler.load_state_dict(state["opt_param_scheduler"])
    feed.consumed = state["consumed_micro_batches"]
    if "rng" in state:
        _set_rng_state(state["rng"])
    return state["iteration"]


def _set_ends(optimizer: Any, lr: float, min_lr: float) -> None:
    for group in optimizer.param_groups:
        group.update(max_lr=lr, min_lr=min_lr)


def _write_in_this_process() -> None:
    """Let Megatron's writer hand its results over without a helper process.

    The helper of its `multiprocessing.Manager` takes seconds to start, and a signal to
    the process group would end it in the middle of a save.
    """
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    if getattr(filesystem_async, "_results_queue", queue) is None:
        filesystem_async._results_queue = queue.Queue()


def _check_model(left_over: Any, lacking: Any, source: Path) -> None:
    """Refuse when the checkpoint holds tensors that the model has not, or the other way
    round."""
    lists = {
        "it holds {}, which this model has not": {
            k for k in left_over if k.split("/")[0] != "rng"
        },
        "it lacks {}, which this model has": set(lacking),
    }
    found = [
        words.format(", ".join(sorted(keys)[:3]) + f" ({len(keys)} in all)")
        for words, keys in lists.items()
        if keys
    ]
    if found:
        raise ValueError(f"{source} is of another model: {'; '.join(found)}.")


def _sharded_state(training: Any, is_loading: bool) -> dict[str, Any]:
    from megatron.core.dist_checkpointing.mapping import ShardedObject
    from megatron.core.utils import unwrap_model

    model_state = unwrap_model([training.model])[0].sharded_state_dict(
        metadata=_METADATA
    )
    rank = torch.distributed.get_rank()
    world = torch.distributed.get_world_size()
    return {
        "model": model_state,
        "optimizer": training.optimizer.sharded_state_dict(
            model_state, is_loading=is_loading, metadata=_METADATA
        ),
        "rng": ShardedObject("rng", _rng_state(), (world,), (rank,)),
    }


def _check_data(saved: dict[str, Any], now: dict[str, Any], source: Path) -> None:
    different = [
        f"{key} was {saved.get(key)}, is {now[key]}"
        for key in now
        if saved.get(key) != now[key]
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
        "tracker": cast(Any, get_cuda_rng_tracker()).get_states(),
    }


def _set_rng_state(state: dict[str, Any]) -> None:
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    random.setstate(state["python"])
    torch.set_rng_state(state["torch"])
    torch.cuda.set_rng_state(state["cuda"])
    cast(Any, get_cuda_rng_tracker()).set_states(state["tracker"])
