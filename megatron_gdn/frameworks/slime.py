"""Builds our layer in slime's models of Qwen3.5 and Qwen3-Next; weights get slime's
names.

    --spec megatron_gdn.frameworks.slime get_qwen3_5_spec

slime's layer has the parameters of transformers, whole on every rank. Each of our
parameters is translated to parameters of slime's layer, which slime's loader and
converter can handle:

    ours, under ``self_attention.``   slime's, under ``self_attention.``
    in_proj.layer_norm_weight         input_layernorm.weight
    in_proj.weight                    linear_attn.in_proj_qkv.weight, ..., or
                                      in_proj_qkvz, ..._ba
    conv1d.weight, A_log, dt_bias     linear_attn.<the same>
    out_norm.weight, out_proj.weight  linear_attn.norm.weight,
                                      linear_attn.out_proj.weight

slime gives a tensor-parallel rank contiguous rows of a tensor, while each of our ranks
has rows of every section. So slime gets a tensor in *rank order*: all rows of rank 0,
then all rows of rank 1, ...
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, wraps
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

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

if TYPE_CHECKING:
    from argparse import Namespace

    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
    from megatron.core.transformer.transformer_config import TransformerConfig

_LAYER_PREFIX = "self_attention."
# values of a config.json's model_type
_MODEL_TYPES = ("qwen3_5", "qwen3_5_moe", "qwen3_next")


def get_qwen3_5_spec(
    args: Namespace, config: TransformerConfig, vp_stage: int | None
) -> TransformerBlockSubmodules:
    """Make slime's block spec of Qwen3.5 with :class:`megatron_gdn.GatedDeltaNet` as
    the mixer.

    After this call slime's loader and converter also accept our layer's parameters.
    The layer's options come from ``MEGATRON_GDN_OPTIONS``, and its sizes from
    ``args.hf_checkpoint``.

    Raises:
        ValueError: ``--apply-layernorm-1p`` is absent, or ``hf_checkpoint`` is of
            another model.
        FileNotFoundError: ``hf_checkpoint`` is not a folder with a ``config.json`` and
            weights.
        ImportError: slime or Transformer Engine is absent.
    """
    return _spec_with_our_layer("qwen3_5", args, config, vp_stage)


def get_qwen3_next_spec(
    args: Namespace, config: TransformerConfig, vp_stage: int | None
) -> TransformerBlockSubmodules:
    """Make slime's block spec of Qwen3-Next; errors are those of
    :func:`get_qwen3_5_spec`."""
    return _spec_with_our_layer("qwen3_next", args, config, vp_stage)


def _spec_with_our_layer(
    model: str, args: Namespace, config: TransformerConfig, vp_stage: int | None
) -> TransformerBlockSubmodules:
    """Slime's block spec of ``model`` with our layer in place of slime's; the other
    arguments and the errors are those of :func:`get_qwen3_5_spec`."""
    if not config.layernorm_zero_centered_gamma:
        raise ValueError(
            "slime copies the norm weights of Qwen3.5 and Qwen3-Next from the files, "
            "which hold gamma - 1. Add --apply-layernorm-1p, as in slime's "
            "scripts/models."
        )
    dims = read_hf_config(args.hf_checkpoint).gdn
    # a wrong file raises now, not after a rollout
    _published_dtypes(args.hf_checkpoint)
    plugin = import_module(f"slime_plugins.models.{model}")
    block = getattr(plugin, f"get_{model}_spec")(args, config, vp_stage)
    # slime's own layer reads its sizes from Hugging Face's config, our layer from this
    vars(config).update(dims.config_fields)
    # slime's `slice_with_cp` cuts every document into 2 cp pieces, the zigzag layout.
    options = with_launch_options(GatedDeltaNet, {"cp_layout": "zigzag"})
    mixer = gated_delta_net_spec("te", **options)
    count = 0
    for layer in block.layer_specs:
        # plugin.Attention: slime's class of the linear attention of both models
        if layer.submodules.self_attention.module is plugin.Attention:
            layer.submodules.self_attention = mixer
            count += 1
    register_our_names()
    log_once(
        f"slime: {count} layers of this stage are built as megatron_gdn.GatedDeltaNet."
    )
    return block


@cache
def register_our_names() -> None:
    """Wrap slime's loader and converter in this process, so that both accept our
    parameters."""
    from slime.backends.megatron_utils import (  # pyright: ignore[reportMissingImports]
        hf_to_megatron,
        megatron_to_hf,
    )

    for model_type in _MODEL_TYPES:
        hf_to_megatron._LOADERS[model_type] = _wrap_loader(
            hf_to_megatron._LOADERS[model_type]
        )
    megatron_to_hf._convert_to_hf_core = _wrap_converter(
        megatron_to_hf._convert_to_hf_core
    )
    megatron_to_hf.quantize_params = _wrap_quantizer(megatron_to_hf.quantize_params)


def _wrap_loader(slime_loader: Callable) -> Callable:
    """A loader that loads our parameters in rank order; ``slime_loader`` loads all
    others."""

    @wraps(slime_loader)
    def load(name: str, reader: Any, hf_config: object) -> Tensor:
        """Load the whole Megatron parameter ``name``; a parameter of our layer is in
        rank order. ``reader`` reads Hugging Face's files."""
        prefix, entry = _prefix_and_map(name, reader.path)
        if entry is None:
            return slime_loader(name, reader, hf_config)
        hf_tensors = [
            slime_loader(prefix + source.key, reader, hf_config)
            for source in entry.sources
        ]
        return _to_rank_order(entry, entry.to_megatron(hf_tensors))

    return load


def _wrap_converter(slime_converter: Callable) -> Callable:
    """A converter that also turns our parameters into Hugging Face's tensors;
    ``slime_converter`` converts all others."""

    @wraps(slime_converter)
    def convert(
        args: Namespace, model_name: str, name: str, param: Tensor
    ) -> list[tuple[str, Tensor]]:
        """Convert ``param``, the Megatron parameter ``name``, to pairs (Hugging Face
        name, tensor). A parameter of our layer is in rank order, and its tensors get
        the dtypes of the published files. ``args``: slime's arguments; ``model_name``:
        slime's name of the model."""
        prefix, entry = _prefix_and_map(name, args.hf_checkpoint)
        if entry is None:
            return slime_converter(args, model_name, name, param)
        whole = _from_rank_order(entry, param)
        # A shift is computed in fp32, so that only the cast below rounds.
        if entry.shift:
            dtype = torch.float32
        else:
            dtype = whole.dtype
        slime_params = entry.to_hf(whole, [dtype] * len(entry.sources))
        published = _published_dtypes(args.hf_checkpoint)
        return [
            (hf_name, tensor.to(published.get(hf_name, param.dtype)))
            for source, slime_param in zip(entry.sources, slime_params, strict=True)
            for hf_name, tensor in slime_converter(
                args, model_name, prefix + source.key, slime_param
            )
        ]

    return convert


def _wrap_quantizer(slime_quantizer: Callable) -> Callable:
    """A quantizer that calls ``slime_quantizer`` with slime's names of our parameters,
    since slime chooses by name which tensors it quantises."""

    @wraps(slime_quantizer)
    def quantize(
        args: Namespace,
        name: str,
        converted: list,
        *settings: object,
        **options: object,
    ) -> list:
        """Quantize ``converted``, the pairs (Hugging Face name, tensor) that ``convert``
        returned for ``name``. For a parameter of ours, these are one pair for each
        source of the parameter's map."""
        prefix, entry = _prefix_and_map(name, args.hf_checkpoint)
        if entry is None:
            return slime_quantizer(args, name, converted, *settings, **options)
        return [
            pair
            for source, named in zip(entry.sources, converted, strict=True)
            for pair in slime_quantizer(
                args, prefix + source.key, [named], *settings, **options
            )
        ]

    return quantize


def _prefix_and_map(name: str, folder: str | Path) -> tuple[str, TensorMap | None]:
    """Split ``name`` into the part that ends with "self_attention." and our parameter;
    return this part and the parameter's map.

    The map is None if the parameter is not one of ours. ``folder`` has the model's
    Hugging Face files.
    """
    before, layer_prefix, parameter = name.rpartition(_LAYER_PREFIX)
    entry = None
    if layer_prefix:
        entry = _maps_by_name(str(folder)).get(parameter)
    return before + layer_prefix, entry


@cache
def _maps_by_name(folder: str) -> dict[str, TensorMap]:
    """For each name of our parameters, the map between our parameter and slime's
    parameters.

    Names begin after ``self_attention.`` on both sides; ``folder`` has the model's
    ``config.json``.
    """
    model = read_hf_config(folder)
    norm = HFRef("input_layernorm.weight", (model.sizes.hidden_size,))
    maps = gdn_layer_maps("", "linear_attn.", model.gdn, model.storage)
    maps.append(TensorMap(names=("in_proj.layer_norm_weight",), sources=(norm,)))
    return {entry.name: entry for entry in maps}


@cache
def _published_dtypes(folder: str) -> dict[str, torch.dtype]:
    """The dtype of each tensor in ``folder`` by name, except 8-bit tensors, which slime
    quantises itself."""
    specs = SafetensorsFolder(folder).specs.items()
    return {
        name: spec.torch_dtype for name, spec in specs if spec.torch_dtype.itemsize > 1
    }


def _to_rank_order(entry: TensorMap, by_section: Tensor) -> Tensor:
    """The rows of the parameter of ``entry`` as ``[rank 0's shard | ..]``, from
    ``[section 0 | ..]``."""
    if entry.sections:
        return torch.cat(entry.shards(by_section, _tensor_parallel_size()))
    return by_section


def _from_rank_order(entry: TensorMap, by_rank: Tensor) -> Tensor:
    """The inverse of :func:`_to_rank_order`."""
    if entry.sections:
        return entry.unshard(by_rank.chunk(_tensor_parallel_size()))
    return by_rank


def _tensor_parallel_size() -> int:
    return parallel_state.get_tensor_model_parallel_world_size()
