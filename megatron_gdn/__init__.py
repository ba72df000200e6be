"""Gated DeltaNet layers for Megatron-Core.

Public names are imported at first use, so that ``megatron_gdn.ops`` needs only torch.
"""

from importlib import import_module
from typing import Any

# Module -> the names from it that this package offers. They include every name of
# Megatron's module gated_delta_net, also its `_split_tensor_factory`.
_NAMES_BY_MODULE = {
    "mixers.checkpoint": ("_split_tensor_factory",),
    "context_parallel": (
        "SequenceLayout",
        "get_parameter_local_cp",
        "tensor_a2a_cp2hp",
        "tensor_a2a_hp2cp",
    ),
    "frameworks.patch": ("patch_megatron",),
    "mixers.precision": ("fully_shard",),
    "gdn.sizes": ("GDNDims",),
    "mixers.graphs": (
        "leave_attention_out_of_graphs",
        "set_documents",
        "static_packed_seq_params",
    ),
    "gdn.layer": ("GatedDeltaNet", "GatedDeltaNetSubmodules"),
    "gdn2.layer": ("GatedDeltaNet2",),
    "gdp.layer": ("GatedDeltaProduct", "GatedDeltaProductSubmodules"),
    "kda.layer": ("KimiDeltaAttention", "KimiDeltaAttentionSubmodules"),
    "mamba2.layer": ("Mamba2Mixer", "Mamba2MixerSubmodules"),
    "ops": (
        "Documents",
        "Layout",
        "causal_conv1d",
        "gated_delta_rule",
        "l2norm",
        "torch_chunk_gated_delta_rule",
    ),
    "mixers.tree_packing": (
        "PackedGroups",
        "PackedTree",
        "pack_groups",
        "pack_tree",
        "tree_packed_seq_params",
    ),
    "mixers.padding": ("pack_rows", "seqlens_of_mask", "unpack_rows", "unpad_data"),
}
_MODULE_OF_NAME = {
    name: module for module, names in _NAMES_BY_MODULE.items() for name in names
}

__all__ = sorted(name for name in _MODULE_OF_NAME if name[0] != "_")  # pyright: ignore[reportUnsupportedDunderAll]


def _version() -> str:
    """The version of the installed package, or else the version in the clone's
    ``pyproject.toml``; "unknown" without that file."""
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


def __getattr__(name: str) -> Any:
    """Import the public object ``name`` at its first use."""
    if name == "__version__":
        return _version()
    if name not in _MODULE_OF_NAME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_MODULE_OF_NAME[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted(globals().keys() | _MODULE_OF_NAME.keys())
