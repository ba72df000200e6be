"""Converts weights from and to Hugging Face: of Qwen3-Next, of Qwen3.5, 3.6 and 3.8
(dense or with experts), and of Kimi Linear.

load_hf_weights, save_hf_weights           weights of a model from `build_model`
layer_from_hf, layer_to_hf                 one layer, at any tensor-parallel size
import_folder, export_folder               Megatron's distributed checkpoints
patch                                      runs this package inside transformers' models
"""

from importlib import import_module
from typing import Any

_NAMES_OF_MODULE = {
    ".build": ("build_model", "megatron_flags", "transformer_config"),
    ".drop_in.batch": ("ModelBatch", "context_parallel_share"),
    ".drop_in.families": ("plain_functions_on_cpu",),
    ".drop_in.gates": ("SSMGate", "gates_in_fp32", "install_ssm_gate", "shard_gates"),
    ".drop_in.layer": ("CPAwareGatedDeltaNet",),
    ".drop_in.patching": ("Patch", "patch"),
    ".drop_in.sources": ("is_indexed_packed_mask",),
    ".drop_in.training": (
        "ContextParallelTrainerMixin",
        "PackingCollator",
        "PackingLeak",
        "assert_no_packing_leak",
        "packing_reach",
    ),
    ".folders": ("export_folder", "import_folder"),
    ".layers": ("layer_from_hf", "layer_to_hf"),
    ".megatron_model": ("load_hf_weights", "save_hf_weights"),
    ".model_map": ("HFModelConfig", "parse_hf_config", "read_hf_config"),
    ".safetensors_files": ("Difference", "compare_folders"),
}
_MODULE_OF_NAME = {
    name: module for module, names in _NAMES_OF_MODULE.items() for name in names
}

__all__ = sorted(_MODULE_OF_NAME)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    """Import ``name`` at its first use, so that the transformers drop-in needs no
    Megatron."""
    if name not in _MODULE_OF_NAME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULE_OF_NAME[name], __name__), name)


def __dir__() -> list[str]:
    return sorted(globals().keys() | _MODULE_OF_NAME.keys())
