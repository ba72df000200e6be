"""FlashQLA's compiled kernels, cached by what differs between calls, and called directly.

tilelang checks and repacks a kernel's arguments, and then the compiled function does so again. Here
the compiled function is called directly. For an argument that it does not read it gets some tensor
of the right shape and dtype, or memory that was allocated once.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, lru_cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor


class HeldKernels:
    """A cache of kernels, and of memory for arguments that they do not read.

    Args:
        homes: FlashQLA's modules for an architecture, by the name of their stage.
    """

    def __init__(self, homes: dict[str, ModuleType]) -> None:
        self._homes = homes
        # One cache for each object, so that kernels do not outlive it.
        self._kernel = lru_cache(maxsize=256)(self._find_kernel)
        self._blank = lru_cache(maxsize=64)(_blank)

    def _find_kernel(self, stage: str, factory: str, *args: Any) -> Callable[..., None]:
        """The compiled function of one of FlashQLA's factories; ``args`` are the factory's."""
        return bare(getattr(self._homes[stage], factory)(*args))

    @cached_property
    def _index(self) -> ModuleType:
        from flash_qla.utils import index  # pyright: ignore[reportMissingImports]

        return index

    def _places(
        self, like: Tensor, cu_seqlens: Tensor | None, count: int
    ) -> tuple[int, Tensor, Tensor, int]:
        """The number of sequences, their boundaries and first chunks, and the chunks of a row."""
        if cu_seqlens is None:
            rows, tokens = like.shape[:2]
            unread = self._blank((rows + 1,), torch.int32, like.device)
            return rows, unread, unread, -(-tokens // count)
        offsets, chunks = self._index.prepare_chunk_offsets(cu_seqlens, count)
        if offsets.dtype != cu_seqlens.dtype:
            offsets = offsets.to(cu_seqlens.dtype)
        return cu_seqlens.shape[0] - 1, cu_seqlens, offsets, chunks


def _blank(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Memory for an argument that a kernel neither reads nor writes, on any stream."""
    return torch.zeros(shape, dtype=dtype, device=device)


def bare(kernel: Any) -> Callable[..., Any]:
    """The compiled function under a tilelang kernel, which checks its arguments itself.

    Returns ``kernel`` itself if tilelang runs it in a way that is not known here.
    """
    adapter = getattr(kernel, "adapter", None)
    if adapter is None or getattr(adapter, "result_idx", True):
        return kernel
    try:
        executable = adapter.get_exportable_executable()
        module = executable.jit() if "jit" in dir(type(executable)) else executable
        return module.main
    except AttributeError:
        return kernel
