"""Match a model's maps with the tensors a folder has, and refuse those that no model can hold."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..mixers.tensor_map import HFRef, TensorMap
from .model_config import HFModelConfig
from .model_map import LM_HEAD, Architecture, model_maps
from .safetensors_files import SafetensorsFolder, TensorSpec

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
    for key, spec in specs.items():
        if spec.dtype.startswith("F8") or key.endswith("weight_scale_inv"):
            raise NotImplementedError(
                f"{key} is quantised ({spec.dtype}, block-scaled FP8 checkpoints); convert the "
                f"folder to BF16 first."
            )
    maps = list(model_maps(config, specs.keys(), model, zero_centered_gamma))
    shapes = {source.key: source.shape for entry in maps for source in entry.sources}
    whose = f"a {config.architecture} with {config.num_layers} layers"
    if missing := [key for key in shapes if key not in specs]:
        raise ValueError(f"missing key {missing[0]!r}{and_more(missing)}: {whose} needs it.")
    for key, shape in shapes.items():
        if specs[key].shape != shape:
            raise ValueError(
                f"{key} has shape {specs[key].shape}, but config.json asks for {shape}."
            )
    aliases = {LM_HEAD: maps[0].sources[0].key} if config.tied and LM_HEAD in specs else {}
    rest = [key for key in specs if key not in shapes and key not in aliases]
    if unknown := [key for key in rest if not key.startswith(PASSTHROUGH_PREFIXES)]:
        raise ValueError(
            f"unknown key {unknown[0]!r}{and_more(unknown)}: it is no weight of {whose}, and "
            f"starts with none of {', '.join(PASSTHROUGH_PREFIXES)}, which are carried through "
            f"unchanged."
        )
    return Plan(maps, rest, aliases)


def check_source(folder: SafetensorsFolder, plan: Plan) -> None:
    """Check every imported tensor's dtype, and that one which repeats another is equal to it.

    Raises:
        ValueError: a dtype that is not floating-point, F64 for a tensor that Megatron holds in
            fp32, or tied embeddings with an output layer of its own.
    """
    for key, same_as in plan.aliases.items():
        if folder.spec(key) != folder.spec(same_as) or not torch.equal(
            folder.read(key), folder.read(same_as)
        ):
            raise ValueError(
                f"{key} differs from {same_as}, but tie_word_embeddings is true. Set it to "
                f"false in config.json to keep both."
            )
    for entry in plan.maps:
        for source in entry.sources:
            path = folder.folder / folder.file_of[source.key]
            entry.check_dtype(folder.spec(source.key).torch_dtype, f"{source.key} in {path}")


def read_finite(folder: SafetensorsFolder, source: HFRef) -> Tensor:
    """One source of a map.

    Raises:
        ValueError: NaN or inf in it.
    """
    piece = folder.read(source.key, source.expert)
    # One pass and no copy: NaN and inf both show in the extremes.
    if piece.numel() and not all(bool(one.isfinite()) for one in torch.aminmax(piece)):
        expert = "" if source.expert is None else f" (expert {source.expert})"
        number = int(piece.isfinite().logical_not().sum())
        raise ValueError(
            f"{source.key}{expert} in {folder.folder / folder.file_of[source.key]} holds {number} "
            f"of {piece.numel()} values that are NaN or inf; weights must be finite. Download the "
            f"file again, or take a checkpoint from before the training diverged."
        )
    return piece


def and_more(names: list[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""
