"""Megatron without torchrun and without a GPU, for a script or a test.

Megatron-Core 0.19 uses CUDA's devices, streams and generators even for plain tensor
maths. `run_megatron_on_cpu` calls functions of this file, which replace Megatron's
calls. Each function's docstring says when the function can be removed.
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

from .state_dict import StateDict
from .torch_norm import TorchRMSNorm

_CPU = torch.device("cpu")
_runs_on_cpu = False  # whether `run_megatron_on_cpu` has replaced Megatron's calls


def start_one_process(seed: int = 1234) -> torch.device:
    """Set up a group of one process, Megatron's parallel state (all sizes 1) and random
    seeds.

    Returns:
        the device for the model and its inputs: the current GPU, else the CPU.

    Raises:
        RuntimeError: torch.distributed is initialised already.
    """
    if dist.is_initialized():
        raise RuntimeError(
            f"torch.distributed is initialised already, with {dist.get_world_size()} "
            "processes. start_one_process() serves a single process; with torchrun "
            "call megatron.core.parallel_state.initialize_model_parallel(...) yourself."
        )
    run_megatron_on_cpu()
    gpu = torch.cuda.is_available()
    store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]  # a documented name
    dist.init_process_group(
        "nccl" if gpu else "gloo", store=store, rank=0, world_size=1
    )
    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(seed)
    if gpu:
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def end_one_process() -> None:
    """Undo `start_one_process`; a script that does not call this function ends with a
    warning."""
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


@contextmanager
def in_one_process() -> Iterator[None]:
    """In this context one process is set up (`start_one_process`). The end of the
    context undoes the set-up and restores torch's random state on the CPU.

    If Megatron is set up already, the context changes nothing.

    Raises:
        RuntimeError: torch.distributed runs several processes.
    """
    if dist.is_initialized() and dist.get_world_size() > 1:
        raise RuntimeError(
            f"torch.distributed runs {dist.get_world_size()} processes; convert whole "
            "folders in a single process, such as `python -m megatron_gdn.hf`."
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
    """Let Megatron-Core run on the CPU; with a GPU, or when called again, do nothing.

    Each process must call this function before
    `parallel_state.initialize_model_parallel`.
    """
    global _runs_on_cpu
    if _runs_on_cpu or torch.cuda.is_available():
        return
    _runs_on_cpu = True
    replace_cuda_device_and_streams()
    draw_model_parallel_randomness_from_the_cpu_generator()
    create_cuda_literals_on_cpu()
    accept_cpu_tensors_in_optimizers()
    use_torch_norm_after_the_last_hybrid_layer()
    resume_distributed_optimizer_with_torch_adam()
    gather_tensors_of_different_sizes()


class _FinishedStream:
    """Replaces ``torch.cuda``'s streams and events on a CPU. There a call returns only
    after its work has ended."""

    def __init__(self, *args: object, **kwargs: object) -> None: ...

    def record(self, stream: object = None) -> None:
        """Store the host's time; ``stream`` is ignored."""
        self._recorded_at = perf_counter()

    def record_event(self, event: "_FinishedStream | None" = None) -> "_FinishedStream":
        """Record ``event`` (None: a new event) and return it."""
        event = event or _FinishedStream()
        event.record()
        return event

    def wait(self, *args: object) -> None: ...

    wait_event = wait_stream = synchronize = wait

    def query(self) -> bool:
        return True

    def elapsed_time(self, end_event: "_FinishedStream") -> float:
        """Milliseconds from this event to ``end_event``, by the host's clock."""
        return 1e3 * (end_event._recorded_at - self._recorded_at)


def replace_cuda_device_and_streams() -> None:
    """Make the CPU the current device. Streams never wait; events read the host's
    clock.

    The function can be removed when Megatron's files use the devices of their inputs.
    """
    stream = _FinishedStream()
    torch.cuda.current_device = lambda: _CPU
    torch.cuda.synchronize = lambda device=None: None
    torch.cuda.current_stream = lambda device=None: stream
    torch.cuda.Event = _FinishedStream


def draw_model_parallel_randomness_from_the_cpu_generator() -> None:
    """Replace the CUDA generator, which Megatron forks, seeds and saves, by the CPU
    generator.

    The function can be removed when the tracker of random states in
    tensor_parallel/random.py takes a device.
    """
    from megatron.core.tensor_parallel import random as megatron_random

    def get_state(device: object = None, clone: bool = False, graph_safe: bool = False):
        """The CPU generator's state; ignores ``device`` and ``clone``, refuses
        ``graph_safe``."""
        if graph_safe:
            raise RuntimeError(
                "CUDA graphs draw random numbers from a GPU's generator, and torch "
                "sees no GPU. Leave --cuda-graph-impl out, or launch on a machine with "
                "a GPU."
            )
        return torch.get_rng_state()

    def set_state(
        new_state: torch.Tensor, device: object = None, graph_safe: bool = False
    ):
        """Set the CPU generator's state to ``new_state``; ignore the other
        arguments."""
        torch.set_rng_state(new_state)

    torch.cuda.get_rng_state = get_state
    torch.cuda.set_rng_state = set_state
    torch.cuda.manual_seed = torch.default_generator.manual_seed
    megatron_random._get_cuda_rng_state = get_state
    megatron_random._set_cuda_rng_state = set_state
    # Hide a warning: Megatron's tracker expects that fork() leaves the CPU generator
    # unchanged.
    logging.getLogger(megatron_random.__name__).addFilter(
        lambda record: "CPU RNG state changed" not in record.getMessage()
    )


# The functions of torch that Megatron calls with ``device="cuda"``.
_TENSOR_CREATORS = (
    "tensor",
    "zeros",
    "ones",
    "empty",
    "full",
    "arange",
    "empty_like",
    "zeros_like",
)


class _TorchOnCPU:
    """Replaces the module ``torch`` in Megatron's files.

    Functions that make tensors read ``device="cuda"`` as the CPU, and pin no memory.
    All other names are torch's own.
    """

    def __init__(self) -> None:
        for name in _TENSOR_CREATORS:
            setattr(self, name, partial(_create_on_cpu, getattr(torch, name)))

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def _create_on_cpu(
    create: Callable[..., torch.Tensor], *args: object, **kwargs: object
) -> torch.Tensor:
    """Call ``create`` (such as ``torch.zeros``) with the CPU in place of
    ``device="cuda"``."""
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
    """Let ``device="cuda"`` mean the CPU in `_FILES_WITH_CUDA_LITERALS`, and only
    there.

    The function can be removed when these files use the current device or a gradient's
    device.
    """
    proxy = _TorchOnCPU()
    for name in _FILES_WITH_CUDA_LITERALS:
        vars(importlib.import_module(name))["torch"] = proxy


def accept_cpu_tensors_in_optimizers() -> None:
    """Make ``tensor.type()`` return the CUDA type and ``.cuda()`` do nothing in
    Megatron's files.

    The optimizers sort parameters by strings such as "torch.cuda.FloatTensor" and move
    loaded state with ``.cuda()``. The function can be removed when the optimizers
    compare dtypes.
    """
    tensor_type = torch.Tensor.type
    tensor_cuda = torch.Tensor.cuda

    def called_from_megatron() -> bool:
        """Whether a file of Megatron called the function that calls this one."""
        caller = sys._getframe(2).f_globals.get("__name__", "")
        return caller.startswith("megatron.core.")

    def cuda_type(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Replaces ``Tensor.type``; in Megatron's files names begin with
        ``torch.cuda.``."""
        name_or_tensor = tensor_type(self, *args, **kwargs)
        if isinstance(name_or_tensor, str) and called_from_megatron():
            return name_or_tensor.replace("torch.", "torch.cuda.", 1)
        return name_or_tensor

    def cuda_or_itself(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Replaces ``Tensor.cuda``; in Megatron's files it returns the tensor
        itself."""
        if called_from_megatron():
            return self
        return tensor_cuda(self, *args, **kwargs)

    torch.Tensor.type = cuda_type
    torch.Tensor.cuda = cuda_or_itself


def use_torch_norm_after_the_last_hybrid_layer() -> None:
    """Without Transformer Engine, use `TorchRMSNorm` as HybridStack's final norm, also
    on a GPU.

    The function can be removed when HybridStackSubmodules has a field for the final
    norm.
    """
    from megatron.core.extensions.transformer_engine import HAVE_TE
    from megatron.core.models.hybrid import hybrid_block

    if not HAVE_TE:
        hybrid_block.TENorm = TorchRMSNorm


def resume_distributed_optimizer_with_torch_adam() -> None:
    """Let DistributedOptimizer load checkpoints into torch's Adam (without Apex and
    TE).

    distrib_optimizer.py expects a fused Adam. With torch's Adam it has three faults:

    - every rank reads a step from its states, also if it has no states;
    - "step" is copied from loaded tensors, which have no step;
    - all parameters get the same step tensor, so each update counts one step per
      parameter.

    The function can be removed when the three faults are repaired.
    """
    from megatron.core.optimizer import distrib_optimizer

    # Any, since methods of the class are replaced below
    optimizer_class = cast(Any, distrib_optimizer.DistributedOptimizer)
    if distrib_optimizer.HAVE_APEX_OR_TE or hasattr(
        optimizer_class, "_steps_are_unshared"
    ):
        return
    optimizer_class._steps_are_unshared = True
    state_dict = optimizer_class.state_dict
    load_state_dict = optimizer_class.load_state_dict
    sharded_state_dict = optimizer_class.sharded_state_dict
    set_states = optimizer_class._set_main_param_and_optimizer_states

    def state_dict_with_a_step(self) -> StateDict:
        """Call ``state_dict``, which reads a step from one parameter's states. During
        the call, an Adam without parameters has a step of 0."""
        adam = self.optimizer
        if any(group["params"] for group in adam.param_groups):
            return state_dict(self)
        # The value is not stored: a file has the step of the first data-parallel rank.
        step = torch.zeros((), dtype=torch.float32, device="cpu")
        adam.state["no parameter"] = {"step": step}
        try:
            return state_dict(self)
        finally:
            del adam.state["no parameter"]

    def sharded_state_dict_of_a_fresh_optimizer(self, *args: object, **kwargs: object):
        """Make Adam's states if it has none yet, then call ``sharded_state_dict``."""
        adam = self.optimizer
        # Megatron would make the states by an optimizer step, which decays parameters.
        if not adam.state:
            for group in adam.param_groups:
                for param in group["params"]:
                    adam.state[param] = {
                        "step": torch.zeros((), dtype=torch.float32, device="cpu"),
                        "exp_avg": torch.zeros_like(param),
                        "exp_avg_sq": torch.zeros_like(param),
                    }
        return sharded_state_dict(self, *args, **kwargs)

    def set_states_without_step(
        self, model_param: torch.Tensor, tensors: StateDict
    ) -> None:
        """Call ``_set_main_param_and_optimizer_states`` with a "step" of None.

        The method looks up each of Adam's states in ``tensors``, which has no step. It
        copies tensors only, so it skips None.
        """
        set_states(self, model_param, {**tensors, "step": None})

    def load_state_dict_with_own_steps(self, state_dict: StateDict) -> None:
        """Load ``state_dict``, then give each parameter a step tensor of its own.

        Megatron gives all parameters one step tensor. torch's Adam would add 1 to it
        once per parameter.
        """
        load_state_dict(self, state_dict)
        for state in self.optimizer.state.values():
            if isinstance(state.get("step"), torch.Tensor):
                state["step"] = state["step"].clone()

    optimizer_class.state_dict = state_dict_with_a_step
    optimizer_class.sharded_state_dict = sharded_state_dict_of_a_fresh_optimizer
    optimizer_class._set_main_param_and_optimizer_states = set_states_without_step
    optimizer_class.load_state_dict = load_state_dict_with_own_steps


def gather_tensors_of_different_sizes() -> None:
    """Make ``torch.distributed.all_gather`` over gloo accept tensors of different
    sizes.

    Muon gathers such tensors under ``--use-distributed-optimizer``, since each rank
    holds whole matrices. The function can be removed when gloo, like NCCL, gathers
    different sizes.
    """
    gather_equal_sizes = dist.all_gather

    def all_gather(
        tensor_list: list[torch.Tensor],
        tensor: torch.Tensor,
        group: dist.ProcessGroup | None = None,
        async_op: bool = False,
    ):
        """Replaces torch's ``all_gather`` (same arguments); if sizes differ, each rank
        broadcasts its tensor."""
        if len({received.numel() for received in tensor_list}) == 1:
            return gather_equal_sizes(
                tensor_list, tensor, group=group, async_op=async_op
            )
        members: Any = group or dist.group.WORLD
        for rank, received in enumerate(tensor_list):
            if rank == dist.get_rank(group):
                received.copy_(tensor)
            dist.broadcast(received, dist.get_global_rank(members, rank), group)
        return _FinishedStream() if async_op else None  # the caller calls .wait()

    dist.all_gather = all_gather
