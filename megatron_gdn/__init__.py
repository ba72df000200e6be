"""Gated DeltaNet for Megatron-Core: upstream's layer, faster, longer, and fp32 where it matters.

Public names are imported when first used, so that ``megatron_gdn.ops`` needs torch alone.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .checkpoint import _split_tensor_factory
    from .context_parallel import (
        SequenceLayout,
        get_parameter_local_cp,
        tensor_a2a_cp2hp,
        tensor_a2a_hp2cp,
    )
    from .dims import GDNDims
    from .graphs import set_documents, static_packed_seq_params
    from .layer import GatedDeltaNet, GatedDeltaNetSubmodules
    from .mamba2 import Mamba2Mixer, Mamba2MixerSubmodules
    from .ops import (
        Documents,
        Layout,
        causal_conv1d,
        gated_delta_rule,
        l2norm,
        torch_chunk_gated_delta_rule,
    )
    from .padding import pack_rows, seqlens_of_mask, unpack_rows, unpad_data

_HOME = {
    "Documents": "ops",
    "GDNDims": "dims",
    "GatedDeltaNet": "layer",
    "GatedDeltaNetSubmodules": "layer",
    "Layout": "ops",
    "Mamba2Mixer": "mamba2",
    "Mamba2MixerSubmodules": "mamba2",
    "SequenceLayout": "context_parallel",
    "_split_tensor_factory": "checkpoint",
    "causal_conv1d": "ops",
    "gated_delta_rule": "ops",
    "get_parameter_local_cp": "context_parallel",
    "l2norm": "ops",
    "pack_rows": "padding",
    "seqlens_of_mask": "padding",
    "set_documents": "graphs",
    "static_packed_seq_params": "graphs",
    "tensor_a2a_cp2hp": "context_parallel",
    "tensor_a2a_hp2cp": "context_parallel",
    "torch_chunk_gated_delta_rule": "ops",
    "unpack_rows": "padding",
    "unpad_data": "padding",
}

__all__ = [
    "Documents",
    "GDNDims",
    "GatedDeltaNet",
    "GatedDeltaNetSubmodules",
    "Layout",
    "Mamba2Mixer",
    "Mamba2MixerSubmodules",
    "SequenceLayout",
    "_split_tensor_factory",
    "causal_conv1d",
    "gated_delta_rule",
    "get_parameter_local_cp",
    "l2norm",
    "pack_rows",
    "seqlens_of_mask",
    "set_documents",
    "static_packed_seq_params",
    "tensor_a2a_cp2hp",
    "tensor_a2a_hp2cp",
    "torch_chunk_gated_delta_rule",
    "unpack_rows",
    "unpad_data",
]


def _version() -> str:
    """``project.version`` of ``pyproject.toml``, as installed or, in a clone, from the file."""
    from importlib.metadata import PackageNotFoundError, version
    from pathlib import Path

    try:
        return version("megatron-gdn")
    except PackageNotFoundError:
        import tomllib

        pyproject = Path(__file__).parents[1] / "pyproject.toml"
        if not pyproject.is_file():
            return "unknown"
        return tomllib.loads(pyproject.read_text())["project"]["version"]


def __getattr__(name: str):
    if name == "__version__":
        return _version()
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOME[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
