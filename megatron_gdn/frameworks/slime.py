"""slime: our layer in its models of Qwen3.5 and Qwen3-Next, with their weights' names.

    --spec megatron_gdn.frameworks.slime get_qwen3_5_spec

Each parameter of ours is translated to one of slime's layer, which has transformers' parameters,
whole on every rank; slime's loader and converter do the rest:

    ours, under ``self_attention.``     slime's, under ``self_attention.``
    in_proj.layer_norm_weight           input_layernorm.weight
    in_proj.weight                      linear_attn.in_proj_qkv.weight, ..., or in_proj_qkvz, ..._ba
    conv1d.weight, A_log, dt_bias       linear_attn.<the same>
    out_norm.weight, out_proj.weight    linear_attn.norm.weight, linear_attn.out_proj.weight

slime cuts and joins tensors rank after rank, while each of our ranks holds a part of every section.
So slime is given a whole tensor with the rows of rank 0 first, then those of rank 1.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, wraps
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from torch import Tensor

from ..compat.observe import log_once
from ..gdn.hf import gdn_layer_maps
from ..gdn.layer import GatedDeltaNet
from ..hf.model_map import read_hf_config
from ..hf.safetensors_files import SafetensorsFolder
from ..mixers.tensor_map import HFRef, TensorMap
from ..specs.layer import gated_delta_net_spec, with_launch_options

_LAYER = "self_attention."
_TYPES = ("qwen3_5", "qwen3_5_moe", "qwen3_next")  # slime's loaders, by transformers' model_type


def get_qwen3_5_spec(args: Any, config: Any, vp_stage: int | None) -> Any:
    """slime's block spec of Qwen3.5 with :class:`megatron_gdn.GatedDeltaNet` as its mixer.

    From this call on, slime's loader and converter know our layer too. Options of the layer come
    from ``MEGATRON_GDN_OPTIONS``, its sizes from ``args.hf_checkpoint``.

    Raises:
        ValueError: the launch lacks ``--apply-layernorm-1p``, or ``hf_checkpoint`` has another
            model.
        FileNotFoundError: ``hf_checkpoint`` is not a folder with a ``config.json`` and weights.
        ImportError: slime or Transformer Engine is absent.
    """
    return _with_ours("qwen3_5", args, config, vp_stage)


def get_qwen3_next_spec(args: Any, config: Any, vp_stage: int | None) -> Any:
    """As :func:`get_qwen3_5_spec`, of Qwen3-Next."""
    return _with_ours("qwen3_next", args, config, vp_stage)


def _with_ours(model: str, args: Any, config: Any, vp_stage: int | None) -> Any:
    if not config.layernorm_zero_centered_gamma:
        raise ValueError(
            "slime copies the norms of Qwen3.5 and Qwen3-Next as they are in the files, which is "
            "gamma - 1. Add --apply-layernorm-1p, as in slime's scripts/models."
        )
    dims = read_hf_config(args.hf_checkpoint).gdn
    _published(args.hf_checkpoint)  # an error in its files is raised now, not after a rollout
    plugin = import_module(f"slime_plugins.models.{model}")
    block = getattr(plugin, f"get_{model}_spec")(args, config, vp_stage)
    vars(config).update(dims.config_fields)
    # slime's `slice_with_cp` cuts each document by itself.
    options = with_launch_options(GatedDeltaNet, {"cp_layout": "zigzag"})
    mixer = gated_delta_net_spec("te", **options)
    parts = [layer.submodules for layer in block.layer_specs]
    replaced = [each for each in parts if each.self_attention.module is plugin.Attention]
    for each in replaced:
        each.self_attention = mixer
    know_our_names()
    count = len(replaced)
    log_once(f"slime: {count} layers of this stage are built as megatron_gdn.GatedDeltaNet.")
    return block


@cache
def know_our_names() -> None:
    """From now on slime's loader and converter, in this process, know our parameters."""
    from slime.backends.megatron_utils import (  # pyright: ignore[reportMissingImports]
        hf_to_megatron,
        megatron_to_hf,
    )

    for model_type in _TYPES:
        hf_to_megatron._LOADERS[model_type] = _loader(hf_to_megatron._LOADERS[model_type])
    megatron_to_hf._convert_to_hf_core = _converter(megatron_to_hf._convert_to_hf_core)
    megatron_to_hf.quantize_params = _quantizer(megatron_to_hf.quantize_params)


def _loader(theirs: Callable) -> Callable:
    """A function from a parameter's name to its whole tensor, rank after rank."""

    @wraps(theirs)
    def tensor(name: str, reader: Any, hf_config: Any) -> Tensor:
        prefix, entry = _translation(name, reader.path)
        if entry is None:
            return theirs(name, reader, hf_config)
        pieces = [theirs(prefix + source.key, reader, hf_config) for source in entry.sources]
        return _rank_after_rank(entry, entry.to_megatron(pieces))

    return tensor


def _converter(theirs: Callable) -> Callable:
    """A function from a parameter, gathered rank after rank, to Hugging Face tensors by name."""

    @wraps(theirs)
    def convert(args: Any, model_name: str, name: str, param: Tensor) -> list[tuple[str, Tensor]]:
        prefix, entry = _translation(name, args.hf_checkpoint)
        if entry is None:
            return theirs(args, model_name, name, param)
        whole = _of_ranks(entry, param)
        wide = torch.float32 if entry.shift else whole.dtype  # rounded once, to the file's dtype
        pieces = entry.to_hf(whole, [wide] * len(entry.sources))
        published = _published(args.hf_checkpoint)
        return [
            (hf_name, tensor.to(published.get(hf_name, param.dtype)))
            for source, piece in zip(entry.sources, pieces, strict=True)
            for hf_name, tensor in theirs(args, model_name, prefix + source.key, piece)
        ]

    return convert


def _quantizer(theirs: Callable) -> Callable:
    """The tensors that the rollout engine holds quantised, by the names in slime's list."""

    @wraps(theirs)
    def quantize(args: Any, name: str, converted: list, *settings: Any, **more: Any) -> list:
        prefix, entry = _translation(name, args.hf_checkpoint)
        if entry is None:
            return theirs(args, name, converted, *settings, **more)
        return [
            pair
            for source, one in zip(entry.sources, converted, strict=True)
            for pair in theirs(args, prefix + source.key, [one], *settings, **more)
        ]

    return quantize


def _translation(name: str, folder: str | Path) -> tuple[str, TensorMap | None]:
    """The prefix of ``name`` before the layer's own names, and the map if the layer is ours."""
    prefix, layer, rest = name.rpartition(_LAYER)
    return prefix + layer, _translations(str(folder)).get(rest) if layer else None


@cache
def _translations(folder: str) -> dict[str, TensorMap]:
    """The maps from slime's names, by our name."""
    model = read_hf_config(folder)
    norm = HFRef("input_layernorm.weight", (model.hidden_size,))
    maps = [
        *gdn_layer_maps("", "linear_attn.", model.gdn, model.storage),
        TensorMap(names=("in_proj.layer_norm_weight",), sources=(norm,)),
    ]
    return {entry.name: entry for entry in maps}


@cache
def _published(folder: str) -> dict[str, torch.dtype]:
    """The dtypes of a folder's tensors without those of 8 bits, which slime quantises."""
    specs = SafetensorsFolder(folder).specs.items()
    return {name: spec.torch_dtype for name, spec in specs if spec.torch_dtype.itemsize > 1}


def _rank_after_rank(entry: TensorMap, whole: Tensor) -> Tensor:
    """``[section 0 | section 1 | ...]`` to ``[parts of rank 0 | parts of rank 1 | ...]``."""
    return torch.cat(entry.shards(whole, _tp())) if entry.sections else whole  # sections are rows


def _of_ranks(entry: TensorMap, ranks: Tensor) -> Tensor:
    return entry.unshard(ranks.chunk(_tp())) if entry.sections else ranks


def _tp() -> int:
    return parallel_state.get_tensor_model_parallel_world_size()
