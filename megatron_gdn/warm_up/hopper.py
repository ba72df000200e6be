"""A stand-in for a Hopper GPU that is enough to compile kernels, but not to run them.

What tilelang and Triton keep on disk is keyed by the kernel, the target and the versions, so a
cache that was filled without a GPU serves a machine with one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

ARCH = "9.0"
TARGET = {"kind": "cuda", "arch": "sm_90a"}
MULTIPROCESSORS = 132  # of an H100 or H200 with SXM


def stand_in_for_hopper(multiprocessors: int = MULTIPROCESSORS) -> None:
    """From here on torch has a Hopper GPU that cannot be used, and tilelang compiles for it.

    Args:
        multiprocessors: FlashQLA chooses among its kernels by their number.
    """
    properties = SimpleNamespace(
        major=9, minor=0, multi_processor_count=multiprocessors, name="Hopper", gcnArchName=""
    )
    torch.cuda.is_available = lambda: True
    torch.cuda.current_device = lambda: 0
    torch.cuda.is_current_stream_capturing = lambda: False
    torch.cuda.get_device_capability = lambda device=None: (9, 0)
    torch.cuda.get_device_properties = lambda device=None: properties
    torch.cuda.synchronize = lambda device=None: None

    from tilelang.contrib import nvcc  # pyright: ignore[reportMissingImports]

    nvcc.get_target_compute_version = lambda target=None: "9.0"


@contextmanager
def record_flash_qla(called: Callable[[Any, tuple, dict[str, Any]], None]) -> Iterator[None]:
    """Inside, FlashQLA's kernels are not run: ``called`` gets each one and its arguments."""
    from tilelang.jit import JITImpl  # pyright: ignore[reportMissingImports]

    def call(kernel: Any, *args: Any, **kwargs: Any) -> Callable:
        kernel.target = TARGET
        called(kernel, args, kwargs)
        return lambda *tensors, **named: None

    usual, JITImpl.__call__ = JITImpl.__call__, call
    try:
        yield
    finally:
        JITImpl.__call__ = usual


class HopperDriver:
    """The methods of a Triton driver that are needed to compile."""

    def get_current_device(self) -> HopperDriver:
        return self  # a device that no launch uses: what is compiled here is never launched

    def get_current_stream(self, device: HopperDriver) -> int:
        return 0

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)


@contextmanager
def compile_triton_only() -> Iterator[list[bool]]:
    """Inside, a launch of a Triton kernel compiles it for Hopper and does not run it.

    Yields:
        a list that grows with each compilation: whether Triton's cache on disk had the result.
    """
    import triton
    from triton.runtime.jit import JITFunction

    launch, found = JITFunction.run, []

    def run(self: Any, *args: Any, grid: Any, warmup: bool = False, **kwargs: Any) -> Any:
        return launch(self, *args, grid=grid, warmup=True, **kwargs)

    with (
        patch.object(triton.runtime.driver, "_active", HopperDriver()),
        patch.object(
            triton.knobs.compilation, "listener", lambda **event: found.append(event["cache_hit"])
        ),
        patch.object(JITFunction, "run", run),
    ):
        yield found
