"""The catalogue's models as transformers builds them, on the meta device."""

from types import SimpleNamespace
from typing import Any

import torch
import transformers

from megatron_gdn.models import ENTRIES
from tests.hf.tiny_models import model_class

CONFIG_OF = {
    "Qwen3NextForCausalLM": "Qwen3NextConfig",
    "Qwen3_5ForCausalLM": "Qwen3_5TextConfig",
    "Qwen3_5MoeForCausalLM": "Qwen3_5MoeTextConfig",
    "OlmoHybridForCausalLM": "OlmoHybridConfig",
    "NemotronHForCausalLM": "NemotronHConfig",
}
# Of the vision encoder of Qwen3.5, 3.6 and 3.8 from 9B on; its output is as wide as the model.
VISION = {"depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "num_heads": 16}


def config_of(architecture: str, fields: dict[str, Any]) -> Any:
    return getattr(transformers, CONFIG_OF[architecture])(**fields)


def parameters_of(name: str) -> int:
    entry = ENTRIES[name]
    with torch.device("meta"):
        model = model_class(entry.architecture)(config_of(entry.architecture, entry.fields))
    return sum(parameter.numel() for parameter in model.parameters())


def vision_parameters(hidden_size: int) -> int:
    config = transformers.Qwen3_5Config(vision_config=VISION | {"out_hidden_size": hidden_size})
    with torch.device("meta"):
        model = model_class("Qwen3_5VisionModel")(config.vision_config)
    return sum(parameter.numel() for parameter in model.parameters())


def as_config(settings: dict[str, Any]) -> Any:
    return SimpleNamespace(**settings)
