"""The Triton kernels of this package are compiled by one process of a machine, and not in silence.

Triton compiles a kernel at its first launch, for seconds each, and keeps it on disk. Here the
compilation holds a lock beside that cache, so that other processes find the result, and says what
takes its time (:mod:`..build_lock`). Each variant of a kernel (dtypes, sizes, alignments) has a
lock of its own, so processes that want different ones compile side by side.
"""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections.abc import Callable
from functools import cache, wraps
from importlib import import_module
from pathlib import Path
from typing import Any

from ..build_lock import held

logger = logging.getLogger(__name__)

_MODULES = (
    "front.gdn_forward_kernels", "front.gdn_backward_kernels", "front.fused_edges_kernels",
    "readout.per_head_kernels",
    "delta_rule.half_kernels", "state_maps.chains_kernels", "kernels.reduce",
)  # fmt: skip
_QUICK = 0.5  # seconds that are not worth a word: Triton found the kernel on disk


@cache
def watch_triton_builds() -> None:
    """Have the mixer's kernels compiled as the top of this file says, in this process."""
    from triton.runtime.jit import JITFunction

    package = __name__.rsplit(".", 2)[0]  # megatron_gdn.ops
    for name in _MODULES:
        for kernel in vars(import_module(f"{package}.{name}")).values():
            # The method that a launch calls for what this process has not compiled or loaded.
            if isinstance(kernel, JITFunction) and hasattr(kernel, "_do_compile"):
                kernel._do_compile = by_one_process(kernel.__name__, kernel._do_compile)


def by_one_process(name: str, compile: Callable) -> Callable:
    """``compile``, which only one process of a machine calls at a time for this variant.

    Its first argument is what Triton tells the variants of a kernel apart by.
    """

    @wraps(compile)
    def watched(key: Any, *args: Any, **kwargs: Any) -> Any:
        import triton

        variant = hashlib.sha256(repr(key).encode()).hexdigest()[:16]
        path = Path(triton.knobs.cache.dir) / "megatron_gdn" / f"{name}-{variant}.lock"
        with held(path, f"Triton's {name}", patience=_QUICK):
            began, say = time.monotonic(), threading.Timer(_QUICK, _say, (name,))
            say.daemon = True
            say.start()
            try:
                return compile(key, *args, **kwargs)
            finally:
                say.cancel()
                took = time.monotonic() - began
                if took > _QUICK:
                    logger.warning("compiled Triton's %s in %.0f s", name, took)

    return watched


def _say(name: str) -> None:
    logger.warning(
        "compiles Triton's %s, which takes some seconds. `python -m megatron_gdn.warm_up --help` "
        "tells how to do this before a run.",
        name,
    )
