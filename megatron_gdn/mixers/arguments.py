"""Checks of the arguments and config fields that Megatron gives to every mixer.

Versions of Megatron have different config fields; a field that the config lacks counts
as unset.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, fields
from typing import Any, NamedTuple, cast

import torch
from megatron.core.transformer.cuda_graphs import is_graph_capturing
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from ..compat.observe import log_once
from .options import RECOMPUTE_LEVELS

# keywords of attention's forward, which a mixer ignores
_ATTENTION_KEYWORDS = (
    "key_value_states",
    "padding_mask",
    "rotary_pos_cos",
    "rotary_pos_cos_sin",
    "rotary_pos_emb",
    "rotary_pos_sin",
)
# The attribute that `require_causal` sets on a mask. Its value is the number of writes
# to the mask before the check, and the rows and tokens that the mask was checked for.
_CAUSAL_CHECK_ATTRIBUTE = "_megatron_gdn_causal"
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
    """Raise unless ``mask`` is None or hides exactly the future, as a causal layer
    does.

    Legal masks: None; ones ``[b, S]`` or ``[b, s]``; Megatron's causal bool
    ``[b or 1, 1, s, S]``, True where attention is forbidden; a bool mask of this shape
    with True everywhere, which Megatron's tests pass for "no mask".

    The first layer that gets a mask checks its values, so the host waits for the
    device. This layer marks the tensor, so later layers need no check. All layers check
    an inference tensor, since torch does not count writes to it.

    Args:
        mask: the ``attention_mask`` of a forward.
        rows: b, the number of batch rows.
        tokens: S, the tokens of a row over all context-parallel ranks.
        local_positions: returns the sequence positions of this rank's s tokens.

    Raises:
        NotImplementedError: another mask, or values that cannot be read.
        TypeError: ``mask`` is no tensor.
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
        # torch counts the writes to a tensor in `_version`
        checked_for = (mask._version, rows, tokens)
    if (
        checked_for is not None
        and getattr(mask, _CAUSAL_CHECK_ATTRIBUTE, None) == checked_for
    ):
        return
    if mask.is_meta or mask.is_cuda and torch.cuda.is_current_stream_capturing():
        raise NotImplementedError(
            "the values of attention_mask cannot be checked on the meta device, nor "
            f"while a CUDA graph is captured. {_MASK_HELP}"
        )
    positions_s = torch.as_tensor(local_positions(), device=mask.device)
    local_tokens = len(positions_s)
    shape = tuple(mask.shape)
    if mask.dim() == 2:
        shape_fits = shape in ((rows, tokens), (rows, local_tokens))
        legal = shape_fits and bool((mask == 1).all())
    else:
        shape_fits = shape in (
            (rows, 1, local_tokens, tokens),
            (1, 1, local_tokens, tokens),
        )
        future_sS = torch.arange(tokens, device=mask.device) > positions_s[:, None]
        is_bool = shape_fits and mask.dtype == torch.bool
        legal = is_bool and bool((mask == future_sS).all() or mask.all())
    if not legal:
        why = (
            f"does not fit {rows} rows of {tokens} tokens, {local_tokens} of them on "
            f"this rank: it must be [{rows} or 1, 1, {local_tokens}, {tokens}] and "
            f"causal, or [{rows}, {tokens}] of ones"
        )
        if shape_fits:
            first = int(positions_s[0])
            last = int(positions_s[-1])
            why = (
                "is not a causal mask of this rank's tokens, which by the layer's "
                f"option cp_layout lie at {first} to {last}; "
                "Megatron's loaders cut batches that are not packed in zigzag: leave "
                "cp_layout at 'auto' there"
            )
        raise NotImplementedError(
            f"attention_mask of shape {shape} and dtype {mask.dtype} {why}. "
            f"{_MASK_HELP}"
        )
    if checked_for is not None:
        setattr(mask, _CAUSAL_CHECK_ATTRIBUTE, checked_for)


def refuse_unsupported(sequence_len_offset: object, keywords: dict[str, Any]) -> None:
    """Raise if ``sequence_len_offset``, an attention bias or an unknown keyword is
    given.

    ``keywords`` are the further keywords of a forward. Attention's keywords that change
    nothing in a mixer are legal.
    """
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
    if unknown := [name for name in given if name not in _ATTENTION_KEYWORDS]:
        raise TypeError(
            "GatedDeltaNet.forward() does not know the keyword(s) "
            f"{', '.join(unknown)}; it ignores only {', '.join(_ATTENTION_KEYWORDS)}."
        )


class KnownConfigFields(NamedTuple):
    """The fields of Megatron's config that concern one mixer.

    If any other field that begins with one of the ``prefixes`` is set, the log names
    it.
    """

    # the name of every field about this mixer begins with one of these
    prefixes: tuple[str, ...]
    # names of fields that the mixer or the spec of its model reads
    with_effect: tuple[str, ...]
    # names of fields that change nothing in this mixer, each with the reason
    without_effect: Mapping[str, str]


GDN_CONFIG_FIELDS = KnownConfigFields(
    prefixes=("gdn_", "linear_"),
    with_effect=(
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

# For each name of Megatron's `--recompute-modules`: "layer" (the backward computes the
# whole layer again) or a part that `options.RECOMPUTE_LEVELS` names.
RECOMPUTE_MODULES = {"gdn": "layer", "gdn_norm_out": "norm_out"}
# Values of `--offload-modules` that name parts of attention.
_ATTENTION_OFFLOADS = ("qkv_linear", "core_attn", "attn_proj")


def recomputed_parts(
    config: TransformerConfig,
    recompute: str | None,
    modules: Mapping[str, str] = RECOMPUTE_MODULES,
) -> frozenset[str]:
    """The parts of a mixer that its backward computes again.

    Args:
        config: its ``recompute_modules`` has names of ``--recompute-modules``.
        recompute: the layer's option, a key of :data:`.options.RECOMPUTE_LEVELS`.
        modules: a table such as :data:`RECOMPUTE_MODULES`.

    Returns:
        The parts that the option and the config name, or only ``{"layer"}`` if the
        config names the whole layer.

    Raises:
        ValueError: the option is ``"none"``, and the config names a module.
        NotImplementedError: the whole layer under FP8.
    """
    asked = set(RECOMPUTE_LEVELS[recompute or "none"])
    names: Iterable[str] = ()
    if config.recompute_granularity == "selective":
        # Megatron's config replaces None by its default
        names = cast(Iterable[str], config.recompute_modules)
    for name in names:
        if name in modules and recompute == "none":
            raise ValueError(
                f"recompute='none' and --recompute-modules {name} contradict. Leave "
                f"the option out, or take {name!r} out of the modules."
            )
        if name in modules:
            asked.add(modules[name])
        # no log for names in RECOMPUTE_MODULES: they have an effect on other mixers
        elif name.startswith("gdn") and name not in RECOMPUTE_MODULES:
            log_once(
                f"GatedDeltaNet: --recompute-modules {name} has no effect here. 'gdn' "
                "computes the whole layer again, the layer's option recompute parts of "
                "it."
            )
    if "layer" not in asked:
        return frozenset(asked)
    if config.fp8:
        raise NotImplementedError(
            "--recompute-modules gdn with fp8: Megatron's checkpoint runs the layer "
            "again without FP8, so the gradients would be those of another function. "
            "Take 'gdn' out of the modules; recompute='full' saves most of that memory."
        )
    return frozenset({"layer"})


def check_config_fields(
    mixer: str, known: KnownConfigFields, config: TransformerConfig
) -> None:
    """Log fields about ``mixer`` (its name) that are set and have no effect.

    Raises a NotImplementedError if the config cuts weights further than tensor
    parallelism does.
    """
    # Megatron computes this field from --tensor-parallel-num-weight-shards
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
        if not name.startswith(known.prefixes) or name in known.with_effect:
            continue
        default = defaults.get(name, MISSING)
        if default is MISSING:
            # The name is no field of the config, or a factory makes its default.
            is_set = bool(value)
        else:
            is_set = value != default
        if not is_set:
            continue
        why = known.without_effect.get(
            name, f"this version of {mixer} does not know it"
        )
        log_once(f"{mixer}: config.{name}={value!r} has no effect: {why}.")
    if not config.fine_grained_activation_offloading:
        return
    prefixes = ("gdn",) + known.prefixes
    without_effect = [
        name
        # Megatron's config refuses offloading without modules
        for name in cast(Iterable[str], config.offload_modules)
        if name in _ATTENTION_OFFLOADS or name.startswith(prefixes)
    ]
    if without_effect:
        log_once(
            f"{mixer}: --offload-modules {' '.join(without_effect)} has no effect on "
            "this layer: what its backward needs stays on the GPU."
        )
