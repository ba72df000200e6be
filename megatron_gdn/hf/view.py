"""See Megatron shards as the Hugging Face tensors they came from."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from ..mixers.tensor_map import HFRef, TensorMap
from .model_config import HFModelConfig, read_hf_config
from .model_map import Architecture
from .plan import Plan, make_plan
from .safetensors_files import SafetensorsFolder, TensorSpec
from .state_dict_adapter import is_gated_delta_net_fp32_param_key

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class SourceRecord:
    """What an export must know of the files a model came from.

    Attributes:
        config: the Hugging Face model.
        specs: dtype and shape of every tensor of the files, in storage order.
        originals: the file's norm gains that Megatron stores around another centre. Only these
            cannot be restored bit for bit from a rounded copy.
        fp32_gates: write ``A_log`` and ``dt_bias`` as F32 even if the file had another dtype.
    """

    config: HFModelConfig
    specs: dict[str, TensorSpec]
    originals: dict[str, Tensor] = field(default_factory=dict)
    fp32_gates: bool = False

    @classmethod
    def from_folder(cls, folder: str | Path, fp32_gates: bool = False) -> SourceRecord:
        """Read headers and the small norm gains of a Hugging Face folder."""
        weights = SafetensorsFolder(folder)
        record = cls(read_hf_config(folder), dict(weights.specs), fp32_gates=fp32_gates)
        for key in weights:
            if key.endswith(("norm.weight", "layernorm.weight")):
                record.originals[key] = weights.read(key)
        return record

    def plan(self, model: Architecture, zero_centered_gamma: bool) -> Plan:
        return make_plan(self.config, self.specs, model, zero_centered_gamma)

    def spec(self, key: str) -> TensorSpec:
        """Dtype and shape that an export gives ``key``."""
        spec = self.specs[key]
        if self.fp32_gates and is_gated_delta_net_fp32_param_key(key):
            return TensorSpec("F32", spec.shape)
        return spec


class HFView:
    """Hugging Face tensors, each computed from Megatron shards when it is read.

    Args:
        plan: the maps of the model, and the keys that repeat another.
        record: dtypes and originals of the source.
        read_shards: called with a map; returns the shards of its Megatron tensor, one of each
            tensor-parallel rank, in rank order (or the whole tensor as the only one).
        rest: has the tensors that no Megatron text model has; None: they are not in the view.

    Attributes:
        rounded_gates: the keys of the ``A_log`` and ``dt_bias`` read so far that lost bits in the
            file's dtype.
    """

    def __init__(
        self,
        plan: Plan,
        record: SourceRecord,
        read_shards: Callable[[TensorMap], Sequence[Tensor]],
        rest: SafetensorsFolder | None = None,
    ) -> None:
        self.spec, self.rounded_gates = record.spec, set[str]()
        self._originals, self._read_shards, self._rest = record.originals, read_shards, rest
        self._maps_of: dict[str, list[tuple[TensorMap, HFRef]]] = {}
        for entry in plan.maps:
            for source in entry.sources:
                self._maps_of.setdefault(source.key, []).append((entry, source))
        self._maps_of |= {key: self._maps_of[same_as] for key, same_as in plan.aliases.items()}
        # Tensors of one fused projection lie close together in the files: keep the last few.
        self._pieces = lru_cache(maxsize=4)(self._compute_pieces)

    def __iter__(self) -> Iterator[str]:
        return iter(self._rest or self._maps_of)

    def read(self, key: str) -> Tensor:
        """The tensor ``key`` in its export dtype; packed experts are put together again."""
        if key not in self._maps_of and self._rest:
            return self._rest.read(key)
        parts = self._maps_of[key]
        if parts[0][1].expert is None:
            ((entry, source),) = parts
            return self._pieces(entry)[source]
        spec = self.spec(key)
        packed = torch.empty(spec.shape, dtype=spec.torch_dtype, device="cpu")
        for entry, source in parts:
            packed[source.expert] = self._compute_pieces(entry)[source]
        return packed

    def _compute_pieces(self, entry: TensorMap) -> dict[HFRef, Tensor]:
        full = entry.unshard(self._read_shards(entry))
        if entry.pad_rows:
            full = full[: entry.sources[0].shape[0]]
        dtypes = [self.spec(source.key).torch_dtype for source in entry.sources]
        original = None
        if entry.shift and all(s.key in self._originals for s in entry.sources):
            original = [self._originals[source.key] for source in entry.sources]
        pieces = entry.to_hf(full, dtypes, original)
        if entry.fp32:
            for source, piece in zip(entry.sources, pieces, strict=True):
                if not torch.equal(piece.to(full.dtype), full.view(piece.shape)):
                    self.rounded_gates.add(source.key)
        return dict(zip(entry.sources, pieces, strict=True))

    def warn_of_rounded_gates(self) -> None:
        """After an export, warn of the decay parameters that lost bits in it."""
        if self.rounded_gates:
            logger.warning(
                "rounded from fp32 to the dtype that the source files have: %s. A_log and dt_bias "
                "are in the exponent of a decay; to keep the trained values, export with "
                "fp32_gates=True (--fp32-gates on the command line).",
                ", ".join(sorted(self.rounded_gates)),
            )


def state_dict_to_hf(
    ranks: Sequence[Mapping[str, Tensor]],
    record: SourceRecord,
    model: Architecture = "hybrid",
    zero_centered_gamma: bool = True,
) -> Iterator[tuple[str, Tensor]]:
    """Whole Megatron state dicts to Hugging Face tensors, one at a time.

    Args:
        ranks: one state dict for each tensor-parallel rank, with global layer and expert numbers.
        record: of the folder the weights came from, or of one with the same architecture.
        model: "hybrid" or "gpt".
        zero_centered_gamma: the model's ``config.layernorm_zero_centered_gamma``.

    Yields:
        ``(key, tensor)`` in the dtype of the source file; ``A_log`` and ``dt_bias`` in fp32 if
        ``record.fp32_gates``, else a warning at the end names those that were rounded.
        Multi-token prediction and vision keys are not in a Megatron text model and so not here;
        `record.plan(...).passthrough` lists them.

    Raises:
        ValueError: a parameter is missing.
    """
    plan = record.plan(model, zero_centered_gamma)

    def read_shards(entry: TensorMap) -> list[Tensor]:
        name = next((name for name in entry.names if name in ranks[0]), None)
        if name is None:
            raise ValueError(f"missing parameter {' or '.join(entry.names)} in the state dict.")
        return [rank[name].detach() for rank in ranks]

    view = HFView(plan, record, read_shards)
    for key in view:
        yield key, view.read(key)
    view.warn_of_rounded_gates()
