"""Fails when the host reads what a device holds: a GPU would make the host wait
there."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

_METHODS = (
    "tolist",
    "item",
    "cpu",
    "numpy",
    "__bool__",
    "__int__",
    "__float__",
    "__index__",
    "nonzero",
    "is_nonzero",
    "unique",
    "unique_consecutive",
    "equal",
    "allclose",
)
_READS = {getattr(torch.Tensor, name) for name in _METHODS}
_READS |= {
    torch.equal,
    torch.nonzero,
    torch.unique,
    torch.unique_consecutive,
    torch.allclose,
}


class HostRead(AssertionError):
    pass


class _Functions(TorchFunctionMode):
    """Methods that read without a dispatched operation, ``tolist`` among them."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in _READS:
            raise HostRead(f"the host reads a tensor: {func.__name__}")
        return func(*args, **(kwargs or {}))


class _Operations(TorchDispatchMode):
    """Operations whose result, or the size of it, the host would wait for."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        reads = torch.Tag.data_dependent_output in func.tags
        sized = torch.Tag.dynamic_output_shape in func.tags
        # only a mask selects as many as it holds
        if func is torch.ops.aten.index.Tensor:
            sized = any(
                index is not None and index.dtype == torch.bool for index in args[1]
            )
        if reads or sized:
            raise HostRead(f"the host reads a tensor: {func}")
        return func(*args, **(kwargs or {}))


@contextmanager
def no_host_reads() -> Iterator[None]:
    with _Functions(), _Operations():
        yield


@contextmanager
def waiting_refused() -> Iterator[None]:
    """On a GPU: CUDA raises where the host would wait for it."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
