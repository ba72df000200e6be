"""Checks of the arguments and config fields that Megatron gives to every mixer.

Versions of Megatron have different config fields; a field that the config lacks counts
as unset.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields
from typing import Any, NamedTuple

import torch
from megatron.core.transformer.cuda_graphs import is_graph_capturing
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from ..compat.observe import log_once
from .options import RECOMPUTE_LEVELS

_ATTENTION_ONLY = (
    "key_value_states",
    "padding_mask",
    "rotary_pos_cos",
    "rotary_pos_cos_sin",
    "rotary_pos_emb",
    "rotary_pos_sin",
)
_CHECKED_MARK = "_megatron_gdn_causal"
_MASK_HELP = (
    "This layer is causal and reads document boundaries from packed_seq_params "
    "(qkv_format='thd', cu_seqlens_q) only. Pass attention_mask=None or a causal mask; "
    "put padding at the end of a sequence. Leave out --reset-attention-mask, with "
    "which Megatron masks between documents, and pack documents instead: "
    "megatron_gdn.pack_rows(x, mask) lays the documents of a mask [b, S] (ids from 1, "
    "0 at padding) end to end and gives packed_seq_params, megatron_gdn.unpack_rows "
    "brings them back."
)


def require_causal(
    mask: Tensor | None,
    rows: int,
    tokens: int,
    local_positions: Callable[[], Tensor | range],
) -> None:
    """Refuse an attention mask that masks anything but the future.

    Legal masks: None; ones ``[b, S]`` or ``[b, s]``; Megatron's causal bool
    ``[b or 1, 1, s, S]``, True where attention is forbidden; True everywhere, which
    Megatron's tests pass for "no mask". b is ``rows``, S is ``tokens`` of all ranks,
    and ``local_positions()`` are the sequence positions of this rank's s tokens.

    The first layer that gets a mask checks its values, which waits for the device, and
    marks the tensor for later layers. torch counts no writes to inference tensors, so
    all layers check these.
    """
    # While Megatron captures graphs, it passes placeholders (such as zeros), which are
    # not checked.
    if mask is None or is_graph_capturing():
        return
    if not isinstance(mask, Tensor):
        raise TypeError(
            f"attention_mask is a {type(mask).__name__}, not a tensor. {_MASK_HELP}"
        )
    if mask.is_inference():
        checked_for = None
    else:
        checked_for = (mask._version, rows, tokens)
    if checked_for is not None and getattr(mask, _CHECKED_MARK, None) == checked_for:
        return
    if mask.is_meta or mask.is_cuda and torch.cuda.is_current_stream_capturing():
        raise NotImplementedError(
            "the values of attention_mask cannot be checked on the meta device, nor "
            f"while a CUDA graph is captured. {_MASK_HELP}"
        )
    positions = torch.as_tensor(local_positions(), device=mask.device)
    local = len(positions)
    shape = tuple(mask.shape)
    if mask.dim() == 2:
        fits = shape in ((rows, tokens), (rows, local))
        legal = fits and bool((mask == 1).all())
    else:
        fits = mask.dim() == 4 and shape in (
            (rows, 1, local, tokens),
            (1, 1, local, tokens),
        )
        future = torch.arange(tokens, device=mask.device) > positions[:, None]
        is_bool = fits and mask.dtype == torch.bool
        legal = is_bool and bool((mask == future).all() or mask.all())
    if not legal:
        why = (
            f"does not fit {rows} rows of {tokens} tokens, {local} of them on this "
            f"rank: it must be [{rows} or 1, 1, {local}, {tokens}] and causal, or "
            f"[{rows}, {tokens}] of ones"
        )
        if fits:
            why = (
                "is not a causal mask of this rank's tokens, which by the layer's "
                f"option cp_layout lie at {int(positions[0])} to {int(positions[-1])}; "
                "Megatron's loaders cut batches that are not packed in zigzag: leave "
                "cp_layout at 'auto' there"
            )
        raise NotImplementedError(
            f"attention_mask of shape {shape} and dtype {mask.dtype} {why}. "
            f"{_MASK_HELP}"
        )
    if checked_for is not None:
        setattr(mask, _CHECKED_MARK, checked_for)


def refuse_unsupported(sequence_len_offset: object, keywords: dict[str, Any]) -> None:
    """Raise for ``sequence_len_offset``, an attention bias, and keywords that no mixer
    knows."""
    if sequence_len_offset is not None:
        raise NotImplementedError(
            "GatedDeltaNet does not support sequence_len_offset (local CUDA graphs, "
            "flash_decode); it reads inference_context.sequence_len_offset."
        )
    if keywords.get("attention_bias") is not None:
        raise NotImplementedError(
            "GatedDeltaNet has no attention scores to add attention_bias to; pass None."
        )
    given = sorted(name for name, value in keywords.items() if value is not None)
    if unknown := [name for name in given if name not in _ATTENTION_ONLY]:
        raise TypeError(
            "GatedDeltaNet.forward() does not know the keyword(s) "
            f"{', '.join(unknown)}; it ignores only {', '.join(_ATTENTION_ONLY)}."
        )


class ConfigFields(NamedTuple):
    """Fields of Megatron's config that concern one mixer, and which of them have an
    effect."""

    # the name of every field about this mixer begins with one of these
    prefixes: tuple[str, ...]
    read: tuple[str, ...]  # fields that the mixer or the spec of its model reads
    # fields that change nothing in this mixer, and the reason
    without_effect: Mapping[str, str]


GDN_FIELDS = ConfigFields(
    prefixes=("gdn_", "linear_"),
    read=(
        "gdn_output_gate_activation",
        "linear_allow_neg_eigval",
        "linear_attention_freq",
        "linear_conv_kernel_dim",
        "linear_cp_mode",
        "linear_key_head_dim",
        "linear_num_key_heads",
        "linear_num_value_heads",
        "linear_value_head_dim",
    ),
    without_effect={
        "gdn_pre_gated_delta_rule_fusion": "what comes before the rule is one pass here anyway",
        "gdn_conv_pad_alignment": "the convolution takes any number of tokens",
    },
)

# The part of a mixer that each name of `--recompute-modules` computes again.
RECOMPUTE_MODULES = {"gdn": "whole", "gdn_norm_out": "norm_out"}
# Values of `--offload-modules` that name parts of attention.
_ATTENTION_OFFLOADS = ("qkv_linear", "core_attn", "attn_proj")


def recomputed_parts(
    config: TransformerConfig,
    recompute: str | None,
    modules: Mapping[str, str] = RECOMPUTE_MODULES,
) -> frozenset[str]:
    """The parts in :data:`RECOMPUTE_LEVELS` to recompute; ``{"whole"}`` is the whole
    layer.

    ``modules``: the part of the mixer for each name of ``--recompute-modules``.
    """
    asked = set(RECOMPUTE_LEVELS[recompute or "none"])
    selective = config.recompute_granularity == "selective"
    for name in config.recompute_modules or () if selective else ():
        if name in modules and recompute == "none":
            raise ValueError(
                f"recompute='none' and --recompute-modules {name} contradict. Leave "
                f"the option out, or take {name!r} out of the modules."
            )
        if name in modules:
            asked.add(modules[name])
        elif name.startswith("gdn") and name not in RECOMPUTE_MODULES:
            log_once(
                f"GatedDeltaNet: --recompute-modules {name} has no effect here. 'gdn' "
                "computes the whole layer again, the layer's option recompute parts of "
                "it."
            )
    if "whole" not in asked:
        return frozenset(asked)
    if config.fp8:
        raise NotImplementedError(
            "--recompute-modules gdn with fp8: Megatron's checkpoint runs the layer "
            "again without FP8, so the gradients would be those of another function. "
            "Take 'gdn' out of the modules; recompute='full' saves most of that memory."
        )
    return frozenset({"whole"})


def check_config_fields(
    mixer: str, config_fields: ConfigFields, config: TransformerConfig
) -> None:
    """Refuse weights cut further than by tp; log set fields of this mixer without
    effect."""
    if getattr(config, "gtp_weight_remat_size", 1) > 1:
        raise NotImplementedError(
            "--tensor-parallel-num-weight-shards "
            f"{config.tensor_parallel_num_weight_shards} cuts each weight further than "
            f"tensor_model_parallel_size={config.tensor_model_parallel_size} does, "
            f"through the sections of in_proj of {mixer}. Leave the flag out; "
            "--use-distributed-optimizer shares optimizer states, and fully_shard or "
            "Megatron-FSDP the weights."
        )
    defaults = {field.name: field.default for field in fields(config)}
    for name, value in vars(config).items():
        if not name.startswith(config_fields.prefixes) or name in config_fields.read:
            continue
        default = defaults.get(name, MISSING)
        if not value if default is MISSING else value == default:
            continue
        why = config_fields.without_effect.get(
            name, f"this version of {mixer} does not know it"
        )
        log_once(f"{mixer}: config.{name}={value!r} has no effect: {why}.")
    if not config.fine_grained_activation_offloading:
        return
    asked = config.offload_modules or ()
    without = [
        name
        for name in asked
        if name in _ATTENTION_OFFLOADS
        or name.startswith(("gdn",) + config_fields.prefixes)
    ]
    if without:
        log_once(
            f"{mixer}: --offload-modules {' '.join(without)} has no effect on this "
            "layer: what its backward needs stays on the GPU."
        )
