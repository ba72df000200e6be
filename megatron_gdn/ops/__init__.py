"""The mathematics of the layer; this package imports torch alone.

Letters of shapes, unless a file says otherwise: S tokens of a batch row, s this rank's
share of the S tokens, T tokens of a packed buffer, B batch, N sequences, D hidden size,
P width of a projection row, C channels of the convolution, W taps of the convolution, G
key heads, H heads with a state (value heads), R value heads per key head, K and V rows
and columns of a state (key and value dim).

Public names are imported when they are first used, since some are in a mixer's folder.
"""

from importlib import import_module
from typing import Any

# the module of each public name, relative to this package
_MODULE_OF_NAME = {
    "Documents": ".documents",
    "Layout": ".layout",
    "StaticDocuments": ".static_documents",
    "causal_conv1d": ".conv",
    "decay_and_write_gates": ".front.gates",
    "gated_delta_rule": "..gdn.api",
    "l2norm": ".elementwise",
    "recurrent_gated_delta_rule": "..gdn.api",
    "resolve_rule": "..gdn.rule",
    "rms_norm": ".elementwise",
    "torch_chunk_gated_delta_rule": "..gdn.api",
}

__all__ = sorted(_MODULE_OF_NAME)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    """Import the public ``name`` at its first use; Python calls this for missing
    names."""
    if name not in _MODULE_OF_NAME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULE_OF_NAME[name], __name__), name)


def __dir__() -> list[str]:
    return sorted(globals().keys() | _MODULE_OF_NAME.keys())
