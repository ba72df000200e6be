"""Reads files of version 0.1, whose Kimi Delta Attention had other parameters.

In version 0.1 ``in_proj`` also had the sections ``f_a`` and ``z_a`` (or ``f`` and
``z``) and ``beta``. The norm before the mixer was stored with ``in_proj``. Distributed
checkpoints have the same tensors today, under other keys. In a plain state dict the old
``in_proj.weight`` is one tensor, whose rows belong to several parameters today.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.distributed.checkpoint.filesystem import FileSystemReader

from .observe import log_once

if TYPE_CHECKING:
    from .state_dict import StateDict

# Ends of keys in distributed checkpoints: today -> in version 0.1.
_OLD_KEY_ENDS = {
    "in_proj.weight.g": "in_proj.weight.f",
    "in_proj.weight.gate": "in_proj.weight.z",
    "beta_proj.weight": "in_proj.weight.beta",
    "f_proj.weight": "in_proj.weight.f",
    "f_a_proj.weight": "in_proj.weight.f_a",
    "f_b_proj.weight": "f_b_weight",
    "g_proj.weight": "in_proj.weight.z",
    "g_a_proj.weight": "in_proj.weight.z_a",
    "g_b_proj.weight": "z_b_weight",
    "input_layernorm.weight": "self_attention.in_proj.layer_norm_weight",
}
# For each gate (forget gate, output gate): the ends of its keys with low rank, the ends
# with full rank, and the config's field with the rank.
_KEY_ENDS_OF_GATES = (
    (
        ("f_a_proj.weight", "in_proj.weight.f_a"),
        ("f_proj.weight", "in_proj.weight.g", "in_proj.weight.f"),
        "kda_f_lora_rank",
    ),
    (
        ("g_a_proj.weight", "in_proj.weight.z_a"),
        ("g_proj.weight", "in_proj.weight.gate", "in_proj.weight.z"),
        "kda_gate_lora_rank",
    ),
)
_CONVERTED_MESSAGE = (
    "this checkpoint's layers of Kimi Delta Attention were written by megatron_gdn 0.1 "
    "and are read under their old names. The next checkpoint has Megatron's names."
)


def _stem_and_mapped_end(key: str, ends: Mapping[str, str]) -> tuple[str, str] | None:
    """If ``key`` ends in a key of ``ends``: ``key`` without that end, and the end's
    value in ``ends``. Else None."""
    for end, other in ends.items():
        if key == end or key.endswith(f".{end}"):
            return key.removesuffix(end), other
    return None


def load_old_names(
    load: Callable,
    strategy: object,
    sharded_state_dict: StateDict,
    checkpoint_dir: str | Path,
    *args: object,
    **kwargs: object,
) -> StateDict:
    """Call Megatron's ``load``; tensors that the checkpoint lacks are read by their
    keys of version 0.1.

    ``load`` is ``TorchDistLoadShardedStrategy.load``; the other arguments are those of
    ``load``. A tensor has its old key only during the call.

    Raises:
        ValueError: the checkpoint's gates have another rank than the model's.
    """
    from megatron.core.dist_checkpointing import ShardedTensor
    from megatron.core.dist_checkpointing.dict_utils import (
        dict_list_map_inplace,
        extract_matching_values,
        merge,
        nested_values,
    )

    tensors = [
        value
        for value in nested_values(sharded_state_dict)
        if isinstance(value, ShardedTensor)
        and _stem_and_mapped_end(value.key, _OLD_KEY_ENDS)
    ]
    if not tensors:
        return load(strategy, sharded_state_dict, checkpoint_dir, *args, **kwargs)
    stored: StateDict = (
        FileSystemReader(checkpoint_dir).read_metadata().state_dict_metadata
    )
    renamed = []  # (tensor, its key today, its key of version 0.1)
    for tensor in tensors:
        found = _stem_and_mapped_end(tensor.key, _OLD_KEY_ENDS)
        assert found is not None
        old = "".join(found)
        if tensor.key in stored:
            continue
        if old in stored:
            renamed.append((tensor, tensor.key, old))
        else:
            _require_same_rank(tensor.key, stored)
    if not renamed:
        return load(strategy, sharded_state_dict, checkpoint_dir, *args, **kwargs)
    log_once(_CONVERTED_MESSAGE)
    # Transformer Engine's entries for projections that version 0.1 did not have: they
    # are loaded as None.
    absent, others = extract_matching_values(
        sharded_state_dict,
        lambda value: (
            value.key.endswith("_extra_state") and value.unique_key not in stored
        ),
    )
    dict_list_map_inplace(lambda value: None, absent)
    for tensor, _, old in renamed:
        tensor.key = old
    try:
        loaded = load(strategy, others, checkpoint_dir, *args, **kwargs)
    finally:
        for tensor, new, _ in renamed:
            tensor.key = new
    merge(loaded, absent)
    return loaded


def _require_same_rank(key: str, stored: StateDict) -> None:
    """Raise a ValueError if the gate of ``key`` has another rank in the checkpoint.

    ``key`` is not in the checkpoint; ``stored`` are the checkpoint's entries by key.
    """
    for low_ends, full_ends, setting in _KEY_ENDS_OF_GATES:
        # (key without its end, "") if the key has one of the ends, else None
        low_match = _stem_and_mapped_end(key, dict.fromkeys(low_ends, ""))
        full_match = _stem_and_mapped_end(key, dict.fromkeys(full_ends, ""))
        # ``others``: the keys that the gate would have with full rank if ``key`` is of
        # low rank, and the reverse
        if low_match is not None:
            others = [f"{low_match[0]}{end}" for end in full_ends]
        elif full_match is not None:
            others = [f"{full_match[0]}{end}" for end in low_ends]
        else:
            continue
        for other in others:
            if other not in stored:
                continue
            rank = 0
            if full_match is not None:
                rank = stored[other].size[0]  # a low-rank weight is [rank, D]
            raise ValueError(
                f"{key} is not in the checkpoint, which has {other}: that gate has "
                f"another rank. Set {setting}={rank} in the config (0 or None: full "
                "width), or its option of the 'K' layers, forget_rank or output_rank."
            )


def convert_state_dict(mixer: Any, state_dict: StateDict, prefix: str) -> None:
    """Convert ``state_dict`` in place to today's keys, if version 0.1 wrote it.

    ``mixer`` is the KimiDeltaAttention that loads ``state_dict``; the mixer's keys begin
    with ``prefix``. A state dict of today is not changed. A norm that 0.1 stored with
    in_proj is none of the mixer's today, so its key stays, and a strict load names it.

    Raises:
        ValueError: there are several tensor-parallel ranks. Version 0.1 divided ``f_a``
            and ``z_a`` among them; today every rank has both whole.
    """
    key = f"{prefix}in_proj.weight"
    if key not in state_dict or f"{prefix}beta_proj.weight" in state_dict:
        return
    dims = mixer.dims
    names = ["query", "key", "value"]
    widths = list(dims.in_proj_layout.widths[:3])
    H, K, V = dims.state_shape[:3]
    for letter, rank, width in (
        ("f", dims.forget_rank, H * K),
        ("z", dims.output_rank, H * V),
    ):
        names.append(f"{letter}_a" if rank else letter)
        widths.append(rank or width)
    names.append("beta")
    widths.append(H)
    weight = state_dict[key]
    if len(weight) != sum(widths):
        return  # the sizes differ from the model's, so torch's load will raise an error
    if mixer.tp_size > 1:
        raise ValueError(
            f"{key} is a weight of megatron_gdn 0.1 on one of {mixer.tp_size} "
            "tensor-parallel ranks, and a plain state dict is converted on one rank "
            "only. Load it with tensor_model_parallel_size=1, or save it as a "
            "distributed checkpoint (--ckpt-format torch_dist) with version 0.1."
        )
    log_once(_CONVERTED_MESSAGE)
    sections = dict(zip(names, weight.split(widths), strict=True))
    # The sections of today's in_proj are the first rows, in the same order.
    state_dict[key] = weight[: dims.in_proj_layout.width]
    state_dict[f"{prefix}beta_proj.weight"] = sections["beta"]
    for old, new in (("f", "f"), ("z", "g")):
        if f"{old}_a" in sections:
            state_dict[f"{prefix}{new}_a_proj.weight"] = sections[f"{old}_a"]
            wide = state_dict.pop(f"{prefix}{old}_b_weight")
            state_dict[f"{prefix}{new}_b_proj.weight"] = wide
        elif not dims.gates_in_in_proj:
            state_dict[f"{prefix}{new}_proj.weight"] = sections[old]
    for name in ("weight", "bias"):
        old = f"{prefix}conv1d_{name}"
        if old in state_dict:
            state_dict[f"{prefix}conv1d.{name}"] = state_dict.pop(old)
