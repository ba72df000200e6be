"""Apply one layer's tensor maps: a Hugging Face module's state dict to ranks, and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from .tensor_map import TensorMap


def ranks_from_hf(
    maps: Sequence[TensorMap], hf_state: Mapping[str, Tensor], tp_size: int, what: str
) -> list[dict[str, Tensor]]:
    """Hugging Face tensors to the layer's, one dict for each tensor-parallel rank.

    Args:
        maps: of every parameter, without prefixes.
        hf_state: exactly the tensors that the maps name.
        tp_size: number of ranks.
        what: the layer's name in errors.

    Raises:
        ValueError: a tensor is missing, unknown or of the wrong shape or dtype, or does not split.
    """
    sources = {source.key: source for entry in maps for source in entry.sources}
    if hf_state.keys() != sources.keys():
        raise ValueError(
            f"{what} has {sorted(sources)}; "
            f"missing {sorted(sources.keys() - hf_state.keys())}, "
            f"not known {sorted(hf_state.keys() - sources.keys())}."
        )
    for key, source in sources.items():
        if tuple(hf_state[key].shape) != source.shape:
            raise ValueError(
                f"{key} has shape {tuple(hf_state[key].shape)}, but the layer's sizes ask for "
                f"{source.shape}."
            )
    for entry in maps:
        for source in entry.sources:
            entry.check_dtype(hf_state[source.key].dtype, source.key, may_round=True)
    ranks: list[dict[str, Tensor]] = [{} for _ in range(tp_size)]
    for entry in maps:
        full = entry.to_megatron([hf_state[source.key] for source in entry.sources])
        for state, piece in zip(ranks, entry.shards(full, tp_size), strict=True):
            state[entry.name] = piece
    return ranks


def hf_from_ranks(
    maps: Sequence[TensorMap],
    ranks: Sequence[Mapping[str, Tensor]],
    dtypes: Mapping[str, torch.dtype] | None = None,
    originals: Mapping[str, Tensor] | None = None,
) -> dict[str, Tensor]:
    """The inverse of `ranks_from_hf`.

    Args:
        maps: as in the import.
        ranks: one Megatron state dict for each tensor-parallel rank.
        dtypes: the dtype to write each Hugging Face tensor in; default the tensor's own.
        originals: Hugging Face tensors as imported, see `TensorMap.to_hf`.
    """
    dtypes, originals = dtypes or {}, originals or {}
    state: dict[str, Tensor] = {}
    for entry in maps:
        full = entry.unshard([rank[entry.name] for rank in ranks])
        keys = [source.key for source in entry.sources]
        known = [originals[key] for key in keys] if all(k in originals for k in keys) else None
        natural = [piece.dtype for piece in known] if known else [full.dtype] * len(keys)
        wanted = [dtypes.get(*pair) for pair in zip(keys, natural, strict=True)]
        pieces = entry.to_hf(full, wanted, known)
        state.update(zip(keys, pieces, strict=True))
    return state
