"""Weights to and from Hugging Face: Qwen3-Next, Qwen3.5, 3.6 and 3.8, dense and mixture of experts.

In Python: `build_model` makes the Megatron model that a ``config.json`` describes,
`load_hf_weights` fills it, `save_hf_weights` and `state_dict_to_hf` go back, `gdn_layer_from_hf`
and `gdn_layer_to_hf` convert one layer, `mamba2_layer_from_hf` and `mamba2_layer_to_hf` a Mamba2
mixer. Between folders and Megatron's distributed checkpoints:
`import_folder` and `export_folder`, or ``python -m megatron_gdn.hf import | export | compare |
flags``. `fp32_contract` says which tensors are fp32 whatever a file holds.
"""

from .build import build_model, transformer_config
from .checkpoint_folder import CheckpointWeights, export_folder, import_folder
from .compare import Difference, compare_folders
from .gdn_layer import gdn_layer_from_hf, gdn_layer_to_hf
from .mamba2_layer import mamba2_layer_from_hf, mamba2_layer_to_hf
from .megatron_arguments import megatron_flags
from .megatron_model import load_hf_weights, megatron_state, save_hf_weights
from .model_config import HFModelConfig, parse_hf_config, read_hf_config
from .view import SourceRecord, state_dict_to_hf

__all__ = [
    "CheckpointWeights",
    "Difference",
    "HFModelConfig",
    "SourceRecord",
    "build_model",
    "compare_folders",
    "export_folder",
    "gdn_layer_from_hf",
    "gdn_layer_to_hf",
    "import_folder",
    "load_hf_weights",
    "mamba2_layer_from_hf",
    "mamba2_layer_to_hf",
    "megatron_flags",
    "megatron_state",
    "parse_hf_config",
    "read_hf_config",
    "save_hf_weights",
    "state_dict_to_hf",
    "transformer_config",
]
