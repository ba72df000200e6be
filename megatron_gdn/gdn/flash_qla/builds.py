"""FlashQLA's kernels are compiled once per machine, in parallel processes.

The first process that needs a kernel takes a lock beside tilelang's cache and starts
``python -m megatron_gdn.warm_up``. A process waits until the cache has the kernel that
it calls.

tilelang takes up to two seconds to compute its own key of a kernel. So this module
makes an empty file for every cached kernel. The file's name is a digest of the
function's source and arguments.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial, wraps
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ...ops.kernels.builds import build_lock
from ...ops.obstacles import installed_version

logger = logging.getLogger(__name__)

# Compute capability of every Hopper GPU. Processes that see no GPU compile for Hopper.
HOPPER_CAPABILITY = (9, 0)
# With this variable set to 0, a process compiles missing kernels itself, one after the
# other.
_COMPILE_AHEAD_VARIABLE = "MEGATRON_GDN_COMPILE_AHEAD"
# Names of groups of kernels, for the option ``--uses`` of the warm-up command: "cut"
# for a long sequence in segments, "rows" for a batch, "uncut" for short documents. Some
# runs also need "states" (chunkwise context parallelism), "whole" (batch-invariant
# mode) and "recompute" (a second run of the forward).
USUAL_USES = ("cut", "rows", "uncut")


class Heads(NamedTuple):
    """The numbers of heads, and the dtype, for which FlashQLA's kernels are
    compiled."""

    key_heads: int
    value_heads: int
    dtype: torch.dtype

    @property
    def operands(self) -> str:
        """The name of the operands' dtype in flags and file names, "fp16" or "bf16"."""
        if self.dtype == torch.float16:
            return "fp16"
        return "bf16"

    @property
    def flags(self) -> str:
        """The flags of ``python -m megatron_gdn.warm_up`` for these heads."""
        return f"--heads {self.key_heads}:{self.value_heads} --operands {self.operands}"

    @property
    def lock(self) -> Path:
        """The file that a process locks while it compiles for these heads."""
        return (
            cache_folder()
            / f"flash_qla-{self.key_heads}-{self.value_heads}-{self.operands}.lock"
        )

    def __str__(self) -> str:
        return f"{self.key_heads}:{self.value_heads} heads in {self.operands}"


# What FlashQLA's next calls need; `set_next_calls` sets both.
_next_heads = Heads(0, 0, torch.bfloat16)
_next_use = "cut"
# Warm-up commands that this process has started. Dropping a Popen object would close
# the command's standard input, and the command would end.
_started_commands: dict[Heads, subprocess.Popen] = {}


def set_next_calls(heads: Heads, use: str) -> None:
    """Store what FlashQLA's next calls need: the ``heads``, and ``use``, the name of a
    group of kernels. :func:`_compile_once` reads both."""
    global _next_heads, _next_use
    _next_heads = heads
    _next_use = use


def expected_heads() -> Heads:
    """The heads that :func:`set_next_calls` has stored for FlashQLA's next call."""
    return _next_heads


def compile_once_per_machine(kernels: list[Any]) -> None:
    """Make ``kernels`` (tilelang's kernel objects) compile only once per machine, by
    replacing their method ``compile``."""
    for kernel in kernels:
        # The warm-up command calls tilelang's own ``compile`` as ``__wrapped__``.
        compile_once = partial(_compile_once, kernel, kernel.compile)
        kernel.compile = wraps(kernel.compile)(compile_once)


def _compile_once(
    kernel: object, compile_here: Callable, *args: object, **kwargs: object
) -> object:
    """Load ``kernel`` if any process has compiled it; else compile it with
    ``compile_here``.

    ``args`` and ``kwargs`` are those of tilelang's ``compile``. `_next_heads` are the
    heads of the rule that calls FlashQLA now. Each number of heads has a lock. The
    process that has the lock compiles, the others wait. A process that gets no lock
    compiles too.
    """
    if not tilelang_env().is_cache_enabled():
        return compile_here(*args, **kwargs)
    entry = cache_entry(kernel, args, kwargs, ".".join(map(str, _capability())))
    if not entry.exists():
        description = f"FlashQLA's {kernel_name_of(entry)} for {_next_heads}"
        with build_lock(_next_heads.lock, description, entry.exists) as lock:
            if lock is not None and _may_start_command():
                process = _start_command(lock)
                while not entry.exists() and process.poll() is None:
                    time.sleep(0.1)
            if lock is not None and not entry.exists():
                logger.warning(
                    "compiles %s in this process; takes up to a minute", description
                )
                compiled = compile_here(*args, **kwargs)
                mark_as_cached(entry, compiled)
                return compiled
    # tilelang loads the kernel from disk; without a lock it may compile
    return compile_here(*args, **kwargs)


def _may_start_command() -> bool:
    """Whether this process may start the warm-up command for the heads of the next
    call.

    It may on Hopper, if no command was started for these heads, and if the user did not
    switch commands off by _COMPILE_AHEAD_VARIABLE. Without a call of
    :func:`set_next_calls` the heads are not known.
    """
    switched_on = os.environ.get(_COMPILE_AHEAD_VARIABLE, "1") != "0"
    return (
        _next_heads.key_heads > 0
        and _next_heads not in _started_commands
        and switched_on
        and _capability() == HOPPER_CAPABILITY
    )


def _start_command(lock: int) -> subprocess.Popen:
    """Start the warm-up command. It inherits the file descriptor ``lock``, and ends
    when this process ends."""
    logger.warning(
        "FlashQLA's kernels and Triton's for %s are compiled from here on, on %d "
        "cores, into %r. `python -m megatron_gdn.warm_up %s` does this before a run.",
        _next_heads,
        len(os.sched_getaffinity(0)),
        str(tilelang_env().TILELANG_CACHE_DIR),
        _next_heads.flags,
    )
    _started_commands[_next_heads] = subprocess.Popen(
        # When this process ends, the system closes the pipe, and the command ends too.
        warm_up_command(_next_heads, _next_use),
        stdin=subprocess.PIPE,
        stdout=2,  # this process's standard error
        pass_fds=[lock],
        # an interrupt from the keyboard reaches this process, but not the command
        start_new_session=True,
        # the command imports the packages that this process imports
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
        },
    )
    return _started_commands[_next_heads]


def warm_up_command(heads: Heads, use: str) -> list[str]:
    """The command line that compiles kernels for ``heads``, beginning with the kernels
    of the group ``use``. ``--for-a-run`` tells the command that this process holds the
    lock."""
    uses = [use] + [other for other in USUAL_USES if other != use]
    return [
        sys.executable,
        "-m",
        "megatron_gdn.warm_up",
        *heads.flags.split(),
        "--uses",
        *uses,
        "--multiprocessors",
        str(multiprocessors()),
        "--for-a-run",
    ]


def _capability() -> tuple[int, int]:
    return torch.cuda.get_device_capability()


def multiprocessors() -> int:
    """The GPU's number of multiprocessors, by which FlashQLA chooses kernels and cuts
    sequences."""
    return torch.cuda.get_device_properties().multi_processor_count


def tilelang_env() -> Any:
    """tilelang's settings, which a program may have changed."""
    from tilelang import env  # pyright: ignore[reportMissingImports]

    return env


def cache_folder() -> Path:
    """This package's folder in tilelang's cache for the installed tilelang and
    flash-qla."""
    packages = ("tilelang", "flash-qla")
    versions = (f"{name}-{installed_version(name) or 'unknown'}" for name in packages)
    return Path(tilelang_env().TILELANG_CACHE_DIR, "megatron_gdn", "-".join(versions))


def cache_entry(kernel: Any, args: tuple, kwargs: dict[str, object], arch: str) -> Path:
    """The file that exists once tilelang cached ``kernel`` for these arguments and GPU
    ``arch``."""
    configs = sorted((kernel.pass_configs or {}).items())
    described = kernel.func_source, args, sorted(kwargs.items()), configs, arch
    digest = sha256(repr(described).encode()).hexdigest()[:32]
    return (
        cache_folder()
        / f"{kernel.func.orig_func.__name__.removeprefix('tilelang_')}-{digest}"
    )


def kernel_name_of(entry: Path) -> str:
    """The name of the kernel for which :func:`cache_entry` returned ``entry``."""
    return entry.name.rpartition("-")[0]


def mark_as_cached(entry: Path, compiled: object) -> None:
    """Create the file ``entry`` if tilelang has stored the ``compiled`` kernel on
    disk."""
    if os.path.isdir(getattr(compiled, "_tilelang_cache_path", None) or ""):
        entry.parent.mkdir(parents=True, exist_ok=True)
        # Follow no link: somebody else may have put it there.
        with suppress(OSError):
            os.close(os.open(entry, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o666))
