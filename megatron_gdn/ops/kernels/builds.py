"""Each Triton kernel of this package is compiled by one process of a machine, and the log shows it.

Triton compiles a kernel at its first launch, which takes seconds, and keeps it on disk. Each
variant of a kernel (dtypes, sizes, alignments) has its own lock (:mod:`..build_lock`), so processes
that want different variants compile side by side.
"""

from __future__ import annotations

import hashlib
import logging
import threading
from collections.abc import Callable
from functools import cache, wraps
from importlib import import_module
from pathlib import Path
from typing import Any

from ..build_lock import build_lock

logger = logging.getLogger(__name__)

_MODULES = (
    "gdn.front_forward_kernels", "gdn.front_backward_kernels", "front.fused_edges_kernels",
    "readout.per_head_kernels",
    "gdn.rule.half_kernels", "state_maps.chains_kernels", "kernels.reduce",
)  # fmt: skip
_QUICK = 0.5  # seconds; below this nothing is logged: Triton found the kernel on disk


@cache
def watch_triton_builds() -> None:
    """Make Triton compile the mixer's kernels as the top of this file says, in this process."""
    from triton.runtime.jit import JITFunction

    package = __name__.rsplit(".", 2)[0]  # megatron_gdn.ops
    for name in _MODULES:
        for kernel in vars(import_module(f"{package}.{name}")).values():
            # A launch calls this method for a variant that this process has not loaded yet.
            if isinstance(kernel, JITFunction) and hasattr(kernel, "_do_compile"):
                kernel._do_compile = by_one_process(kernel.__name__, kernel._do_compile)


def by_one_process(name: str, compile: Callable) -> Callable:
    """Wrap ``compile`` so that only one process of a machine at a time calls it for a variant.

    Its first argument is Triton's key of the variant.
    """

    @wraps(compile)
    def watched(key: Any, *args: Any, **kwargs: Any) -> Any:
        import triton

        variant = hashlib.sha256(repr(key).encode()).hexdigest()[:16]
        path = Path(triton.knobs.cache.dir) / "megatron_gdn" / f"{name}-{variant}.lock"
        with build_lock(path, f"Triton's {name}", patience=_QUICK):
            say = threading.Timer(
                _QUICK, logger.warning,
                ("compiles Triton's %s, which takes some seconds. `python -m megatron_gdn.warm_up "
                 "--help` shows how to do this before a run.", name),
            )  # fmt: skip
            say.daemon = True
            say.start()
            try:
                return compile(key, *args, **kwargs)
            finally:
                say.cancel()

    return watched
