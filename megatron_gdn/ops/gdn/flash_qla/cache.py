"""Which of FlashQLA's kernels are in tilelang's cache on disk, without tilelang's slow look-up.

tilelang's key of a kernel is the program that the kernel's Python function writes. Making it takes
up to two seconds per kernel. So this module keeps a small file per kernel beside that cache. Its
name is a digest of the function's source and arguments; it holds the path of tilelang's entry.
Another file lists the kernels that a layer takes, so that a process can look for them before it
imports tilelang.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from contextlib import suppress
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

# Compute capability of every Hopper GPU. Processes that see no GPU compile for it.
HOPPER = (9, 0)


def cache_folder() -> Path:
    """tilelang's cache: TILELANG_CACHE_DIR, or ~/.tilelang/cache. Does not import tilelang."""
    if "tilelang" in sys.modules:  # a program may have set another folder there
        return Path(sys.modules["tilelang"].env.TILELANG_CACHE_DIR)
    return Path(os.environ.get("TILELANG_CACHE_DIR", os.path.expanduser("~/.tilelang/cache")))


def cache_is_used() -> bool:
    """Whether tilelang keeps its kernels there. Does not import tilelang."""
    if "tilelang" in sys.modules:
        return sys.modules["tilelang"].env.is_cache_enabled()
    return os.environ.get("TILELANG_DISABLE_CACHE", "0").lower() not in ("1", "true", "yes", "on")


class CacheEntry(NamedTuple):
    """One kernel: its name, and the file that holds the path of tilelang's entry."""

    name: str
    file: Path

    @classmethod
    def of(cls, kernel: Any, args: tuple, kwargs: dict[str, Any], arch: str) -> CacheEntry:
        """The entry of a kernel that tilelang's decorator made, called with these arguments."""
        name = kernel.func.orig_func.__name__.removeprefix("tilelang_")
        described = (
            kernel.func_source, args, sorted(kwargs.items()),
            sorted((kernel.pass_configs or {}).items()), arch,
            _version("tilelang"), _version("flash-qla"),
        )  # fmt: skip
        digest = sha256(repr(described).encode()).hexdigest()[:32]
        return cls(name, cache_folder() / "megatron_gdn" / f"{name}-{digest}")

    def is_there(self) -> bool:
        try:
            return Path(self.file.read_text()).is_dir()
        except OSError:
            return False

    def remember(self, made: Any) -> None:
        """Write the file. ``made``: the kernel that tilelang compiled; it knows its path."""
        place = getattr(made, "_tilelang_cache_path", None)
        if place is None or not os.path.isdir(place) or self.is_there():
            return
        _write(self.file, str(place))


class Needed(NamedTuple):
    """Names a layer's list of FlashQLA's kernels, a file beside tilelang's cache.

    Attributes:
        heads: as text.
        part: one of the parts of ``python -m megatron_gdn.warm_up``.
        multiprocessors: of the GPU; FlashQLA chooses among its kernels by their number.
    """

    heads: str
    part: str
    multiprocessors: int

    @property
    def file(self) -> Path:
        versions = _version("tilelang"), _version("flash-qla")
        digest = sha256(repr((self, versions)).encode()).hexdigest()[:32]
        return cache_folder() / "megatron_gdn" / f"needed-{digest}"

    def note(self, entries: Iterable[CacheEntry]) -> None:
        """Write the list. Its kernels need not be there yet.

        If the folder cannot be written, there is no list. Every run then starts processes to look.
        """
        with suppress(OSError):
            _write(self.file, "\n".join(entry.file.name for entry in entries))

    def is_there(self) -> bool:
        """Whether all kernels of the list are there; False if nobody wrote it."""
        try:
            names = self.file.read_text().split()
        except OSError:
            return False
        return all(CacheEntry("", self.file.with_name(name)).is_there() for name in names)


def _write(path: Path, text: str) -> None:
    """Atomically: another process reads all of the new text, or the old one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    own = path.with_suffix(f".{os.getpid()}")
    own.write_text(text)
    own.replace(path)


def in_tilelangs_cache(kernel: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Whether tilelang has this kernel on disk, by its own key, which takes up to two seconds."""
    from tilelang.cache import _resolve_cache_dispatch  # pyright: ignore[reportMissingImports]
    from tilelang.transform.pass_config import (  # pyright: ignore[reportMissingImports]
        normalize_pass_configs,
    )

    cache, context, _ = _resolve_cache_dispatch(
        kernel.target, kernel.target_host, kernel.execution_backend, kernel.verbose
    )
    key = cache._generate_key(
        func=kernel.get_tir(*args, **kwargs), out_idx=kernel.out_idx,
        execution_backend=context.execution_backend.name, args=(), target=context.target,
        target_host=context.target_host, pass_configs=normalize_pass_configs(kernel.pass_configs),
        compile_flags=kernel.compile_flags,
    )  # fmt: skip
    return os.path.isdir(cache._get_cache_path(key))


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"
