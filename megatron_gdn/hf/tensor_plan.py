"""What an import and an export do with each tensor of a folder; the config against the
files."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from ..mixers.tensor_map import TensorMap
from .model_map import (
    EMBEDDING,
    LM_HEAD,
    NEMOTRON,
    Architecture,
    HFModelConfig,
    model_maps,
    root_of,
)
from .quantised import refuse_quantised
from .safetensors_files import TensorSpec

# Weights of multi-token prediction and vision, which an export copies and no import
# loads.
_PASSTHROUGH = ("mtp.", "model.visual.", "visual.")
# Matches the start of the key of a layer's weight, or of an expert's in the layer,
# after the prefix of the text model's keys.
_LAYER_KEY = re.compile(
    r"layers\.(?P<layer>[0-9]+)\."
    r"(?:(?:mlp|block_sparse_moe)\.experts\.(?P<expert>[0-9]+)\.)?"
)


class TensorPlan(NamedTuple):
    """What an import and an export do with every tensor of a folder."""

    maps: list[TensorMap]
    passthrough: list[str]  # keys that an export copies unchanged
    # key -> key of the equal tensor (a tied model's output layer)
    aliases: dict[str, str]


def count_of_others(names: list[str]) -> str:
    """The end of a message that shows only the first of ``names``: " (and N more)" or
    nothing."""
    if len(names) > 1:
        return f" (and {len(names) - 1} more)"
    return ""


def _compare_with_files(
    config: HFModelConfig, specs: Mapping[str, TensorSpec], whose: str
) -> None:
    """Raise if the config has other numbers of layers, experts or rows than the files
    ``specs``.

    `model_maps` makes maps for each layer and expert, and tables of rows, and a model
    is built by the config's sizes. A wrong number in a config.json must not fill the
    memory.
    """
    sizes = config.sizes
    mixers = config.hybrid_layer_pattern[::2]
    hidden = sizes.hidden_size
    root = root_of(specs)
    _require_shape(root + EMBEDDING, (config.vocab_size, hidden), specs, whose)
    layers, experts = _count_in_files(root, specs)
    if layers != len(mixers):
        raise ValueError(
            f"config.json says num_hidden_layers={len(mixers)}, but the files have "
            f"weights of {layers} layers ({root}layers.*)."
        )
    wanted = getattr(sizes, "num_moe_experts", 0)
    if experts != wanted:
        raise ValueError(
            f"config.json says num_experts={wanted}, but the files have weights of "
            f"{experts} experts."
        )
    if "*" in mixers:
        hf = f"{root}layers.{mixers.index('*')}.self_attn."
        width = sizes.num_attention_heads * sizes.kv_channels
        _require_shape(f"{hf}o_proj.weight", (hidden, width), specs, whose)
    if "+" in mixers:
        hf = f"{root}layers.{mixers.index('+')}.self_attn."
        width = sizes.num_attention_heads * sizes.v_head_dim
        latent = sizes.kv_lora_rank + sizes.qk_pos_emb_head_dim
        _require_shape(f"{hf}o_proj.weight", (hidden, width), specs, whose)
        key = f"{hf}kv_a_proj_with_mqa.weight"
        _require_shape(key, (latent, hidden), specs, whose)
    if "K" in mixers:
        hf = f"{root}layers.{mixers.index('K')}.self_attn."
        dims = config.kda
        _require_shape(f"{hf}o_proj.weight", (hidden, dims.v_dim), specs, whose)
        taps = (dims.qk_dim, 1, dims.conv_kernel_dim)
        _require_shape(f"{hf}q_conv1d.weight", taps, specs, whose)
    if "G" in mixers:
        hf = f"{root}layers.{mixers.index('G')}.linear_attn."
        dims = config.gdn
        channels = dims.layout.conv_width
        _require_shape(f"{hf}out_proj.weight", (hidden, dims.v_dim), specs, whose)
        _require_shape(
            f"{hf}conv1d.weight", (channels, 1, dims.conv_kernel_dim), specs, whose
        )


def _count_in_files(root: str, specs: Mapping[str, TensorSpec]) -> tuple[int, int]:
    """The numbers of layers and of experts of which the files have weights."""
    layers = set()
    experts = set()
    packed = 0
    for key, spec in specs.items():
        if key.startswith(root):
            found = _LAYER_KEY.match(key, len(root))
        else:
            found = None
        if found is None:
            continue
        layers.add(found["layer"])
        if found["expert"] is not None:
            experts.add(found["expert"])
        if key.endswith(".mlp.experts.gate_up_proj") and spec.shape:
            packed = max(packed, spec.shape[0])
    return len(layers), max(len(experts), packed)


def _require_shape(
    key: str, shape: tuple[int, ...], specs: Mapping[str, TensorSpec], whose: str
) -> None:
    """Raise unless the files ``specs`` have the tensor ``key`` of ``shape``."""
    if key not in specs:
        raise ValueError(f"missing key {key!r}: {whose} needs it.")
    if specs[key].shape != shape:
        raise ValueError(
            f"{key} has shape {specs[key].shape}, but config.json asks for {shape}."
        )


def plan_of(
    config: HFModelConfig,
    specs: Mapping[str, TensorSpec],
    model: Architecture,
    centred: bool,
) -> TensorPlan:
    """Assign every tensor of ``specs`` to a map, to passthrough or to an alias, or
    refuse it.

    ``specs``: the tensors of the files; ``centred``: Megatron's
    ``layernorm_zero_centered_gamma``.
    """
    if config.architecture == NEMOTRON:
        raise NotImplementedError(
            f"whole models of {NEMOTRON} are not converted; "
            "megatron_gdn.hf.layer_from_hf converts one Mamba2 layer."
        )
    # An export copies the other tensors as they are, so these may be quantised.
    loaded = {
        key: spec for key, spec in specs.items() if not key.startswith(_PASSTHROUGH)
    }
    refuse_quantised(loaded)
    whose = (
        f"a {config.architecture} with {len(config.hybrid_layer_pattern) // 2} layers"
    )
    _compare_with_files(config, specs, whose)
    maps = list(model_maps(config, specs.keys(), model, centred))
    shapes = {source.key: source.shape for entry in maps for source in entry.sources}
    if missing := [key for key in shapes if key not in specs]:
        raise ValueError(
            f"missing key {missing[0]!r}{count_of_others(missing)}: {whose} needs it."
        )
    for key, shape in shapes.items():
        _require_shape(key, shape, specs, whose)
    if config.tied and LM_HEAD in specs:
        aliases = {LM_HEAD: maps[0].sources[0].key}
    else:
        aliases = {}
    unmapped = [key for key in specs if key not in shapes and key not in aliases]
    if unknown := [key for key in unmapped if not key.startswith(_PASSTHROUGH)]:
        raise ValueError(
            f"unknown key {unknown[0]!r}{count_of_others(unknown)}: it is no weight of "
            f"{whose}, and starts with none of {', '.join(_PASSTHROUGH)}, which an "
            "export copies unchanged."
        )
    return TensorPlan(maps, unmapped, aliases)
