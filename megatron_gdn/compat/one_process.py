"""Megatron in one process without torchrun: for a script, a notebook, a first try."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from .megatron_on_cpu import run_megatron_on_cpu


def start_one_process(seed: int = 1234) -> torch.device:
    """Set up what every Megatron model needs around it: process group, parallel state, random seed.

    All parallel sizes are 1. On a machine without a GPU `run_megatron_on_cpu` is called first.

    Returns:
        the device for the model and its inputs: the current GPU, else the CPU.

    Raises:
        RuntimeError: torch.distributed is initialised already.
    """
    if dist.is_initialized():
        raise RuntimeError(
            f"torch.distributed is initialised already, with {dist.get_world_size()} processes. "
            f"start_one_process() is for a process alone; with torchrun call "
            f"megatron.core.parallel_state.initialize_model_parallel(...) yourself."
        )
    run_megatron_on_cpu()
    gpu = torch.cuda.is_available()
    store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]  # a documented name
    dist.init_process_group("nccl" if gpu else "gloo", store=store, rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(seed)
    return torch.device("cuda", torch.cuda.current_device()) if gpu else torch.device("cpu")


def end_one_process() -> None:
    """Undo `start_one_process`, so that torch does not warn at the end of the script."""
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


@contextmanager
def in_one_process() -> Iterator[None]:
    """`start_one_process` for a block; nothing where one process has set up Megatron already."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        raise RuntimeError(
            f"torch.distributed runs {dist.get_world_size()} processes; whole folders are "
            f"converted in a process alone, such as `python -m megatron_gdn.hf`."
        )
    if parallel_state.model_parallel_is_initialized():
        yield
        return
    with torch.random.fork_rng(devices=[]):
        start_one_process()
        try:
            yield
        finally:
            end_one_process()
