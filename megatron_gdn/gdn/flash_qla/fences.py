"""Fences that FlashQLA's kernels lack before their bulk stores (docs/determinism.md).

On Hopper, ordinary stores and bulk copies (TMA) reach shared memory through two proxies. Between
the two, each thread that wrote must issue ``fence.proxy.async`` before it signals that its part is
done (PTX ISA, "Async proxy"); else the bulk store may send old contents. flash-qla 0.1.3 leaves
that fence out where dq, dk and dv (``fused_bwd``) and o (``fused_fwd``) are stored, and tilelang
0.1.15 does not add it, because other warps issue the copy. (In ``kkt_solve`` tilelang fences the
thread that issues it; here the writers get fences as well.) The kernels for Blackwell were not
examined. A hook that gets a kernel's CUDA source before it is compiled adds the fences.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from functools import cache
from typing import Any

from ...ops.obstacles import say_once

_BULK_STORE = re.compile(r"\btl::tma_store\(\w+, \(?&\(\(\(\w+\s?\*\)(\w+)\)")
_SIGNAL = re.compile(r"\.arrive\w*\(|\b__syncthreads\(|\b__sync_thread_partial\b|\btl::tma_store\(")
_FENCE = "tl::fence_proxy_async();"
_KERNELS = re.compile(
    r"__global__ void .*\btilelang_(?:kkt_solve|fused_chunk_gdr_(?:fwd|bwd))_kernel"
)
# Part of the key of tilelang's cache on disk, which may hold kernels without fences as well. Raise
# the number when ``missing_fences`` is changed to find more.
_MARK = "-DMEGATRON_GDN_PROXY_FENCES=1"
_FLAGS = "tl.device_compile_flags"
_HOOK = "tilelang_callback_cuda_postproc"


def missing_fences(source: str) -> list[int]:
    """Lines (from 0) of CUDA source before which a fence of the writing threads is missing.

    A write is an assignment to, or a ``stmatrix`` into, a buffer that some bulk store sends out.
    In the text a fence must follow the write before the next signal to other threads.
    """
    lines = source.split("\n")
    buffers = "|".join(sorted(set(_BULK_STORE.findall(source))))
    if not buffers:
        return []
    target = rf"\(\(\w+\s?\*\)(?:{buffers})\)"
    write = re.compile(rf"stmatrix\w*\(.*{target}|{target}[^=;]*\)? = |{target}\[.*\] = ")
    found = []
    pending = False
    for number, line in enumerate(lines):
        if _FENCE in line:
            pending = False
        elif pending and _SIGNAL.search(line):
            found.append(number)
            pending = False
        if "tma_" not in line and write.search(line):
            pending = True
    return found


def with_fences(source: str) -> str:
    """The same source with :func:`missing_fences` added."""
    lines = source.split("\n")
    for number in reversed(missing_fences(source)):
        indent = lines[number][: len(lines[number]) - len(lines[number].lstrip())]
        lines.insert(number, indent + _FENCE)
    return "\n".join(lines)


@cache
def fence_bulk_stores(*kernels: tuple[Any, str]) -> None:
    """From now on this process compiles these kernels with the fences that they lack."""
    import tvm_ffi  # pyright: ignore[reportMissingImports]
    from tilelang.engine.callback import register_cuda_postproc  # pyright: ignore[reportMissingImports]

    before = tvm_ffi.get_global_func(_HOOK, allow_missing=True)

    def hook(source: str, target: Any) -> str:
        if before is not None:
            source = before(source, target)
        return with_fences(source) if _KERNELS.search(source) else source

    register_cuda_postproc(hook)
    for module, name in kernels:
        kernel = getattr(module, name)
        configs = dict(kernel.pass_configs or {})
        configs[_FLAGS] = [*configs.get(_FLAGS, ()), _MARK]
        # A new object also forgets what was compiled without fences in this process.
        again = dataclasses.replace(kernel, pass_configs=configs)
        # At its first use: a hook that was set later may have replaced this one.
        again.compile = _checked(name, again.compile)
        setattr(module, name, again)


def _checked(name: str, compile: Callable) -> Callable:
    def compile_and_check(*args: Any, **kwargs: Any) -> Any:
        made = compile(*args, **kwargs)
        source = made.get_kernel_source()
        if missing_fences(source):
            raise RuntimeError(
                f"FlashQLA's {name} was compiled without the fences that its bulk stores need, and "
                f"may hand on wrong gradients: another hook for CUDA source took the place of "
                f"megatron_gdn's, or left this in tilelang's cache. Remove the hook and the cache "
                f"(~/.tilelang/cache), or choose backend='fla'."
            )
        if len(_BULK_STORE.findall(source)) != source.count("tl::tma_store("):
            say_once(
                f"FlashQLA's {name} has bulk stores in a form that is not known here; whether they "
                f"are fenced was not checked.",
                "cuda",
            )
        return made

    return compile_and_check
