"""Match a model's maps with the tensors a folder has, before anything is converted."""

from __future__ import annotations

from dataclasses import dataclass

from .files.safetensors_reader import SafetensorsFolder, TensorSpec
from .maps.model_map import LM_HEAD, Architecture, model_maps
from .maps.tensor_map import TensorMap
from .model_config import HFModelConfig

# Multi-token prediction and vision weights: an export copies them, they are never loaded.
PASSTHROUGH_PREFIXES = ("mtp.", "model.visual.", "visual.")


@dataclass(frozen=True, slots=True)
class Plan:
    """What happens to every tensor of a folder.

    Attributes:
        maps: Megatron parameters and the tensors they are made of.
        passthrough: keys that an export copies unchanged.
        aliases: keys that repeat another key's tensor (the output layer of a tied model).
    """

    maps: list[TensorMap]
    passthrough: list[str]
    aliases: dict[str, str]


def make_plan(
    config: HFModelConfig,
    specs: dict[str, TensorSpec],
    model: Architecture = "hybrid",
    zero_centered_gamma: bool = True,
) -> Plan:
    """Assign every key of ``specs`` to a map, to passthrough or to an alias.

    Raises:
        ValueError: a key is missing, has the wrong shape, or is unknown.
        NotImplementedError: quantised weights.
    """
    _refuse_quantised(specs)
    maps = list(model_maps(config, specs.keys(), model, zero_centered_gamma))
    mapped: dict[str, tuple[int, ...]] = {
        source.key: source.shape for entry in maps for source in entry.sources
    }
    missing = [key for key in mapped if key not in specs]
    if missing:
        raise ValueError(
            f"missing key {missing[0]!r}{_and_more(missing)}: a {config.architecture} with "
            f"{config.num_layers} layers needs it."
        )
    for key, shape in mapped.items():
        if specs[key].shape != shape:
            raise ValueError(
                f"{key} has shape {specs[key].shape}, but config.json asks for {shape}."
            )
    aliases = {LM_HEAD: maps[0].sources[0].key} if config.tied and LM_HEAD in specs else {}
    rest = [key for key in specs if key not in mapped and key not in aliases]
    unknown = [key for key in rest if not key.startswith(PASSTHROUGH_PREFIXES)]
    if unknown:
        raise ValueError(
            f"unknown key {unknown[0]!r}{_and_more(unknown)}: it is no weight of a "
            f"{config.architecture} with {config.num_layers} layers, and starts with none of "
            f"{', '.join(PASSTHROUGH_PREFIXES)}, which are carried through unchanged."
        )
    return Plan(maps, rest, aliases)


def check_aliases(folder: SafetensorsFolder, plan: Plan) -> None:
    """Refuse a folder with tied embeddings and an output layer that differs from them.

    Raises:
        ValueError: loading would drop one of the two.
    """
    import torch

    for key, same_as in plan.aliases.items():
        if folder.spec(key) != folder.spec(same_as) or not torch.equal(
            folder.read(key), folder.read(same_as)
        ):
            raise ValueError(
                f"{key} differs from {same_as}, but tie_word_embeddings is true. Set it to "
                f"false in config.json to keep both."
            )


def _refuse_quantised(specs: dict[str, TensorSpec]) -> None:
    for key, spec in specs.items():
        if spec.dtype.startswith("F8") or key.endswith("weight_scale_inv"):
            raise NotImplementedError(
                f"{key} is quantised ({spec.dtype}, block-scaled FP8 checkpoints); convert the "
                f"folder to BF16 first."
            )


def _and_more(names: list[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""
