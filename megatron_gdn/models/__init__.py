"""Published models: sizes, Megatron configurations and specs, FLOPs, flags for a launch.

For example:

    build_model(find("Qwen3.5-35B-A3B").hf)  # of megatron_gdn.hf; load_hf_weights fills it
    find("Qwen3.5-35B-A3B").flags()          # for pretrain_hybrid.py
    find("Qwen3.5-35B-A3B").stack            # parameters, FLOPs, bytes of states
"""

from importlib import import_module
from typing import Any

_NAMES = {
    ".model": ("ENTRIES", "Model", "find"),
    ".stack": ("Flops", "Stack", "flops_per_step"),
}
_HOME = {name: module for module, names in _NAMES.items() for name in names}

__all__ = sorted(_HOME)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    """Import a name at first use, so that the command reads its options before importing torch."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOME[name], __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
