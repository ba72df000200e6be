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

_NAMES_OF_MODULE = {
    ".model": ("ENTRIES", "Model", "find"),
    ".stack": ("Flops", "Stack"),
}
_MODULE_OF_NAME = {
    name: module for module, names in _NAMES_OF_MODULE.items() for name in names
}

__all__ = sorted(_MODULE_OF_NAME)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    """Import ``name`` at its first use: the command line is read before torch is
    imported."""
    if name not in _MODULE_OF_NAME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULE_OF_NAME[name], __name__), name)


def __dir__() -> list[str]:
    return sorted(globals().keys() | _MODULE_OF_NAME.keys())
