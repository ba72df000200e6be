"""Weights to and from Hugging Face: Qwen3-Next, Qwen3.5, 3.6 and 3.8, dense and mixture of experts.

In Python: `build_model` makes the Megatron model that a ``config.json`` describes,
`load_hf_weights` fills it, `save_hf_weights` and `state_dict_to_hf` convert back.
`gdn_layer_from_hf` and `gdn_layer_to_hf` convert one layer, `mamba2_layer_from_hf` and
`mamba2_layer_to_hf` a Mamba2 mixer, `kda_layer_from_hf` and `kda_layer_to_hf` a Kimi Delta
Attention. Between folders and Megatron's distributed checkpoints:
`import_folder` and `export_folder`, or ``python -m megatron_gdn.hf import | export | compare |
flags``. For transformers' own models: `patch` lets their linear-attention modules run packed
documents and context parallelism, see `drop_in`. `state_dict_adapter` lists the tensors that are
fp32 even if a file has another dtype.
"""

from typing import TYPE_CHECKING, Any

from ..gdn.hf import gdn_layer_from_hf, gdn_layer_to_hf
from ..kda.hf import kda_layer_from_hf, kda_layer_to_hf
from ..mamba2.hf import mamba2_layer_from_hf, mamba2_layer_to_hf
from .build import build_model, megatron_flags, transformer_config
from .folders import Difference, compare_folders, export_folder, import_folder
from .megatron_model import load_hf_weights, megatron_state, save_hf_weights
from .model_config import HFModelConfig, parse_hf_config, read_hf_config
from .model_map import SourceRecord, state_dict_to_hf

if TYPE_CHECKING:
    from .drop_in import (
        ContextParallelTrainerMixin,
        CPAwareGatedDeltaNet,
        PackingCollator,
        PackingLeak,
        assert_no_packing_leak,
        context_parallel_share,
        gates_in_fp32,
        packing_leaks,
        packing_reach,
        patch,
        plain_functions_on_cpu,
        shard_gates,
    )


def __getattr__(name: str) -> Any:
    """Import the drop-in on first use: it needs Megatron, and converting weights does not."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from . import drop_in

    return getattr(drop_in, name)


__all__ = [
    "CPAwareGatedDeltaNet",
    "ContextParallelTrainerMixin",
    "Difference",
    "HFModelConfig",
    "PackingCollator",
    "PackingLeak",
    "SourceRecord",
    "assert_no_packing_leak",
    "build_model",
    "compare_folders",
    "context_parallel_share",
    "export_folder",
    "gates_in_fp32",
    "gdn_layer_from_hf",
    "gdn_layer_to_hf",
    "import_folder",
    "kda_layer_from_hf",
    "kda_layer_to_hf",
    "load_hf_weights",
    "mamba2_layer_from_hf",
    "mamba2_layer_to_hf",
    "megatron_flags",
    "megatron_state",
    "packing_leaks",
    "packing_reach",
    "parse_hf_config",
    "patch",
    "plain_functions_on_cpu",
    "read_hf_config",
    "save_hf_weights",
    "shard_gates",
    "state_dict_to_hf",
    "transformer_config",
]
