"""Megatron without torchrun, and on a machine without a GPU: for a script, a test, a first try.

Megatron-Core 0.19 asks CUDA for a device, a stream and a random generator even for plain tensor
maths. The functions below `run_megatron_on_cpu` answer for the CPU; each says what of Megatron
asks, and when the function can go.
"""

import importlib
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from time import perf_counter
from typing import Any, cast

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from .torch_norm import TorchRMSNorm

_CPU = torch.device("cpu")
_installed = False


def start_one_process(seed: int = 1234) -> torch.device:
    """Set up what every Megatron model needs: process group, parallel state of sizes 1, random
    seed.

    On a machine without a GPU `run_megatron_on_cpu` is called first.

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
    """`start_one_process` for a block; does nothing if one process has set up Megatron already."""
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


def run_megatron_on_cpu() -> None:
    """Let Megatron-Core run on the CPU; does nothing with a GPU or when called again.

    Each process must call it before its first `parallel_state.initialize_model_parallel`.
    """
    global _installed
    if _installed or torch.cuda.is_available():
        return
    _installed = True
    answer_for_device_and_streams()
    draw_model_parallel_randomness_from_the_cpu_generator()
    create_cuda_literals_on_cpu()
    accept_cpu_tensors_in_optimizers()
    use_torch_norm_after_the_last_hybrid_layer()
    resume_distributed_optimizer_with_torch_adam()
    gather_tensors_of_different_sizes()


class _Finished:
    """A stream and its events on a CPU, where work is done when its call returns."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._at = 0.0

    def record(self, stream: object = None) -> None:
        self._at = perf_counter()

    def record_event(self, event: "_Finished | None" = None) -> "_Finished":
        event = event or _Finished()
        event.record()
        return event

    def wait(self, *args: object) -> None: ...

    wait_event = wait_stream = synchronize = wait

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: "_Finished") -> float:
        return 1e3 * (end._at - self._at)


def answer_for_device_and_streams() -> None:
    """The current device is the CPU, streams never wait, events read the host's clock.

    Most of Megatron asks. Can go when Megatron takes devices from inputs and looks for a GPU first.
    """
    stream = _Finished()
    torch.cuda.current_device = lambda: _CPU
    torch.cuda.synchronize = lambda device=None: None
    torch.cuda.current_stream = lambda device=None: stream
    torch.cuda.Event = _Finished


def draw_model_parallel_randomness_from_the_cpu_generator() -> None:
    """The "CUDA" generator that Megatron forks, seeds and saves is torch's CPU generator.

    tensor_parallel/random.py asks. Can go when its tracker takes a device.
    """
    from megatron.core.tensor_parallel import random as megatron_random

    def get_state(device: object = None, clone: bool = False, graph_safe: bool = False):
        if graph_safe:
            raise RuntimeError(
                "CUDA graphs draw random numbers by a GPU's generator, and torch sees no GPU here. "
                "Leave --cuda-graph-impl out, or launch on a machine with a GPU."
            )
        return torch.get_rng_state()

    def set_state(new_state: torch.Tensor, device: object = None, graph_safe: bool = False):
        torch.set_rng_state(new_state)

    torch.cuda.get_rng_state = get_state
    torch.cuda.set_rng_state = set_state
    torch.cuda.manual_seed = torch.default_generator.manual_seed
    megatron_random._get_cuda_rng_state = get_state
    megatron_random._set_cuda_rng_state = set_state
    # Inside fork() the CPU generator must move here; the tracker would warn of it.
    logging.getLogger(megatron_random.__name__).addFilter(
        lambda record: "CPU RNG state changed" not in record.getMessage()
    )


_CREATORS = ("tensor", "zeros", "ones", "empty", "full", "arange", "empty_like", "zeros_like")


class _TorchOnCPU:
    """``torch`` as some Megatron files see it: "cuda" means the CPU, and no memory is pinned."""

    def __init__(self) -> None:
        for name in _CREATORS:
            setattr(self, name, partial(_create_on_cpu, getattr(torch, name)))

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def _create_on_cpu(create: Callable[..., torch.Tensor], *args: Any, **kwargs: Any) -> torch.Tensor:
    if "cuda" in str(kwargs.get("device")):
        kwargs["device"] = _CPU
    kwargs.pop("pin_memory", None)
    return create(*args, **kwargs)


_FILES_WITH_CUDA_LITERALS = (
    "megatron.core.dist_checkpointing.exchange_utils",
    "megatron.core.dist_checkpointing.strategies.state_dict_saver",
    "megatron.core.inference.contexts.dynamic_context",
    "megatron.core.models.common.embeddings.rope_utils",
    "megatron.core.optimizer.clip_grads",
    "megatron.core.optimizer.grad_scaler",
    "megatron.core.optimizer.layer_wise_optimizer",
    "megatron.core.optimizer.optimizer",
    "megatron.core.pipeline_parallel.schedules",
    "megatron.core.rerun_state_machine",
    "megatron.core.tensor_parallel.data",
    "megatron.core.transformer.utils",
    "megatron.core.utils",
)


def create_cuda_literals_on_cpu() -> None:
    """``device="cuda"`` written into Megatron's files means the CPU, in those files only.

    Can go when they use ``torch.cuda.current_device()`` or the gradients' device.
    """
    proxy = _TorchOnCPU()
    for name in _FILES_WITH_CUDA_LITERALS:
        vars(importlib.import_module(name))["torch"] = proxy


def accept_cpu_tensors_in_optimizers() -> None:
    """For Megatron's own files ``tensor.type()`` names the CUDA type, ``.cuda()`` does nothing.

    The optimizers sort parameters by strings such as "torch.cuda.FloatTensor" and move loaded state
    with ``.cuda()``. Can go when they compare dtypes.
    """
    tensor_type, tensor_cuda = torch.Tensor.type, torch.Tensor.cuda

    def megatron_asks() -> bool:
        return sys._getframe(2).f_globals.get("__name__", "").startswith("megatron.core.")

    def type_(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        answer = tensor_type(self, *args, **kwargs)
        if isinstance(answer, str) and megatron_asks():
            return answer.replace("torch.", "torch.cuda.", 1)
        return answer

    def cuda(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self if megatron_asks() else tensor_cuda(self, *args, **kwargs)

    torch.Tensor.type = type_
    torch.Tensor.cuda = cuda


def use_torch_norm_after_the_last_hybrid_layer() -> None:
    """Without Transformer Engine HybridStack's final norm is `TorchRMSNorm`, also on a GPU.

    Can go when HybridStackSubmodules has a field for it.
    """
    from megatron.core.extensions.transformer_engine import HAVE_TE
    from megatron.core.models.hybrid import hybrid_block

    if not HAVE_TE:
        hybrid_block.TENorm = TorchRMSNorm


def resume_distributed_optimizer_with_torch_adam() -> None:
    """DistributedOptimizer checkpoints load when Adam is torch's own (no Apex, no TE).

    distrib_optimizer.py expects a fused Adam. It reads one common step from every rank's state,
    also where the state is empty; it copies "step" from loaded tensors, which never hold one; and
    it gives all parameters the same step tensor, which then counts every update once per parameter.
    Can go when it does none of these. Useful on a GPU too.
    """
    from megatron.core.optimizer import distrib_optimizer

    optimizer_class = cast(Any, distrib_optimizer.DistributedOptimizer)  # it is patched below
    if distrib_optimizer.HAVE_APEX_OR_TE or hasattr(optimizer_class, "_steps_are_unshared"):
        return
    optimizer_class._steps_are_unshared = True
    state_dict, load_state_dict = optimizer_class.state_dict, optimizer_class.load_state_dict
    sharded_state_dict = optimizer_class.sharded_state_dict
    set_states = optimizer_class._set_main_param_and_optimizer_states

    def state_dict_with_a_step(self) -> dict[str, Any]:
        adam = self.optimizer
        if any(group["params"] for group in adam.param_groups):
            return state_dict(self)
        # The value does not matter: a file has the step of the first data-parallel rank.
        adam.state["no parameter"] = {"step": torch.zeros(())}
        try:
            return state_dict(self)
        finally:
            del adam.state["no parameter"]

    def sharded_state_dict_of_a_fresh_optimizer(self, *args: Any, **kwargs: Any):
        adam = self.optimizer
        if not adam.state:  # state at step 0, without the dummy update that would decay parameters
            for param in (param for group in adam.param_groups for param in group["params"]):
                adam.state[param] = {
                    "step": torch.zeros((), dtype=torch.float32),
                    "exp_avg": torch.zeros_like(param),
                    "exp_avg_sq": torch.zeros_like(param),
                }
        return sharded_state_dict(self, *args, **kwargs)

    def set_states_without_step(self, model_param: torch.Tensor, tensors: dict[str, Any]) -> None:
        # With dp_reshardable the tensors have step 0, from the fresh optimizer that was filled.
        # None keeps the step of the parameter groups.
        set_states(self, model_param, {**tensors, "step": None})

    def load_state_dict_with_own_steps(self, state_dict: dict[str, Any]) -> None:
        load_state_dict(self, state_dict)
        for state in self.optimizer.state.values():
            if isinstance(state.get("step"), torch.Tensor):
                state["step"] = state["step"].clone()

    optimizer_class.state_dict = state_dict_with_a_step
    optimizer_class.sharded_state_dict = sharded_state_dict_of_a_fresh_optimizer
    optimizer_class._set_main_param_and_optimizer_states = set_states_without_step
    optimizer_class.load_state_dict = load_state_dict_with_own_steps


def gather_tensors_of_different_sizes() -> None:
    """``torch.distributed.all_gather`` over gloo takes tensors of different sizes.

    Muon asks under ``--use-distributed-optimizer``, where ranks hold whole matrices. Can go when
    gloo takes them as NCCL does.
    """
    of_one_size = dist.all_gather

    def all_gather(tensor_list: list[Any], tensor: Any, group: Any = None, async_op: bool = False):
        if len({received.numel() for received in tensor_list}) == 1:
            return of_one_size(tensor_list, tensor, group=group, async_op=async_op)
        members: Any = group or dist.group.WORLD
        for rank, received in enumerate(tensor_list):
            if rank == dist.get_rank(group):
                received.copy_(tensor)
            dist.broadcast(received, dist.get_global_rank(members, rank), group)
        return _Finished() if async_op else None  # has a wait()

    dist.all_gather = all_gather
