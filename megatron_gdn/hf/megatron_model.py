"""Fill a built Megatron model from a Hugging Face folder, and write the model to a
folder.

Each rank reads its tensor-parallel shard of the layers of its pipeline stage, and its
experts. The names of parameters show whether a norm is fused into a projection
(Transformer Engine) or separate (local modules), and whether experts are grouped or
sequential.

A low-rank adapter of Megatron-Bridge is a module around a linear: ``to_wrap`` is the
linear, ``adapter`` the low-rank branch, ``weight`` the merged weight W + (alpha / dim)
B A.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from functools import lru_cache
from itertools import chain
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

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.")
_EXPERT = re.compile(
    r"(?<=\.experts\.linear_fc[12]\.weight)\d+|(?<=\.local_experts\.)\d+"
)
# A buffer with the values of a file's tensor; other buffers are no weights.
_EXPERT_BIAS = "router.expert_bias"


def _rank_and_size(kind: str) -> tuple[int, int]:
    """This rank's index in the group ``kind`` (such as tensor_model), and the group's
    size."""
    state: Any = parallel_state  # Any, since Megatron annotates some functions wrongly
    rank, size = (
        getattr(state, f"get_{kind}_parallel_{part}") for part in ("rank", "world_size")
    )
    return rank(), size()


def load_hf_weights(
    model: nn.Module, folder: str | Path, *, keep_dtypes: bool = False
) -> None:
    """Fill ``model`` with the weights of a Hugging Face folder, one tensor at a time.

    Args:
        model: a HybridModel or GPTModel (or one pipeline chunk of it), bare or wrapped
            in Float16Module / DistributedDataParallel, with this rank's parallel groups
            set up.
        folder: a folder with ``config.json`` and safetensors weights.
        keep_dtypes: give parameters the dtypes of `TensorMap.to_megatron` (the files',
            or fp32); by default values are cast to the parameters' dtypes.

    Raises:
        ValueError: before any parameter is changed, if the files do not fill a
            parameter, if a weight has an illegal dtype (see `TensorMap.check_dtype`),
            or if the model has no place for a weight (checked with one pipeline stage
            and one expert rank, where every weight must have a place). If a weight has
            NaN or inf, the error comes when the weight is read; earlier weights are
            then in the model.
    """
    weights = SafetensorsFolder(folder)
    config = read_hf_config(folder)
    plan, params = _plan_model(model, config, weights)
    _check_source_tensors(weights, plan)
    targets = _match_parameters(plan, params, config)
    rounded = []
    for entry, names in progress_bar(targets, "load"):
        pieces = [
            weights.read_finite(source.key, source.expert) for source in entry.sources
        ]
        for name in names:
            piece = _local_shard(entry, pieces, params[name])
            if not isinstance(params[name], nn.Parameter):
                # Megatron makes experts' biases fp32 again, but only in the first step.
                params[name].data = params[name].data.float()
            if keep_dtypes:
                params[name].data = piece
            elif not _copy_into(params[name], piece):
                rounded.append(name)
    if plan.passthrough:
        logger.warning(
            "%d tensors of the %s are not part of a Megatron text model and were not "
            "loaded, the first %s; an export copies them from the source folder.",
            len(plan.passthrough),
            config.architecture,
            plan.passthrough[0],
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

    Every rank must call this function. The first data-parallel replica gathers its
    tensor-parallel shards, one tensor at a time, and its first rank writes files; other
    replicas return at once. Keys that a Megatron text model does not have (``mtp.``,
    ``model.visual.``) and files that are not weights are copied from ``like``. Low-rank
    adapters of Megatron-Bridge are merged into the weights, W + (alpha / dim) B A; the
    model itself stays unmerged.

    Args:
        model: a HybridModel or GPTModel, as for `load_hf_weights`.
        folder: a new folder, which appears only when it is complete.
        like: the Hugging Face folder the model came from.
        fp32_gates: write ``A_log``, ``dt_bias`` and the experts' biases as F32 even
            where ``like`` has BF16. By default they get the dtype in ``like``, and a
            warning names tensors that lost bits.

    Raises:
        NotImplementedError: pipeline or expert parallelism, or an adapter that cannot
            be merged.
    """
    groups = "pipeline_model", "expert_model", "expert_tensor"
    (_, pp), (_, ep), (_, expert_tp) = map(_rank_and_size, groups)
    tp_rank, tp = _rank_and_size("tensor_model")
    if (pp, ep, expert_tp) != (1, 1, tp):
        raise NotImplementedError(
            f"pipeline_model_parallel_size={pp}, expert_model_parallel_size={ep} and "
            f"expert_tensor_parallel_size={expert_tp}: weights are gathered over "
            "tensor-parallel ranks only. Load the checkpoint with pp=1, ep=1 and "
            "etp=tp first."
        )
    if parallel_state.get_data_parallel_rank(with_context_parallel=True):
        return
    # Every rank must raise here: a rank that went on would wait in a collective for
    # ever.
    refuse_existing(folder)
    source = SafetensorsFolder(like)
    source.other_files()  # raises for a link out of the folder
    export = _Export(model, source, fp32_gates)
    if tp_rank:
        # Rank 0 writes; the other ranks enter the same collectives in the same order.
        for key in source.specs:
            export.read(key)
        return
    write_folder(folder, source, export.read)
    if export.rounded:
        logger.warning(
            "rounded from fp32 to the dtype that the source files have: %s. A_log and "
            "dt_bias are in the exponent of a decay, and experts' biases choose "
            "experts; to keep the trained values, export with fp32_gates=True "
            "(--fp32-gates on the command line).",
            ", ".join(sorted(export.rounded)),
        )


class _Export:
    """Computes the tensors of a save; tensor-parallel ranks must `read` the same keys
    in one order.

    ``rounded`` has the keys of the fp32 tensors, such as ``A_log``, that lost bits.
    """

    def __init__(
        self, model: nn.Module, source: SafetensorsFolder, fp32_gates: bool
    ) -> None:
        plan, self._params = _plan_model(model, read_hf_config(source.folder), source)
        self._wrappers = _adapter_wrappers(_unwrapped(model))
        self._source = source
        self._fp32_gates = fp32_gates
        self.rounded: set[str] = set()
        self._maps_of: dict[str, list[tuple[TensorMap, HFRef]]] = {}
        for entry in plan.maps:
            for tensor in entry.sources:
                self._maps_of.setdefault(tensor.key, []).append((entry, tensor))
        self._maps_of |= {
            key: self._maps_of[same_as] for key, same_as in plan.aliases.items()
        }
        # Files store a fused projection's tensors close together, so pieces of four
        # maps suffice.
        self._cached_pieces = lru_cache(maxsize=4)(self._pieces)

    def read(self, key: str) -> Tensor:
        """Compute the tensor ``key`` in its export dtype; experts are stacked as in the
        file.

        Raises a ValueError if a value is NaN or inf, on every tensor-parallel rank.
        """
        if key not in self._maps_of:
            return self._source.read(key)
        computed = self._compute(key)
        require_finite(computed, f"the model's {key}", "Export other weights")
        return computed

    def _compute(self, key: str) -> Tensor:
        """The tensor ``key``, of the model's weights."""
        parts = self._maps_of[key]
        if parts[0][1].expert is None:
            ((entry, source),) = parts
            return self._cached_pieces(entry)[source]
        shape = self._source.specs[key].shape
        packed = torch.empty(shape, dtype=self._dtype_of(key), device="cpu")
        for entry, source in parts:
            packed[source.expert] = self._pieces(entry)[source]
        return packed

    def _dtype_of(self, key: str) -> torch.dtype:
        """The dtype in which the tensor ``key`` is written."""
        if self._fp32_gates and self._maps_of[key][0][0].fp32:
            return torch.float32
        return self._source.specs[key].torch_dtype

    def _pieces(self, entry: TensorMap) -> dict[HFRef, Tensor]:
        """The Hugging Face tensors of the map ``entry``, in the dtypes of the written
        files."""
        full = entry.unshard(self._gather_shards(entry))
        dtypes = {source.key: self._dtype_of(source.key) for source in entry.sources}
        # Megatron may store a norm gain minus 1, whose rounding would lose bits of the
        # file's gain.
        gains = [key for key in dtypes if key.endswith("norm.weight")]
        pieces = entry.exported(
            full, dtypes, {key: self._source.read(key) for key in gains}
        )
        if entry.fp32 and not torch.equal(
            entry.to_megatron(list(pieces.values())).to(full), full
        ):
            self.rounded.update(dtypes)
        return pieces

    @torch.no_grad()
    def _gather_shards(self, entry: TensorMap) -> list[Tensor]:
        """Gather the Megatron shards of ``entry`` from all tensor-parallel ranks, in
        rank order."""
        parameter = next(
            self._params[name] for name in entry.names if name in self._params
        )
        wrapper = self._wrappers.get(parameter)
        # Reading the merged weight is a collective of the tensor-parallel ranks.
        if wrapper is None:
            weight = parameter
        else:
            weight = cast(Tensor, wrapper.weight)
        shard = dequantised(weight.detach())
        _, size = _rank_and_size("tensor_model")
        if size == 1:
            return [shard]
        shards = [torch.empty_like(shard) for _ in range(size)]
        group = parallel_state.get_tensor_model_parallel_group()
        torch.distributed.all_gather(shards, shard.contiguous(), group=group)
        return shards


def _unwrapped(model: Any) -> Any:
    """The model inside its wrappers; Megatron's own function does not know all
    wrappers."""
    while not hasattr(model, "decoder") and isinstance(
        getattr(model, "module", None), nn.Module
    ):
        model = model.module
    return model


def _plan_model(
    model: nn.Module, config: HFModelConfig, files: SafetensorsFolder
) -> tuple[TensorPlan, dict[str, Tensor]]:
    """The plan to fill ``model`` from ``files``, and the result of
    :func:`_global_parameters`."""
    bare = _unwrapped(model)
    kind: MegatronModelKind = (
        "hybrid" if isinstance(bare.decoder, HybridStack) else "gpt"
    )
    plan = plan_tensors(
        config, files.specs, kind, bare.config.layernorm_zero_centered_gamma
    )
    shared = bare.share_embeddings_and_output_weights
    if shared != config.tied:
        raise ValueError(
            f"tie_word_embeddings={config.tied} in config.json, but the model was "
            f"built with share_embeddings_and_output_weights={shared}; build it with "
            f"{config.tied}."
        )
    for name, module in bare.named_modules():
        _require_published_options(name, module, config)
    return plan, _global_parameters(bare)


def _require_published_options(
    name: str, module: nn.Module, config: HFModelConfig
) -> None:
    """Raise if ``module`` was built with an option that the published model does not
    have."""
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


def _global_parameters(model: Any) -> dict[str, Tensor]:
    """Parameters outside adapters and the experts' biases, named with the layer and
    expert numbers of the whole model."""
    layers = [layer.layer_number - 1 for layer in model.decoder.layers]
    ep_rank, ep = _rank_and_size("expert_model")
    first_expert = ep_rank * ((model.config.num_moe_experts or 0) // ep)
    parameters = {}
    biases = (pair for pair in model.named_buffers() if pair[0].endswith(_EXPERT_BIAS))
    for name, parameter in chain(model.named_parameters(), biases):
        owner, of_adapter, _ = name.partition(".adapter.")
        if of_adapter and _is_adapter_wrapper(model.get_submodule(owner)):
            continue
        name = name.replace(".to_wrap.", ".")
        name = _LAYER.sub(
            lambda m: f"decoder.layers.{layers[int(m[1])]}.", name, count=1
        )
        parameters[_EXPERT.sub(lambda m: str(int(m[0]) + first_expert), name)] = (
            parameter
        )
    return parameters


def _check_source_tensors(folder: SafetensorsFolder, plan: TensorPlan) -> None:
    """Check the dtypes of all imported tensors; each alias must equal the tensor that
    it copies."""
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


def _match_parameters(
    plan: TensorPlan, params: dict[str, Tensor], config: HFModelConfig
) -> list[tuple[TensorMap, list[str]]]:
    """Pair each map with the names in ``params`` that it fills; check shapes on meta
    tensors."""
    targets = []
    unplaced = []
    for entry in plan.maps:
        here = [name for name in entry.names if name in params]
        pieces = [
            torch.empty(source.piece_shape, device="meta") for source in entry.sources
        ]
        for name in here:
            shape = tuple(_local_shard(entry, pieces, params[name]).shape)
            if shape != tuple(params[name].shape):
                raise ValueError(
                    f"{name} has shape {tuple(params[name].shape)} in the model, but "
                    f"the files give this rank {shape}; build the model with "
                    "config.json's sizes."
                )
        if here:
            targets.append((entry, here))
        else:
            unplaced.append(entry.name)
    if (
        unplaced
        and _rank_and_size("pipeline_model")[1]
        == _rank_and_size("expert_model")[1]
        == 1
    ):
        raise ValueError(
            f"the model has no {unplaced[0]}{and_others(unplaced)}. Build it with "
            "config.json's sizes and the layer pattern "
            f"{config.hybrid_layer_pattern!r}."
        )
    filled = {name for _, here in targets for name in here}
    if unfilled := [name for name in params if name not in filled]:
        raise ValueError(
            f"the files have no tensor for {unfilled[0]}{and_others(unfilled)} of "
            "the model; build the model with config.json's sizes."
        )
    return targets


def _local_shard(entry: TensorMap, pieces: Sequence[Tensor], param: Tensor) -> Tensor:
    """This rank's shard of the map ``entry``; a vocabulary is padded to the rows of
    ``param``."""
    rank, size = _rank_and_size("expert_tensor" if entry.is_expert else "tensor_model")
    full = entry.to_megatron(pieces)
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
def _copy_into(param: Tensor, piece: Tensor) -> bool:
    """Copy ``piece`` into ``param``; return whether the parameter's dtype kept every
    value."""
    cast = piece.to(param.dtype)
    param.copy_(cast)
    # Transformer Engine keeps a quantised weight's first values for the optimizer's
    # fp32 copy.
    first = getattr(param, "get_high_precision_init_val", lambda: None)()
    if first is not None:
        first.copy_(cast)
    return piece.dtype == cast.dtype or torch.equal(cast.to(piece.dtype), piece)


def _adapter_wrappers(model: nn.Module) -> dict[Tensor, nn.Module]:
    """Map each wrapped linear's weight to its wrapper, whose ``weight`` is the merged
    weight."""
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
