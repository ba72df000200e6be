"""The mathematics of the layer; needs torch and nothing else.

Public names are imported when first used: some are of a mixer's folder, which lies above this one.
"""

from importlib import import_module
from typing import Any

_HOME = {
    "Documents": ".documents",
    "Layout": ".layout",
    "StaticDocuments": ".static_documents",
    "causal_conv1d": ".conv",
    "decay_and_write_gates": ".elementwise",
    "gated_delta_rule": "..gdn.api",
    "l2norm": ".elementwise",
    "recurrent_gated_delta_rule": "..gdn.api",
    "resolve_rule": "..gdn.rule",
    "rms_norm": ".elementwise",
    "rms_norm_gated": ".elementwise",
    "torch_chunk_gated_delta_rule": "..gdn.api",
}

__all__ = sorted(_HOME)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOME[name], __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
