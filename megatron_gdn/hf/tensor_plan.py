"""`plan_tensors` plans what an import and an export do with each tensor of a folder.
First it compares the config with the files."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from ..mixers.tensor_map import TensorMap
from .model_map import (
    EMBEDDING_KEY,
    LM_HEAD_KEY,
    NEMOTRON_ARCHITECTURE,
    HFModelConfig,
    MegatronModelKind,
    model_maps,
    text_model_prefix,
)
from .quantised import refuse_quantised
from .safetensors_files import TensorSpec

# Prefixes of the keys of multi-token prediction and vision, which an export copies and
# no import loads.
_PASSTHROUGH_PREFIXES = ("mtp.", "model.visual.", "visual.")
# Matches the key of a layer's weight after the text model's prefix; group "expert" is
# None outside of experts.
_LAYER_KEY_PATTERN = re.compile(
    r"layers\.(?P<layer>[0-9]+)\."
    r"(?:(?:mlp|block_sparse_moe)\.experts\.(?P<expert>[0-9]+)\.)?"
)


class TensorPlan(NamedTuple):
    """What an import and an export do with every tensor of a folder."""

    maps: list[TensorMap]
    passthrough_keys: list[str]  # keys that an export copies unchanged
    # key -> key of the equal tensor (a tied model's output layer)
    aliases: dict[str, str]


def and_others(names: list[str]) -> str:
    """The text " (and N more)" for a message that shows the first of ``names`` alone; ""
    if there is only one."""
    if len(names) > 1:
        return f" (and {len(names) - 1} more)"
    return ""


def _require_config_fits_files(
    config: HFModelConfig, specs: Mapping[str, TensorSpec], model_text: str
) -> None:
    """Raise a ValueError if the files have other numbers of layers, experts or rows
    than the config.

    `model_maps` and `build_model` take memory for all layers, experts and rows that the
    config names. Without this check a wrong number in a config.json could fill the
    memory. ``specs``: the tensors of the files; ``model_text``: the model, for errors.
    """
    sizes = config.sizes
    mixers = config.hybrid_layer_pattern[::2]
    hidden = sizes.hidden_size
    text_prefix = text_model_prefix(specs)
    embedding_shape = (config.vocab_size, hidden)
    _require_shape(text_prefix + EMBEDDING_KEY, embedding_shape, specs, model_text)
    layers, experts = _count_layers_and_experts(text_prefix, specs)
    if layers != len(mixers):
        raise ValueError(
            f"config.json says num_hidden_layers={len(mixers)}, but the files have "
            f"weights of {layers} layers ({text_prefix}layers.*)."
        )
    config_experts = getattr(sizes, "num_moe_experts", 0)
    if experts != config_experts:
        raise ValueError(
            f"config.json says num_experts={config_experts}, but the files have weights "
            f"of {experts} experts."
        )
    # These lines check the first layer of each kind; `plan_tensors` checks the others.
    if "*" in mixers:
        prefix = f"{text_prefix}layers.{mixers.index('*')}.self_attn."
        width = sizes.num_attention_heads * sizes.kv_channels
        _require_shape(f"{prefix}o_proj.weight", (hidden, width), specs, model_text)
    if "+" in mixers:
        prefix = f"{text_prefix}layers.{mixers.index('+')}.self_attn."
        width = sizes.num_attention_heads * sizes.v_head_dim
        _require_shape(f"{prefix}o_proj.weight", (hidden, width), specs, model_text)
        latent_width = sizes.kv_lora_rank + sizes.qk_pos_emb_head_dim
        key = f"{prefix}kv_a_proj_with_mqa.weight"
        _require_shape(key, (latent_width, hidden), specs, model_text)
    if "K" in mixers:
        prefix = f"{text_prefix}layers.{mixers.index('K')}.self_attn."
        dims = config.kda
        out_shape = (hidden, dims.v_dim)
        _require_shape(f"{prefix}o_proj.weight", out_shape, specs, model_text)
    if "G" in mixers:
        prefix = f"{text_prefix}layers.{mixers.index('G')}.linear_attn."
        dims = config.gdn
        out_shape = (hidden, dims.v_dim)
        _require_shape(f"{prefix}out_proj.weight", out_shape, specs, model_text)
        conv_shape = (dims.layout.conv_width, 1, dims.conv_kernel_dim)
        _require_shape(f"{prefix}conv1d.weight", conv_shape, specs, model_text)


def _count_layers_and_experts(
    text_prefix: str, specs: Mapping[str, TensorSpec]
) -> tuple[int, int]:
    """The number of layers and the number of experts per layer that have weights in the
    files ``specs``. ``text_prefix``: the prefix of the text model's keys."""
    layers = set()
    experts = set()
    stacked_experts = 0
    for key, spec in specs.items():
        if not key.startswith(text_prefix):
            continue
        found = _LAYER_KEY_PATTERN.match(key, len(text_prefix))
        if found is None:
            continue
        layers.add(found["layer"])
        if found["expert"] is not None:
            experts.add(found["expert"])
        if key.endswith(".mlp.experts.gate_up_proj") and spec.shape:
            stacked_experts = max(stacked_experts, spec.shape[0])
    return len(layers), max(len(experts), stacked_experts)


def _require_shape(
    key: str, shape: tuple[int, ...], specs: Mapping[str, TensorSpec], model_text: str
) -> None:
    """Raise unless the files ``specs`` have a tensor ``key`` of shape ``shape``;
    ``model_text``: the model that needs it, for errors."""
    if key not in specs:
        raise ValueError(f"missing key {key!r}: {model_text} needs it.")
    if specs[key].shape != shape:
        raise ValueError(
            f"{key} has shape {specs[key].shape}, but config.json asks for {shape}."
        )


def plan_tensors(
    config: HFModelConfig,
    specs: Mapping[str, TensorSpec],
    model: MegatronModelKind,
    zero_centred: bool,
) -> TensorPlan:
    """Assign every tensor of the files to a map, to the passthrough keys or to an
    alias.

    Args:
        config: the model's config.
        specs: the tensors of the files.
        model: whether Megatron's model is a HybridModel or a GPTModel.
        zero_centred: Megatron's ``layernorm_zero_centered_gamma``.

    Raises:
        ValueError: a tensor is missing or unknown, or the files have other sizes than
            the config.
        NotImplementedError: weights are quantised, or the model is a NemotronH.
    """
    if config.architecture == NEMOTRON_ARCHITECTURE:
        raise NotImplementedError(
            f"whole models of {NEMOTRON_ARCHITECTURE} are not converted; "
            "megatron_gdn.hf.layer_from_hf converts one Mamba2 layer."
        )
    # An export copies the other tensors as they are, so these may be quantised.
    loaded = {
        key: spec
        for key, spec in specs.items()
        if not key.startswith(_PASSTHROUGH_PREFIXES)
    }
    refuse_quantised(loaded)
    layers = len(config.hybrid_layer_pattern) // 2
    model_text = f"a {config.architecture} with {layers} layers"
    _require_config_fits_files(config, specs, model_text)
    maps = list(model_maps(config, specs.keys(), model, zero_centred))
    shapes = {source.key: source.shape for entry in maps for source in entry.sources}
    if missing := [key for key in shapes if key not in specs]:
        raise ValueError(
            f"missing key {missing[0]!r}{and_others(missing)}: {model_text} needs it."
        )
    for key, shape in shapes.items():
        _require_shape(key, shape, specs, model_text)
    aliases = {}
    if config.tied and LM_HEAD_KEY in specs:
        # the first map is the embedding's
        aliases[LM_HEAD_KEY] = maps[0].sources[0].key
    unmapped = [key for key in specs if key not in shapes and key not in aliases]
    unknown = [key for key in unmapped if not key.startswith(_PASSTHROUGH_PREFIXES)]
    if unknown:
        raise ValueError(
            f"unknown key {unknown[0]!r}{and_others(unknown)}: it is no weight of "
            f"{model_text}, and starts with none of {', '.join(_PASSTHROUGH_PREFIXES)}, "
            "which an export copies unchanged."
        )
    return TensorPlan(maps, unmapped, aliases)
