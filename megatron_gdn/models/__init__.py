"""Published models: sizes, Megatron configurations and specs, FLOPs, flags for a
launch.

For example:

    model = find("Qwen3.5-35B-A3B")
    model.stack               # parameters, FLOPs, bytes of states
    build_model(model.hf)     # of megatron_gdn.hf; load_hf_weights fills the weights
    megatron_flags(model.hf)  # of megatron_gdn.hf, for pretrain_hybrid.py
"""

from importlib import import_module
from typing import Any

_NAMES = {
    ".model": ("ENTRIES", "Model", "find"),
    ".stack": ("Flops", "Stack"),
}
_HOME = {name: module for module, names in _NAMES.items() for name in names}

__all__ = sorted(_HOME)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    """Import a name at its first use, so that the command line is read before torch is
    imported."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOME[name], __name__), name)


def __dir__() -> list[str]:
    return sorted(globals().keys() | _HOME.keys())
