"""FlashQLA's kernels are compiled once per machine, in parallel processes, and the log shows it.

tilelang compiles a kernel at its first call, which takes minutes on one core. Here the first
process that needs a kernel takes a lock beside tilelang's cache and starts ``python -m
megatron_gdn.warm_up``: when a layer is built (:func:`compile_early`), or when a step calls a
missing kernel. Every process goes on as soon as the cache has the kernel that it calls
(:mod:`...ops.kernels.builds`).

tilelang's own key of a kernel takes up to two seconds to make. So an empty file per kernel lies
beside that cache, whose name has a digest of the function's source and arguments.
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

# Compute capability of every Hopper GPU. Processes that see no GPU compile for it.
HOPPER = (9, 0)
# Set to 0: this process itself compiles the kernels that it misses, one after the other.
_SWITCH = "MEGATRON_GDN_COMPILE_AHEAD"
# Groups of kernels: for a long sequence cut into parts, a batch of rows, and short documents; and
# those that not every run takes, for states in and out (context parallelism by state passing),
# batch-invariant mode, and a second run of the forward.
USUAL_PARTS = ("cut", "rows", "uncut")
PARTS = (*USUAL_PARTS, "states", "whole", "again")


class Heads(NamedTuple):
    """What FlashQLA's kernels are compiled for."""

    key: int
    value: int
    dtype: torch.dtype

    @property
    def operands(self) -> str:
        return "fp16" if self.dtype == torch.float16 else "bf16"

    @property
    def flags(self) -> str:
        """The flags of ``python -m megatron_gdn.warm_up`` for these heads."""
        return f"--heads {self.key}:{self.value} --operands {self.operands}"

    @property
    def lock(self) -> Path:
        """The file that a process locks while it compiles for these heads."""
        return cache_folder() / f"flash_qla-{self.key}-{self.value}-{self.operands}.lock"

    def done_file(self, part: str, multiprocessors: int) -> Path:
        """A file that exists once all kernels of this part are compiled for such a GPU."""
        of = self.key, self.value, self.operands, part, multiprocessors
        return cache_folder() / "-".join(map(str, ("ready", *of)))

    def __str__(self) -> str:
        return f"{self.key}:{self.value} heads in {self.operands}"


_heads, _part = Heads(0, 0, torch.bfloat16), PARTS[0]  # not known yet
# Commands that this process has started. A command ends when this process drops its Popen object,
# which closes the command's standard input.
_started: dict[Heads, subprocess.Popen] = {}


def set_next_calls(heads: Heads, part: str) -> None:
    """Set the heads and the part of FlashQLA's next calls; a kernel's arguments lack them."""
    global _heads, _part
    _heads, _part = heads, part


def expected_heads() -> Heads:
    """The heads of FlashQLA's next call."""
    return _heads


def compile_early(heads: Heads, part: str) -> None:
    """Start processes that compile the kernels of a layer being built, and do not wait for them.

    They compile the kernels of other parts after those of ``part``, since batches may differ.
    """
    wanted = torch.cuda.is_available() and cache_is_used() and _may_start(heads)
    if not wanted or heads.done_file(part, multiprocessors()).exists():
        return
    with (
        suppress(OSError),  # a folder that cannot be written; the first call says so
        build_lock(heads.lock, f"FlashQLA for {heads}", wait=False) as lock,
    ):
        if lock is not None:
            _start(heads, part, lock)


def watch_builds(kernels: list[Any]) -> None:
    """Let each of tilelang's objects ``kernels`` compile once per machine."""
    for kernel in kernels:
        # The processes that compile ahead call what this wraps, as its ``__wrapped__``.
        kernel.compile = wraps(kernel.compile)(partial(_once_per_machine, kernel, kernel.compile))


def _once_per_machine(kernel: Any, compile_here: Callable, *args: Any, **kwargs: Any) -> Any:
    """Compile a kernel here, or find on disk what another process of the machine compiles."""
    if not cache_is_used():
        return compile_here(*args, **kwargs)
    entry = CacheEntry.of(kernel, args, kwargs, ".".join(map(str, _capability())))
    if not entry.is_there():
        what = f"FlashQLA's {entry.name} for {_heads}"
        with build_lock(_heads.lock, what, entry.is_there) as lock:
            if lock is not None and _may_start(_heads):
                process = _start(_heads, _part, lock)
                while not entry.is_there() and process.poll() is None:
                    time.sleep(0.1)
            if lock is not None and not entry.is_there():
                logger.warning("compiles %s in this process; takes up to a minute", what)
                made = compile_here(*args, **kwargs)
                entry.remember(made)
                return made
    return compile_here(*args, **kwargs)  # found on disk


def _start(heads: Heads, part: str, lock: int) -> subprocess.Popen:
    """Start the command for these heads. It inherits the lock, and ends with this process."""
    logger.warning(
        "FlashQLA's kernels and Triton's for %s are compiled from here on, on %d cores, into %s. "
        "`python -m megatron_gdn.warm_up %s` does this before a run.",
        heads, len(os.sched_getaffinity(0)), tilelang_cache(), heads.flags,
    )  # fmt: skip
    _started[heads] = subprocess.Popen(
        # The command ends when its standard input does: the system closes that with this process.
        command(heads, part), stdin=subprocess.PIPE, stdout=2, pass_fds=[lock],
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)},
    )  # fmt: skip
    return _started[heads]


def command(heads: Heads, part: str) -> list[str]:
    """The command line that compiles these heads' kernels, those of this part first."""
    parts = [part, *(other for other in USUAL_PARTS if other != part)]
    return [
        sys.executable, "-m", "megatron_gdn.warm_up", *heads.flags.split(), "--parts", *parts,
        "--multiprocessors", str(multiprocessors()), "--for-a-run",
    ]  # fmt: skip


def _may_start(heads: Heads) -> bool:
    """Whether the command can compile for this GPU and has not been started for these heads."""
    wanted = heads.key > 0 and heads not in _started and os.environ.get(_SWITCH, "1") != "0"
    return wanted and _capability() == HOPPER


def _capability() -> tuple[int, int]:
    return torch.cuda.get_device_capability()


def multiprocessors() -> int:
    """The multiprocessors of this GPU; FlashQLA chooses kernels and cuts by their number."""
    return torch.cuda.get_device_properties().multi_processor_count


def tilelang_cache() -> Path:
    """TILELANG_CACHE_DIR, or ~/.tilelang/cache. Does not import tilelang."""
    if "tilelang" in sys.modules:  # a program may have set another folder there
        return Path(sys.modules["tilelang"].env.TILELANG_CACHE_DIR)
    return Path(os.environ.get("TILELANG_CACHE_DIR", os.path.expanduser("~/.tilelang/cache")))


def cache_folder() -> Path:
    """This package's files in tilelang's cache, for versions on which a kernel depends."""
    packages = ("tilelang", "flash-qla")
    versions = (f"{name}-{installed_version(name) or 'unknown'}" for name in packages)
    return tilelang_cache() / "megatron_gdn" / "-".join(versions)


def cache_is_used() -> bool:
    """Whether tilelang keeps its kernels on disk. Does not import tilelang."""
    if "tilelang" in sys.modules:
        return sys.modules["tilelang"].env.is_cache_enabled()
    return os.environ.get("TILELANG_DISABLE_CACHE", "0").lower() not in ("1", "true", "yes", "on")


class CacheEntry(NamedTuple):
    """One kernel: its name, and a file that exists once tilelang has it in its cache."""

    name: str
    file: Path

    @classmethod
    def of(cls, kernel: Any, args: tuple, kwargs: dict[str, Any], arch: str) -> CacheEntry:
        """The entry of a kernel that tilelang's decorator made, called with these arguments."""
        name = kernel.func.orig_func.__name__.removeprefix("tilelang_")
        configs = sorted((kernel.pass_configs or {}).items())
        described = kernel.func_source, args, sorted(kwargs.items()), configs, arch
        digest = sha256(repr(described).encode()).hexdigest()[:32]
        return cls(name, cache_folder() / f"{name}-{digest}")

    def is_there(self) -> bool:
        return self.file.exists()

    def remember(self, made: Any) -> None:
        """Make the file of ``made``, the kernel that tilelang compiled, if tilelang has kept it."""
        if os.path.isdir(getattr(made, "_tilelang_cache_path", None) or ""):
            self.file.parent.mkdir(parents=True, exist_ok=True)
            self.file.touch()
