"""Fill a built Megatron model from a Hugging Face folder, and write a Megatron model to
a Hugging Face folder.

Each rank loads the layers of its pipeline stage. Of each layer it loads its
tensor-parallel shard and its experts. The names of parameters show whether a norm is
fused into a projection (Transformer Engine) or separate (local modules), and whether
experts are grouped or sequential.

A linear with a low-rank adapter of Megatron-Bridge is inside a wrapper module. The
wrapper's ``to_wrap`` is the linear, ``adapter`` is the low-rank branch (matrices A and
B), and ``weight`` is the merged weight W + (alpha / dim) B A.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

import torch
from megatron.core import parallel_state
from megatron.core.models.hybrid.hybrid_block import HybridStack
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from torch import Tensor, nn

from ..mixers.latent_attention import LatentAttention
from ..mixers.tensor_map import HFRef, TensorMap, dequantised
from .model_map import HFModelConfig, MegatronModelKind, read_hf_config
from .new_folder import refuse_existing
from .safetensors_files import (
    SafetensorsFolder,
    progress_bar,
    require_finite,
    write_folder,
)
from .tensor_plan import TensorPlan, and_others, plan_tensors

logger = logging.getLogger(__name__)

_LAYER_NUMBER_PATTERN = re.compile(r"decoder\.layers\.(\d+)\.")
_EXPERT_NUMBER_PATTERN = re.compile(
    r"(?<=\.experts\.linear_fc[12]\.weight)\d+|(?<=\.local_experts\.)\d+"
)
# The one buffer that a file's tensor fills; other buffers are no weights.
_EXPERT_BIAS_NAME = "router.expert_bias"


def _parallel_rank(kind: str) -> int:
    """This process's rank in Megatron's parallel group ``kind``, such as
    "tensor_model"."""
    return getattr(parallel_state, f"get_{kind}_parallel_rank")()


def _parallel_size(kind: str) -> int:
    """The size of Megatron's parallel group ``kind``, such as "tensor_model"."""
    return getattr(parallel_state, f"get_{kind}_parallel_world_size")()


def load_hf_weights(
    model: nn.Module, folder: str | Path, *, keep_dtypes: bool = False
) -> None:
    """Fill ``model`` with the weights of a Hugging Face folder, one tensor at a time.

    Args:
        model: a HybridModel or GPTModel (or one pipeline chunk of it), itself or inside
            Float16Module / DistributedDataParallel. Megatron's parallel groups must
            have been set up.
        folder: a folder with ``config.json`` and safetensors weights.
        keep_dtypes: give parameters the dtypes of `TensorMap.to_megatron` (those of the
            files, or fp32). By default values are cast to the parameters' dtypes.

    Raises:
        ValueError: ``model`` holds no HybridModel or GPTModel, a parameter has no
            tensor in the files, a weight has an illegal dtype (see
            `TensorMap.check_dtype`), or a weight has no place in the model.
            No parameter is changed then. A weight without a place is only found with
            one pipeline stage and one expert rank; otherwise its place may be on
            another rank. A weight with NaN or inf raises the error when it is read;
            the weights that were read before it are then in the model.
    """
    files = SafetensorsFolder(folder)
    config = read_hf_config(folder)
    plan, params = _plan_model(model, config, files)
    _check_source_tensors(files, plan)
    matches = _match_maps_to_parameters(plan, params, config)
    rounded = []
    for entry, names in progress_bar(matches, "load"):
        hf_tensors = [
            files.read_finite(source.key, source.expert) for source in entry.sources
        ]
        for name in names:
            param = params[name]
            shard = _local_shard(entry, hf_tensors, param)
            if not isinstance(param, nn.Parameter):
                # An expert's bias is a buffer, and Megatron's Float16Module has cast it
                # to 16 bits. Megatron makes it fp32 again, but only in the first step.
                param.data = param.data.float()
            if keep_dtypes:
                param.data = shard
            elif not _copy_values(param, shard):
                rounded.append(name)
    if plan.passthrough_keys:
        logger.warning(
            "%d tensors of the %s are not part of a Megatron text model and were not "
            "loaded, the first %s; an export copies them from the source folder.",
            len(plan.passthrough_keys),
            config.architecture,
            plan.passthrough_keys[0],
        )
    if rounded:
        logger.warning(
            "%d parameters have a narrower dtype than their file and were rounded, "
            "the first %s.",
            len(rounded),
            rounded[0],
        )


def save_hf_weights(
    model: nn.Module, folder: str | Path, like: str | Path, fp32_gates: bool = False
) -> None:
    """Write ``model`` as a Hugging Face folder with the files, keys and dtypes of
    ``like``.

    Every rank must call this function. The ranks of the first data-parallel replica
    gather their tensor-parallel shards, one tensor at a time, and the first of these
    ranks writes files; other replicas return at once. Two things are copied from
    ``like``: keys that a Megatron text model does not have (``mtp.``,
    ``model.visual.``), and files that are not weights. Low-rank adapters of
    Megatron-Bridge are merged into the written weights, W + (alpha / dim) B A. The
    model itself is not changed.

    Args:
        model: a HybridModel or GPTModel, as for `load_hf_weights`.
        folder: a new folder, which appears only when it is complete.
        like: the Hugging Face folder that the model came from.
        fp32_gates: write ``A_log``, ``dt_bias`` and the experts' biases as F32 even
            where ``like`` has BF16. By default these tensors get the dtype in ``like``,
            and a warning names tensors that lost bits.

    Raises:
        NotImplementedError: pipeline or expert parallelism, or an adapter that cannot
            be merged.
    """
    tp = _parallel_size("tensor_model")
    pp = _parallel_size("pipeline_model")
    ep = _parallel_size("expert_model")
    expert_tp = _parallel_size("expert_tensor")
    if (pp, ep, expert_tp) != (1, 1, tp):
        raise NotImplementedError(
            f"pipeline_model_parallel_size={pp}, expert_model_parallel_size={ep} and "
            f"expert_tensor_parallel_size={expert_tp}: weights are gathered over "
            "tensor-parallel ranks only. Load the checkpoint with pp=1, ep=1 and "
            "etp=tp first."
        )
    if parallel_state.get_data_parallel_rank(with_context_parallel=True):
        return
    # These errors are raised on every rank: a rank without the error would wait in a
    # collective for ever.
    refuse_existing(folder)
    like_files = SafetensorsFolder(like)
    like_files.other_files()  # raises for a link out of the folder
    exported = _ExportedTensors(model, like_files, fp32_gates)
    if _parallel_rank("tensor_model") > 0:
        # Rank 0 writes; the other ranks enter the same collectives in the same order.
        for key in like_files.specs:
            exported.read(key)
        return
    write_folder(folder, like_files, exported.read)
    if exported.rounded_keys:
        logger.warning(
            "rounded from fp32 to the dtype that the source files have: %s. A_log and "
            "dt_bias are in the exponent of a decay, and experts' biases choose "
            "experts; to keep the trained values, export with fp32_gates=True "
            "(--fp32-gates on the command line).",
            ", ".join(sorted(exported.rounded_keys)),
        )


class _ExportedTensors:
    """The tensors of an export: `read` computes the tensor of a key in the files.

    `read` is a collective: all tensor-parallel ranks must read the same keys in the same
    order. ``rounded_keys`` has the keys of the fp32 tensors, such as ``A_log``, that
    lost bits.
    """

    def __init__(
        self, model: nn.Module, like: SafetensorsFolder, fp32_gates: bool
    ) -> None:
        """``like``, ``fp32_gates``: as for `save_hf_weights`."""
        plan, self._params = _plan_model(model, read_hf_config(like.folder), like)
        self._wrapper_of_weight = _adapter_wrappers(_unwrap_model(model))
        self._like_files = like
        self._fp32_gates = fp32_gates
        self.rounded_keys: set[str] = set()
        # key in the files -> list of (map, source); one pair per expert if experts are
        # stacked
        self._maps_of_key: dict[str, list[tuple[TensorMap, HFRef]]] = {}
        for entry in plan.maps:
            for source in entry.sources:
                self._maps_of_key.setdefault(source.key, []).append((entry, source))
        for key, same_as in plan.aliases.items():
            self._maps_of_key[key] = self._maps_of_key[same_as]
        # Files store the tensors of a fused projection close together, so a cache of
        # four maps suffices.
        self._cached_hf_tensors = lru_cache(maxsize=4)(self._hf_tensors)

    def read(self, key: str) -> Tensor:
        """Compute the tensor ``key`` of the written files; raise a ValueError if a value
        is NaN or inf.

        The files get the keys of the folder ``like`` (:func:`save_hf_weights`). A key
        that no map has, such as a vision tower's, is copied from that folder. Experts
        are stacked as there.
        """
        if key not in self._maps_of_key:
            return self._like_files.read(key)
        tensor = self._compute_tensor(key)
        # Every tensor-parallel rank computes the full tensor, so all ranks raise.
        require_finite(tensor, f"the model's {key}", "Export other weights")
        return tensor

    def _compute_tensor(self, key: str) -> Tensor:
        """The tensor ``key`` of the written files, from the model's weights."""
        maps = self._maps_of_key[key]
        entry, source = maps[0]
        if source.expert is None:
            return self._cached_hf_tensors(entry)[source]
        # not cached: a layer has more experts than the cache holds
        shape = self._like_files.specs[key].shape
        stacked = torch.empty(shape, dtype=self._dtype_of(key), device="cpu")
        for entry, source in maps:
            stacked[source.expert] = self._hf_tensors(entry)[source]
        return stacked

    def _dtype_of(self, key: str) -> torch.dtype:
        """The dtype in which the tensor ``key`` is written."""
        entry, _ = self._maps_of_key[key][0]
        if self._fp32_gates and entry.fp32:
            return torch.float32
        return self._like_files.specs[key].torch_dtype

    def _hf_tensors(self, entry: TensorMap) -> dict[HFRef, Tensor]:
        """The Hugging Face tensors of the map ``entry``, in the dtypes of the written
        files.

        If an fp32 tensor loses bits in these dtypes, its keys are added to
        ``rounded_keys``. All tensor-parallel ranks must call this together.
        """
        full = entry.unshard(self._gather_shards(entry))
        dtypes = {source.key: self._dtype_of(source.key) for source in entry.sources}
        # Megatron may store a norm's gain minus 1, and a rounded gain minus 1 loses bits
        # of the file's gain. So `to_hf_by_source` gives the file's bits of unchanged
        # gains.
        original_gains = {
            key: self._like_files.read(key)
            for key in dtypes
            if key.endswith("norm.weight")
        }
        hf_tensors = entry.to_hf_by_source(full, dtypes, original_gains)
        if entry.fp32:
            imported = entry.to_megatron(list(hf_tensors.values()))
            if not torch.equal(imported.to(full), full):
                self.rounded_keys.update(dtypes)
        return hf_tensors

    @torch.no_grad()
    def _gather_shards(self, entry: TensorMap) -> list[Tensor]:
        """Gather the shards of the Megatron tensor of ``entry`` from all tensor-parallel
        ranks, in rank order; an adapter is merged into them."""
        parameter = next(
            self._params[name] for name in entry.names if name in self._params
        )
        wrapper = self._wrapper_of_weight.get(parameter)
        # Reading the merged weight is a collective of the tensor-parallel ranks.
        if wrapper is None:
            weight = parameter
        else:
            weight = cast(Tensor, wrapper.weight)
        shard = dequantised(weight.detach())
        tp = _parallel_size("tensor_model")
        if tp == 1:
            return [shard]
        shards = [torch.empty_like(shard) for _ in range(tp)]
        group = parallel_state.get_tensor_model_parallel_group()
        torch.distributed.all_gather(shards, shard.contiguous(), group=group)
        return shards


def _unwrap_model(model: Any) -> Any:
    """The HybridModel or GPTModel inside its wrappers; a ValueError if there is none.
    Megatron's own function removes only some kinds of wrappers."""
    inner = model
    while not hasattr(inner, "decoder"):
        inner = getattr(inner, "module", None)
        if inner is None:
            raise ValueError(
                f"a {type(model).__name__} holds no HybridModel or GPTModel of Megatron. "
                "Give one such model, or its wrapper."
            )
    return inner


def _plan_model(
    model: nn.Module, config: HFModelConfig, files: SafetensorsFolder
) -> tuple[TensorPlan, dict[str, Tensor]]:
    """The plan for ``model`` and ``files``, and the model's parameters and experts'
    biases by their global names (`_parameters_by_global_name`).

    Raises a ValueError if the model computes something else than the published model.
    """
    unwrapped = _unwrap_model(model)
    kind: MegatronModelKind = "gpt"
    if isinstance(unwrapped.decoder, HybridStack):
        kind = "hybrid"
    zero_centred = unwrapped.config.layernorm_zero_centered_gamma
    plan = plan_tensors(config, files.specs, kind, zero_centred)
    shared = unwrapped.share_embeddings_and_output_weights
    if shared != config.tied:
        raise ValueError(
            f"tie_word_embeddings={config.tied} in config.json, but the model was "
            f"built with share_embeddings_and_output_weights={shared}; build it with "
            f"{config.tied}."
        )
    for name, module in unwrapped.named_modules():
        _require_published_options(name, module, config)
    return plan, _parameters_by_global_name(unwrapped)


def _require_published_options(
    name: str, module: nn.Module, config: HFModelConfig
) -> None:
    """Raise a ValueError if the module ``name`` was built with other options than the
    published model's (`HFModelConfig.published_options`).

    Options are attributes of layers; a module without the attribute passes.
    """
    if isinstance(module, MLASelfAttention) and not isinstance(module, LatentAttention):
        raise ValueError(
            f"{name} is a {type(module).__name__}, which rotates queries and keys, but "
            f"{config.architecture} has no position embedding. Build the model with "
            "megatron_gdn.specs.kimi_linear_stack_spec."
        )
    for option, value in config.published_options.items():
        built = getattr(module, option, value)
        if built != value:
            raise ValueError(
                f"{name} was built with {option}={built!r}, but Hugging Face models "
                f"with these weights compute with {value!r}. Build the layer with "
                f"{option}={value!r}."
            )


def _parameters_by_global_name(model: Any) -> dict[str, Tensor]:
    """Global name -> parameter or expert bias of this rank's part of the model.

    A global name has the layer's and the expert's number in the whole model, not in this
    rank's part. Parameters of adapters are left out.
    """
    layer_numbers = [layer.layer_number - 1 for layer in model.decoder.layers]
    experts_per_rank = (model.config.num_moe_experts or 0) // _parallel_size(
        "expert_model"
    )
    first_expert = _parallel_rank("expert_model") * experts_per_rank

    def global_layer(match: re.Match) -> str:
        """The prefix that ``match`` found, with the layer's number in the model."""
        return f"decoder.layers.{layer_numbers[int(match[1])]}."

    def global_expert(match: re.Match) -> str:
        """The expert's number in the model, for the number that ``match`` found."""
        return str(int(match[0]) + first_expert)

    tensors = list(model.named_parameters())
    for name, buffer in model.named_buffers():
        if name.endswith(_EXPERT_BIAS_NAME):
            tensors.append((name, buffer))
    parameters = {}
    for name, tensor in tensors:
        owner, separator, _ = name.partition(".adapter.")
        if separator and _is_adapter_wrapper(model.get_submodule(owner)):
            continue
        name = name.replace(".to_wrap.", ".")
        name = _LAYER_NUMBER_PATTERN.sub(global_layer, name, count=1)
        name = _EXPERT_NUMBER_PATTERN.sub(global_expert, name)
        parameters[name] = tensor
    return parameters


def _check_source_tensors(folder: SafetensorsFolder, plan: TensorPlan) -> None:
    """Raise a ValueError if a tensor of the files has an illegal dtype, or if an alias
    differs from its tensor. A tied model's output layer is an alias of the embedding."""
    for key, same_as in plan.aliases.items():
        if folder.specs[key] != folder.specs[same_as] or not torch.equal(
            folder.read(key), folder.read(same_as)
        ):
            raise ValueError(
                f"{key} differs from {same_as}, but tie_word_embeddings is true. Set "
                "it to false in config.json to keep both."
            )
    for entry in plan.maps:
        for source in entry.sources:
            where = f"{source.key} in {folder.path_of(source.key)}"
            entry.check_dtype(folder.specs[source.key].torch_dtype, where)


def _match_maps_to_parameters(
    plan: TensorPlan, params: dict[str, Tensor], config: HFModelConfig
) -> list[tuple[TensorMap, list[str]]]:
    """Pairs: a map of the plan that fills parameters of this rank, and the names of
    these parameters in ``params``.

    Raises a ValueError if a shape differs (computed with meta tensors) or if a parameter
    has no map. A rank that has all layers and experts also raises one if a map has no
    parameter.
    """
    matches = []
    unplaced = []
    for entry in plan.maps:
        names = [name for name in entry.names if name in params]
        meta_tensors = [
            torch.empty(source.slice_shape, dtype=torch.float32, device="meta")
            for source in entry.sources
        ]
        for name in names:
            shape = tuple(_local_shard(entry, meta_tensors, params[name]).shape)
            if shape != tuple(params[name].shape):
                raise ValueError(
                    f"{name} has shape {tuple(params[name].shape)} in the model, but "
                    f"the files give this rank {shape}; build the model with "
                    "config.json's sizes."
                )
        if names:
            matches.append((entry, names))
        else:
            unplaced.append(entry.name)
    has_all_layers = _parallel_size("pipeline_model") == 1
    has_all_experts = _parallel_size("expert_model") == 1
    if unplaced and has_all_layers and has_all_experts:
        raise ValueError(
            f"the model has no {unplaced[0]}{and_others(unplaced)}. Build it with "
            "config.json's sizes and the layer pattern "
            f"{config.hybrid_layer_pattern!r}."
        )
    filled = {name for _, names in matches for name in names}
    if unfilled := [name for name in params if name not in filled]:
        raise ValueError(
            f"the files have no tensor for {unfilled[0]}{and_others(unfilled)} of "
            "the model; build the model with config.json's sizes."
        )
    return matches


def _local_shard(
    entry: TensorMap, hf_tensors: Sequence[Tensor], param: Tensor
) -> Tensor:
    """The values of this rank's parameter ``param``: its shard of the Megatron tensor
    that ``entry`` makes of ``hf_tensors``. A vocabulary is padded to the rows of
    ``param``."""
    if entry.is_expert:
        kind = "expert_tensor"
    else:
        kind = "tensor_model"
    rank = _parallel_rank(kind)
    size = _parallel_size(kind)
    full = entry.to_megatron(hf_tensors)
    if entry.pad_rows:
        rows = param.shape[0] * size
        if rows < full.shape[0]:
            raise ValueError(
                f"the vocabulary has {full.shape[0]} rows, the model's embedding only "
                f"{rows}; set its vocab_size to at least {full.shape[0]}, padded to a "
                f"multiple of {size}."
            )
        padding = full.new_zeros((rows - full.shape[0],) + full.shape[1:])
        full = torch.cat([full, padding])
    return entry.shards(full, size)[rank]


@torch.no_grad()
def _copy_values(param: Tensor, values: Tensor) -> bool:
    """Copy ``values`` into ``param``; return whether the parameter's dtype kept every
    value."""
    converted = values.to(param.dtype)
    param.copy_(converted)
    # For a quantised weight, Transformer Engine also has the initial values, which are
    # not quantised. The optimizer makes its fp32 copy from these values.
    if hasattr(param, "get_high_precision_init_val"):
        initial_values = cast(Any, param).get_high_precision_init_val()
        if initial_values is not None:
            initial_values.copy_(converted)
    if values.dtype == converted.dtype:
        return True
    return torch.equal(converted.to(values.dtype), values)


def _adapter_wrappers(model: nn.Module) -> dict[Tensor, nn.Module]:
    """The weight of each linear with an adapter -> the linear's wrapper; the wrapper's
    ``weight`` is the merged weight."""
    wrappers: dict[Tensor, nn.Module] = {}
    for name, module in model.named_modules():
        if _is_adapter_wrapper(module):
            if not hasattr(type(module), "weight"):
                raise NotImplementedError(
                    f"{name} is a {type(module).__name__}, which has no merged weight: "
                    "an export would lose the adapter. Legal are wrappers with a "
                    "property `weight`, such as those of Megatron-Bridge's LoRA. Merge "
                    "this adapter before the export."
                )
            wrappers[cast(Any, module.to_wrap).weight] = module
    return wrappers


def _is_adapter_wrapper(module: nn.Module) -> bool:
    """Whether ``module`` wraps a linear layer and its LoRA adapter."""
    return {"to_wrap", "adapter"} <= module._modules.keys()
