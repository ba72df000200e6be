"""Which of FlashQLA's kernels lie in tilelang's cache on disk, told without tilelang's work.

tilelang finds a kernel in its cache by the program that the kernel's Python function writes, which
takes up to two seconds per kernel. Beside that cache lies a small file per kernel here, named after
the function's source and arguments; it holds the path of tilelang's entry.
"""

from __future__ import annotations

import os
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

# Other processes are told their target; it is this one on every Hopper GPU.
HOPPER = (9, 0)


def cache_folder() -> Path:
    """tilelang's cache: TILELANG_CACHE_DIR, or ~/.tilelang/cache."""
    from tilelang import env  # pyright: ignore[reportMissingImports]

    return Path(env.TILELANG_CACHE_DIR)


def cache_is_used() -> bool:
    from tilelang import env  # pyright: ignore[reportMissingImports]

    return env.is_cache_enabled()


class CacheEntry(NamedTuple):
    """One kernel: its name, and the file that holds the path of tilelang's entry."""

    name: str
    file: Path

    @classmethod
    def of(cls, kernel: Any, args: tuple, kwargs: dict[str, Any], arch: str) -> CacheEntry:
        """Of a kernel as tilelang's decorator made it, called with these arguments."""
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
        """``made`` is what tilelang returned: it knows its place on disk."""
        place = getattr(made, "_tilelang_cache_path", None)
        if place is None or not os.path.isdir(place) or self.is_there():
            return
        self.file.parent.mkdir(parents=True, exist_ok=True)
        own = self.file.with_suffix(f".{os.getpid()}")
        own.write_text(str(place))
        own.replace(self.file)


def in_tilelangs_cache(kernel: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Whether tilelang has this kernel on disk: its own key, which takes it up to two seconds."""
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
