"""A simulated Hopper GPU, on which layers run forward and backward without computing
values.

Tensors on the simulated GPU are torch's fake tensors, with a shape, strides and a
dtype, but no memory. Tensors on the CPU are real, since layers read the values of
tables on the CPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from importlib.util import find_spec
from types import SimpleNamespace
from typing import TYPE_CHECKING
from unittest.mock import patch

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

if TYPE_CHECKING:
    from triton.backends.compiler import GPUTarget

HOPPER_ARCH = "9.0"  # Hopper's compute capability, as tilelang writes it


@contextmanager
def simulated_hopper(multiprocessors: int = 132) -> Iterator[None]:
    """In this context torch reports a Hopper GPU with this number of
    ``multiprocessors``, and Triton and tilelang compile for Hopper.

    Functions of ``torch.cuda`` and of both compilers are replaced in this process.
    """
    properties = SimpleNamespace(
        major=9,
        minor=0,
        multi_processor_count=multiprocessors,
        name="Hopper",
        gcnArchName="",
    )
    # Make the first fake tensor before torch reports a GPU; later torch would allocate
    # a real one.
    torch._C._ensureCUDADeviceGuardSet()
    with FakeTensorMode():
        torch.empty(0, dtype=torch.float32, device="cuda")
    answers = {
        "_lazy_init": lambda: None,
        "is_available": lambda: True,
        "current_device": lambda: 0,
        "device": lambda *_: nullcontext(),
        "is_current_stream_capturing": lambda: False,
        "get_device_capability": lambda device=None: (9, 0),
        "get_device_properties": lambda device=None: properties,
        "synchronize": lambda device=None: None,
    }
    import triton

    with (
        patch.object(triton.runtime.driver, "_active", HopperDriver()),
        ExitStack() as patches,
    ):
        for name, answer in answers.items():
            patches.enter_context(patch.object(torch.cuda, name, answer))
        if find_spec("tilelang") is not None:
            from tilelang.contrib import nvcc  # pyright: ignore[reportMissingImports]

            version = patch.object(
                nvcc, "get_target_compute_version", lambda target=None: HOPPER_ARCH
            )
            patches.enter_context(version)
        yield


class HopperDriver:
    """A Triton driver without a GPU; it has the methods that Triton calls to compile a
    kernel."""

    def get_current_device(self) -> HopperDriver:
        """This driver, in place of a device number."""
        return self  # Triton only passes the device to `get_current_stream`

    def get_current_stream(self, device: HopperDriver) -> int:
        """The handle of the default stream; nothing runs on it."""
        return 0

    def get_current_target(self) -> GPUTarget:
        """What Triton compiles for: Hopper, with warps of 32 threads."""
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)


@contextmanager
def without_computing() -> Iterator[None]:
    """In this context GPU tensors have no memory; forward and backward run without
    values."""

    def address(tensor: Tensor) -> int:
        """``data_ptr`` of a fake tensor, as if its storage were at address 0. Triton
        compiles other variants for addresses that are aligned."""
        return int(tensor.storage_offset()) * tensor.element_size()

    with (
        _FakeGpuTensors(),
        patch.object(FakeTensor, "data_ptr", address, create=True),
        patch.object(torch.autograd, "_engine_run_backward", _run_backward),
    ):
        yield


class _FakeModeWithoutDevice(FakeTensorMode):
    """A mode for fake tensors that never initialises a GPU."""

    @property
    def avoid_device_init(self) -> bool:
        """True, since the GPU that torch reports does not exist."""
        return True


class _FakeGpuTensors(TorchDispatchMode):
    """A mode in which GPU tensors are fake and CPU tensors are computed as usual."""

    def __init__(self) -> None:
        super().__init__()
        self._fake_mode = _FakeModeWithoutDevice(allow_non_fake_inputs=True)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        """torch calls this method for each operator ``function``; with a GPU tensor or
        device among the arguments, the result is fake. ``types`` is not read."""
        kwargs = kwargs or {}
        if function is torch.ops.aten._pin_memory.default:
            return args[0]  # to pin memory, torch would call the GPU's driver
        if any(_is_on_gpu(x) for x in tree_leaves((args, kwargs))):
            with self._fake_mode:
                return function(*args, **kwargs)
        return function(*args, **kwargs)


def _is_on_gpu(x: object) -> bool:
    """Whether ``x`` is a fake tensor (all of these are on the GPU) or a CUDA device."""
    return isinstance(x, FakeTensor) or (
        isinstance(x, torch.device) and x.type == "cuda"
    )


def _run_backward(
    outputs: Sequence[Tensor],
    gradients: Sequence[Tensor | None],
    keep_graph: bool,
    create_graph: bool,
    inputs: Sequence[Tensor] = (),
    *_: object,
    **__: object,
) -> tuple[Tensor, ...]:
    """Replaces autograd's engine, which would use streams of the GPU; takes the same
    arguments.

    Each backward written in Python runs once, with gradients of zero, under autograd if
    ``create_graph``. The backward of the last forward comes first, as in autograd.
    torch's own backwards launch no kernels that need compiling, so they are skipped.
    Returns zeros as the gradients of ``inputs``; ignores ``keep_graph``.
    """
    nodes: set = set()
    waiting: list = [output.grad_fn for output in outputs]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in nodes:
            nodes.add(node)
            waiting += [source for source, _ in node.next_functions]
    with torch.set_grad_enabled(create_graph):
        for node in sorted(nodes, key=lambda node: -node._sequence_nr()):
            if hasattr(node, "apply"):  # only a backward written in Python has it
                metadata = node._input_metadata  # one entry per output of the forward
                zeros = (
                    torch.zeros(x.shape, dtype=x.dtype, device=x.device)
                    for x in metadata
                )
                node.apply(*zeros)
    return tuple(torch.zeros_like(x) for x in inputs)
