"""Which of FlashQLA's kernels are in tilelang's cache on disk, without tilelang's slow look-up.

tilelang's key of a kernel is the program that the kernel's Python function writes. Making it takes
up to two seconds per kernel. So this module keeps a small file per kernel beside that cache. Its
name is a digest of the function's source and arguments; it holds the path of tilelang's entry,
from the folder of the cache on: a copy of the cache elsewhere is found as well.
"""

from __future__ import annotations

import os
import sys
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple


def tilelang_cache() -> Path:
    """TILELANG_CACHE_DIR, or ~/.tilelang/cache. Does not import tilelang."""
    if "tilelang" in sys.modules:  # a program may have set another folder there
        return Path(sys.modules["tilelang"].env.TILELANG_CACHE_DIR)
    return Path(os.environ.get("TILELANG_CACHE_DIR", os.path.expanduser("~/.tilelang/cache")))


def cache_folder() -> Path:
    """The folder of this package within :func:`tilelang_cache`."""
    return tilelang_cache() / "megatron_gdn"


def cache_is_used() -> bool:
    """Whether tilelang keeps its kernels there. Does not import tilelang."""
    if "tilelang" in sys.modules:
        return sys.modules["tilelang"].env.is_cache_enabled()
    return os.environ.get("TILELANG_DISABLE_CACHE", "0").lower() not in ("1", "true", "yes", "on")


def versions() -> tuple[str, ...]:
    """Of tilelang and flash-qla, which a compiled kernel depends on."""
    return _version("tilelang"), _version("flash-qla")


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
            sorted((kernel.pass_configs or {}).items()), arch, *versions(),
        )  # fmt: skip
        digest = sha256(repr(described).encode()).hexdigest()[:32]
        return cls(name, cache_folder() / f"{name}-{digest}")

    def is_there(self) -> bool:
        try:
            return (tilelang_cache() / self.file.read_text()).is_dir()
        except OSError:
            return False

    def remember(self, made: Any) -> None:
        """Write the file. ``made``: the kernel that tilelang compiled; it knows its path."""
        place = getattr(made, "_tilelang_cache_path", None)
        if place is None or not os.path.isdir(place) or self.is_there():
            return
        self.file.parent.mkdir(parents=True, exist_ok=True)
        own = self.file.with_suffix(f".{os.getpid()}")  # another process reads all of it or nothing
        own.write_text(os.path.relpath(place, tilelang_cache()))
        own.replace(self.file)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"
