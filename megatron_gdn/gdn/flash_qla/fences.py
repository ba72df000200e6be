"""Fences that FlashQLA's kernels lack before their bulk stores (docs/determinism.md).

On Hopper, ordinary stores and bulk copies (TMA) reach shared memory through two
proxies. Each thread that wrote to shared memory must issue ``fence.proxy.async`` before
it signals that its part is done (PTX ISA, "Async proxy"). Without the fence the bulk
store may send old contents. flash-qla 0.1.3, as tilelang 0.1.15 compiles it, lacks some
of these fences. A hook adds them to a kernel's CUDA source. The kernels for Blackwell
were not examined.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from functools import cache
from types import ModuleType

from ...ops.obstacles import log_obstacle_once

# Patterns and names in the CUDA source that tilelang generates: a bulk store (group 1
# is its buffer), a signal to other threads, a fence, and the head of a kernel whose
# source gets fences.
_BULK_STORE = re.compile(r"\btl::tma_store\(\w+, \(?&\(\(\(\w+\s?\*\)(\w+)\)")
_SIGNAL_TO_THREADS = re.compile(
    r"\.arrive\w*\(|\b__syncthreads\(|\b__sync_thread_partial\b|\btl::tma_store\("
)
_FENCE = "tl::fence_proxy_async();"
_KERNELS_TO_FENCE = re.compile(
    r"__global__ void .*\btilelang_(?:kkt_solve|fused_chunk_gdr_(?:fwd|bwd))_kernel"
)
# This flag is part of a kernel's key in tilelang's cache. So a kernel that was compiled
# without fences is not taken from the cache. Raise the flag's number when
# ``missing_fences`` is changed to find more fences.
_FENCED_FLAG = "-DMEGATRON_GDN_PROXY_FENCES=1"
_COMPILE_FLAGS = "tl.device_compile_flags"
_POSTPROCESSING_HOOK = "tilelang_callback_cuda_postproc"


def missing_fences(source: str) -> list[int]:
    """Numbers (from 0) of the lines of CUDA source before which a fence is missing.

    A bulk store (TMA) copies a buffer from shared to global memory while the threads go
    on. A write to the buffer is an assignment or a ``stmatrix``. The source must have a
    fence between the write and the next signal to other threads.
    """
    lines = source.split("\n")
    buffers = "|".join(sorted(set(_BULK_STORE.findall(source))))
    target = rf"\(\(\w+\s?\*\)(?:{buffers})\)"
    write = re.compile(
        rf"stmatrix\w*\(.*{target}|{target}[^=;]*\)? = |{target}\[.*\] = "
    )
    missing = []
    needs_fence = False  # after a write, until the next fence
    for number, line in enumerate(lines):
        if _FENCE in line:
            needs_fence = False
        elif needs_fence and _SIGNAL_TO_THREADS.search(line):
            missing.append(number)
            needs_fence = False
        if "tma_" not in line and write.search(line):
            needs_fence = True
    return missing


def with_fences(source: str) -> str:
    """``source`` with a fence before each line that :func:`missing_fences` finds."""
    lines = source.split("\n")
    for number in reversed(missing_fences(source)):
        indent = lines[number][: len(lines[number]) - len(lines[number].lstrip())]
        lines.insert(number, indent + _FENCE)
    return "\n".join(lines)


@cache
def fence_bulk_stores(*kernels: tuple[ModuleType, str]) -> None:
    """Make this process compile ``kernels``, pairs of module and name, with all fences:
    register a hook with tilelang, and replace the kernels in their modules."""
    import tvm_ffi  # pyright: ignore[reportMissingImports]
    from tilelang.engine.callback import register_cuda_postproc  # pyright: ignore[reportMissingImports]

    earlier_hook = tvm_ffi.get_global_func(_POSTPROCESSING_HOOK, allow_missing=True)

    def hook(source: str, target: object) -> str:
        """Add fences to a kernel's CUDA ``source``; tilelang passes the ``target``
        GPU."""
        if earlier_hook is not None:
            source = earlier_hook(source, target)
        if _KERNELS_TO_FENCE.search(source):
            return with_fences(source)
        return source

    register_cuda_postproc(hook)
    for module, name in kernels:
        kernel = getattr(module, name)
        configs = dict(kernel.pass_configs or {})
        # The flag changes the key in tilelang's cache, so that no kernel without fences
        # is taken from the cache.
        configs[_COMPILE_FLAGS] = list(configs.get(_COMPILE_FLAGS, ())) + [_FENCED_FLAG]
        # The old kernel object may hold code that this process compiled without fences.
        fenced = dataclasses.replace(kernel, pass_configs=configs)
        # Another package may have replaced the hook, so every compiled source is
        # checked.
        fenced.compile = _compile_with_check(name, fenced.compile)
        setattr(module, name, fenced)


def _compile_with_check(name: str, compile: Callable) -> Callable:
    """Wrap ``compile`` of the kernel ``name``: the wrapper checks that no fence is
    missing."""

    def compile_and_check(*args: object, **kwargs: object) -> object:
        """Return the kernel that ``compile`` makes; raise if its source lacks a
        fence."""
        compiled = compile(*args, **kwargs)
        source = compiled.get_kernel_source()
        if missing_fences(source):
            raise RuntimeError(
                f"FlashQLA's {name} was compiled without the fences that its bulk "
                "stores need, and may return wrong gradients: another hook changed its "
                "source, now or in tilelang's cache. Remove the hook and the cache "
                "(~/.tilelang/cache), or choose backend='fla'."
            )
        if len(_BULK_STORE.findall(source)) != source.count("tl::tma_store("):
            log_obstacle_once(
                f"FlashQLA's {name} has bulk stores in a form that is not known here; "
                "whether the stores have fences was not checked.",
                "cuda",
            )
        return compiled

    return compile_and_check
