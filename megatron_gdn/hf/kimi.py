"""Kimi Linear: the fields of its ``config.json``, Megatron's settings, and the maps of
its weights.

A HybridModel has 'K' (Kimi Delta Attention) or '+' (latent attention without position
embedding) for each layer, then '-' (MLP) or 'E' (experts).

In ``tensor_map(names, sources, dim)``, ``names`` are Megatron's names and ``sources`` is
a dict: key in the files -> shape. Tensor-parallel ranks divide the dimension ``dim``;
without ``dim`` every rank has the whole tensor. `TensorMap` has the other arguments.
``prefix`` is the start of Megatron's names, ``hf_prefix`` is the start of keys in the
files. ``sizes``: the result of `sizes_of`. ``zero_centred``: Megatron stores the gains of
norms minus 1.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from ..kda.hf import kda_layer_maps
from ..kda.sizes import KDADims
from ..mixers.tensor_map import TensorMap, tensor_map
from .config_fields import ConfigFields, check_field
from .field_groups import FieldGroups, fields_without_effect
from .json_files import short_text

# transformers' class
KIMI_ARCHITECTURE = "KimiLinearForCausalLM"

# Attributes of built layers -> the values with which the published models compute. No
# field of the config sets `norm_epsilon`, the epsilon of the norms inside latent
# attention.
PUBLISHED_OPTIONS = {
    "gate_lower_bound": None,
    "use_qk_l2norm": True,
    "norm_epsilon": 1e-6,
}

# Fields inside `linear_attn_config` -> their names outside of it, in KimiLinearConfig.
_NAMES_OUTSIDE_LINEAR_ATTN_CONFIG = {
    "head_dim": "linear_head_dim",
    "num_heads": "linear_num_heads",
    "short_conv_kernel_size": "linear_conv_kernel_dim",
    "kda_layers": "kda_layers",
    "full_attn_layers": "full_attn_layers",
}
KIMI_FIELDS = FieldGroups(
    model_name="Kimi Linear",
    read_fields=frozenset(
        {
            "architectures",
            "first_k_dense_replace",
            "full_attn_layers",
            "hidden_size",
            "intermediate_size",
            "kda_layers",
            "kv_lora_rank",
            "layer_types",
            "linear_conv_kernel_dim",
            "linear_head_dim",
            "linear_num_heads",
            "mlp_layer_types",
            "moe_intermediate_size",
            "n_group",
            "n_shared_experts",
            "num_attention_heads",
            "num_experts",
            "num_experts_per_tok",
            "num_hidden_layers",
            "num_key_value_heads",
            "q_lora_rank",
            "qk_nope_head_dim",
            "qk_rope_head_dim",
            "rms_norm_eps",
            "routed_scaling_factor",
            "tie_word_embeddings",
            "topk_group",
            "v_head_dim",
            "vocab_size",
        }
    ),
    setting_fields=frozenset(
        {
            "attention_bias",
            "hidden_act",
            "mla_use_nope",
            "moe_layer_freq",
            "moe_router_activation_func",
            "norm_topk_prob",
            "use_grouped_topk",
        }
    ),
    without_effect=fields_without_effect(
        {
            "the sizes of latent attention give it": "head_dim qk_head_dim",
            "attention has no rotary embedding": """
                rope_parameters rope_scaling rope_theta
            """,
            "heads of multi-token prediction are not built": "num_nextn_predict_layers",
            "no code of the model reads it": "pretraining_tp",
        }
    ),
    other_names={
        "model_max_length": "max_position_embeddings",
        "moe_renormalize": "norm_topk_prob",
        "num_expert_group": "n_group",
        "num_experts_per_token": "num_experts_per_tok",
        "num_local_experts": "num_experts",
        "num_shared_experts": "n_shared_experts",
    },
    names_in_table={
        "n_group": "expert_groups",
        "topk_group": "chosen_expert_groups",
        "n_shared_experts": "shared_experts",
    },
)
_SYMBOL_OF_MIXER_TYPE = {"linear_attention": "K", "full_attention": "+"}
_SYMBOL_OF_MLP_TYPE = {"dense": "-", "sparse": "E"}


def canonical_fields(values: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The fields ``values`` of the file ``where`` by the names of KimiLinearConfig; the
    fields inside ``linear_attn_config`` are moved out of it.

    Raises as `FieldGroups.canonical_fields`.
    """
    values = dict(values)
    nested = values.pop("linear_attn_config", None) or {}
    check_field("linear_attn_config", nested, where)
    for name, value in nested.items():
        canonical = _NAMES_OUTSIDE_LINEAR_ATTN_CONFIG.get(name)
        if canonical is None:
            raise ValueError(
                f"{where}: linear_attn_config has {short_text(name)}, which is not "
                "known as a field of a Kimi Linear, and could change the model. Remove "
                "it if it does not."
            )
        if value is None:
            continue
        outside = values.setdefault(canonical, value)
        if outside is None:
            values[canonical] = value
        elif outside != value:
            raise ValueError(
                f"{where}: linear_attn_config has {name}={short_text(value)}, and "
                f"{canonical}={short_text(outside)}; give one value."
            )
    return KIMI_FIELDS.canonical_fields(values, where)


def pattern_of(fields: ConfigFields) -> str:
    """A HybridModel's pattern: for each layer the symbol of its mixer ("K" or "+"), then
    of its MLP ("-") or experts ("E"). Raises a ValueError if fields contradict each
    other."""
    count = fields["num_hidden_layers"]
    listed_types = _mixer_types_of_lists(fields, count)
    mixers = _layer_symbols("layer_types", _SYMBOL_OF_MIXER_TYPE, fields, listed_types)
    if mixers is None:
        # transformers' default: '+' in the layers 4, 8, ..., counted from 0
        mixers = ["K"] * count
        for layer in range(4, count, 4):
            mixers[layer] = "+"
    dense_count = fields.get("first_k_dense_replace", None)
    types_by_count = None
    if dense_count is not None:
        types_by_count = (["dense"] * dense_count + ["sparse"] * count)[:count]
    mlps = _layer_symbols(
        "mlp_layer_types", _SYMBOL_OF_MLP_TYPE, fields, types_by_count
    )
    if mlps is None:
        # transformers' default, too: experts in every layer but the first
        mlps = ["-"] + ["E"] * (count - 1)
    return "".join(mixer + mlp for mixer, mlp in zip(mixers, mlps, strict=True))


def _mixer_types_of_lists(fields: ConfigFields, count: int) -> list[str] | None:
    """The type of each of ``count`` layers by the fields ``kda_layers`` and
    ``full_attn_layers``, lists of layer numbers from 1; None without these fields."""
    delta = fields.get("kda_layers", None)
    full = fields.get("full_attn_layers", None)
    if delta is None and full is None:
        return None
    numbers = sorted((delta or []) + (full or []))
    if numbers != list(range(1, count + 1)):
        raise ValueError(
            f"{fields.where}: kda_layers and full_attn_layers must name each of the "
            f"{count} layers once, from 1; they name {short_text(numbers)}."
        )
    return [
        "full_attention" if n in (full or []) else "linear_attention"
        for n in range(1, count + 1)
    ]


def _layer_symbols(
    name: str,
    symbols: Mapping[str, str],
    fields: ConfigFields,
    other_types: list[str] | None,
) -> list[str] | None:
    """The symbol of each layer by the field ``name``, a list of layer types.

    ``symbols``: layer type -> symbol. ``other_types``: the layer types by other fields,
    which must agree; None if the file has no such fields. Returns None if neither gives
    the types.
    """
    count = fields["num_hidden_layers"]
    types = fields.get(name, None)
    if types is None:
        types = other_types
    if types is None:
        return None
    if other_types is not None and list(types) != other_types:
        raise ValueError(
            f"{fields.where}: {name}={short_text(types)} contradicts the fields that "
            f"give {short_text(other_types)}; give one of them."
        )
    unknown = sorted(set(types) - symbols.keys())
    if unknown or len(types) != count:
        raise ValueError(
            f"{fields.where}: {name} must be {count} times one of "
            f"{', '.join(map(repr, symbols))}; it is {short_text(types)}."
        )
    return [symbols[layer_type] for layer_type in types]


def sizes_of(fields: ConfigFields, pattern: str) -> SimpleNamespace:
    """The sizes of the layers in ``pattern``, as fields of a ``TransformerConfig``.

    Raises:
        ValueError: a size is missing, or Megatron cannot choose experts as the model
            does.
    """
    sizes = {
        "hidden_size": fields["hidden_size"],
        "num_attention_heads": fields["num_attention_heads"],
        "layernorm_epsilon": fields.get("rms_norm_eps", 1e-5),
    }
    if "K" in pattern:
        heads = fields["linear_num_heads"]
        dims = fields["linear_head_dim"]
        sizes |= {
            "linear_num_key_heads": heads,
            "linear_num_value_heads": heads,
            "linear_key_head_dim": dims,
            "linear_value_head_dim": dims,
            "linear_conv_kernel_dim": fields.get("linear_conv_kernel_dim", 4),
        }
    if "+" in pattern:
        sizes |= _latent_sizes(fields)
    if "E" in pattern:
        sizes |= _expert_sizes(fields)
    if "-" in pattern:
        sizes["ffn_hidden_size"] = fields["intermediate_size"]
    return SimpleNamespace(**sizes)


def _latent_sizes(fields: ConfigFields) -> dict[str, Any]:
    """The ``TransformerConfig`` fields of latent attention."""
    heads = fields["num_attention_heads"]
    key_heads = fields["num_key_value_heads"]
    if key_heads != heads:
        raise ValueError(
            f"{fields.where}: num_key_value_heads={key_heads} must be "
            f"num_attention_heads={heads}: each head of latent attention has its own "
            "key and value."
        )
    return {
        # Megatron's attention takes the width of a head's output from here.
        "kv_channels": fields["v_head_dim"],
        "q_lora_rank": fields.get("q_lora_rank", None),
        "kv_lora_rank": fields["kv_lora_rank"],
        "qk_head_dim": fields["qk_nope_head_dim"],
        "qk_pos_emb_head_dim": fields["qk_rope_head_dim"],
        "v_head_dim": fields["v_head_dim"],
    }


def _expert_sizes(fields: ConfigFields) -> dict[str, Any]:
    """The ``TransformerConfig`` fields of router and experts.

    Megatron gets no groups if all groups are chosen, since then groups change nothing.
    """
    fields.require_at_most("num_experts_per_tok", "num_experts")
    fields.require_several_experts_per_token()
    experts_per_token = fields["num_experts_per_tok"]
    width = fields["moe_intermediate_size"]
    sizes = {
        # Megatron needs this field also without "-" layers.
        "ffn_hidden_size": width,
        "num_moe_experts": fields["num_experts"],
        "moe_ffn_hidden_size": width,
        "moe_shared_expert_intermediate_size": width * fields.get("shared_experts", 1),
        "moe_router_topk": experts_per_token,
        "moe_router_topk_scaling_factor": fields.get("routed_scaling_factor", 2.446),
    }
    groups = fields.get("expert_groups", 1)
    chosen_groups = fields.get("chosen_expert_groups", 1)
    if chosen_groups == groups:
        return sizes
    if fields["num_experts"] % groups or chosen_groups > groups:
        raise ValueError(
            f"{fields.where}: n_group={groups} must divide num_experts="
            f"{fields['num_experts']}, and topk_group={chosen_groups} be at most "
            "n_group."
        )
    if experts_per_token // chosen_groups != 2:
        raise ValueError(
            f"{fields.where}: num_experts_per_tok={experts_per_token} over "
            f"topk_group={chosen_groups} is not supported: Megatron scores a group by "
            "its best num_experts_per_tok // topk_group experts, the model by its best "
            "2. Only a quotient of 2 is built."
        )
    return sizes | {
        "moe_router_num_groups": groups,
        "moe_router_group_topk": chosen_groups,
    }


def settings_of(pattern: str) -> dict[str, Any]:
    """The ``TransformerConfig`` fields of the layers in ``pattern``, without the sizes
    (`sizes_of`)."""
    settings: dict[str, Any] = {}
    if "+" in pattern:
        # `LatentAttention` rotates nothing, but Megatron's class makes a rotary
        # embedding. The type "rope" needs no other settings.
        settings |= {
            "multi_latent_attention": True,
            "qk_layernorm": True,
            "rope_type": "rope",
            "apply_rope_fusion": False,
        }
    if "E" in pattern:
        settings |= {
            "moe_router_score_function": "sigmoid",
            "moe_router_enable_expert_bias": True,
            "moe_router_dtype": "fp32",
        }
    return settings


def kda_ranks(sizes: SimpleNamespace) -> dict[str, int]:
    """The options of the 'K' layers: the projection of each of the two gates is a product
    of two matrices, whose rank is the dim of a head."""
    return {
        "forget_rank": sizes.linear_key_head_dim,
        "output_rank": sizes.linear_value_head_dim,
    }


def layer_maps(
    symbols: str,
    mixer_prefix: str,
    mlp_prefix: str,
    hf_prefix: str,
    sizes: SimpleNamespace,
    keys: Collection[str],
    zero_centred: bool,
) -> Iterator[TensorMap]:
    """Yield the maps of one layer of the config: a mixer and an MLP or experts, with the
    norms before them.

    Args:
        symbols: the symbols of mixer and MLP in the pattern, such as "KE".
        mixer_prefix, mlp_prefix: prefixes of the names of mixer and MLP in Megatron.
        hf_prefix: prefix of the layer's keys in the files.
        sizes: as `sizes_of` gives them.
        keys: all keys of the files.
        zero_centred: Megatron's ``layernorm_zero_centered_gamma``.
    """
    yield from _mixer_maps(symbols[0], mixer_prefix, hf_prefix, sizes, zero_centred)
    yield from _mlp_or_expert_maps(
        symbols[1], mlp_prefix, hf_prefix, sizes, keys, zero_centred
    )


def _mixer_maps(
    symbol: str,
    prefix: str,
    hf_prefix: str,
    sizes: SimpleNamespace,
    zero_centred: bool,
) -> Iterator[TensorMap]:
    """Yield the maps of a layer's mixer, "K" or "+", and of the norm before it."""
    yield _norm_map(
        f"{prefix}input_layernorm.weight",
        f"{hf_prefix}input_layernorm.weight",
        sizes.hidden_size,
        zero_centred,
    )
    if symbol == "K":
        yield from kda_layer_maps(
            f"{prefix}self_attention.",
            f"{hf_prefix}self_attn.",
            KDADims.of(sizes, **kda_ranks(sizes)),
            "kimi_linear",
            zero_centered_gamma=zero_centred,
        )
    else:
        yield from _latent_attention_maps(
            f"{prefix}self_attention.", f"{hf_prefix}self_attn.", sizes, zero_centred
        )


def _latent_attention_maps(
    prefix: str, hf_prefix: str, sizes: SimpleNamespace, zero_centred: bool
) -> Iterator[TensorMap]:
    """Yield the maps of latent attention; Megatron's rows have the files' order."""
    D = sizes.hidden_size
    H = sizes.num_attention_heads
    shared_dim = sizes.qk_pos_emb_head_dim
    query_width = H * (sizes.qk_head_dim + shared_dim)
    latent_width = sizes.kv_lora_rank
    key_value_width = H * (sizes.qk_head_dim + sizes.v_head_dim)
    # Megatron's name -> name in the files, shape
    projections: dict[str, tuple[str, tuple[int, int]]] = {}
    norms: dict[str, tuple[str, int]] = {}
    if sizes.q_lora_rank is None:
        projections["linear_q_proj"] = ("q_proj", (query_width, D))
    else:
        rank = sizes.q_lora_rank
        projections["linear_q_down_proj"] = ("q_a_proj", (rank, D))
        projections["linear_q_up_proj"] = ("q_b_proj", (query_width, rank))
        norms["q_layernorm"] = ("q_a_layernorm", rank)
    down_shape = (latent_width + shared_dim, D)
    projections["linear_kv_down_proj"] = ("kv_a_proj_with_mqa", down_shape)
    projections["linear_kv_up_proj"] = ("kv_b_proj", (key_value_width, latent_width))
    norms["kv_layernorm"] = ("kv_a_layernorm", latent_width)
    for name, (hf_name, shape) in projections.items():
        source = {f"{hf_prefix}{hf_name}.weight": shape}
        yield tensor_map(f"{prefix}{name}.weight", source, 0)
    for name, (hf_name, size) in norms.items():
        yield _norm_map(
            f"{prefix}{name}.weight", f"{hf_prefix}{hf_name}.weight", size, zero_centred
        )
    output = {f"{hf_prefix}o_proj.weight": (D, H * sizes.v_head_dim)}
    yield tensor_map(f"{prefix}linear_proj.weight", output, 1)


def _mlp_or_expert_maps(
    symbol: str,
    prefix: str,
    hf_prefix: str,
    sizes: SimpleNamespace,
    keys: Collection[str],
    zero_centred: bool,
) -> Iterator[TensorMap]:
    """Yield the maps of a layer's MLP ("-") or experts ("E") and of the norm before
    them.

    ``keys``: all keys of the files. Transformer Engine fuses the norm into an MLP's
    first linear, so that norm has two possible names in Megatron.
    """
    D = sizes.hidden_size
    # transformers saves dense MLPs under the name that published files have for experts
    mlp_hf_prefix = f"{hf_prefix}block_sparse_moe."
    norm_names = (f"{prefix}pre_mlp_layernorm.weight",)
    if symbol == "E":
        yield from _expert_maps(f"{prefix}mlp.", mlp_hf_prefix, sizes)
    else:
        fused_norm = f"{prefix}mlp.linear_fc1.layer_norm_weight"
        norm_names = (fused_norm,) + norm_names
        if f"{mlp_hf_prefix}gate_proj.weight" not in keys:
            mlp_hf_prefix = f"{hf_prefix}mlp."
        yield from _dense_mlp_maps(
            f"{prefix}mlp.", mlp_hf_prefix, D, sizes.ffn_hidden_size
        )
    key = f"{hf_prefix}post_attention_layernorm.weight"
    yield _norm_map(norm_names, key, D, zero_centred)


def _dense_mlp_maps(
    prefix: str,
    hf_prefix: str,
    hidden: int,
    ffn: int,
    hf_names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
) -> Iterator[TensorMap]:
    """Yield the maps of one MLP: fc1 ``[2 ffn, hidden]``, then fc2 ``[hidden, ffn]``.

    ``hf_names``: the files' names of its gate, up and down projections.
    """
    gate, up, down = (f"{hf_prefix}{name}.weight" for name in hf_names)
    sources = {gate: (ffn, hidden), up: (ffn, hidden)}
    yield tensor_map(f"{prefix}linear_fc1.weight", sources, 0, sections=(ffn, ffn))
    yield tensor_map(f"{prefix}linear_fc2.weight", {down: (hidden, ffn)}, 1)


def _expert_maps(
    prefix: str, hf_prefix: str, sizes: SimpleNamespace
) -> Iterator[TensorMap]:
    """Yield the maps of a router, its experts and the shared expert."""
    D = sizes.hidden_size
    experts = sizes.num_moe_experts
    router = {f"{hf_prefix}gate.weight": (experts, D)}
    yield tensor_map(f"{prefix}router.weight", router)
    bias = {f"{hf_prefix}gate.e_score_correction_bias": (experts,)}
    yield tensor_map(f"{prefix}router.expert_bias", bias, fp32=True)
    for expert in range(experts):
        expert_hf_prefix = f"{hf_prefix}experts.{expert}."
        width = sizes.moe_ffn_hidden_size
        for entry in _dense_mlp_maps(
            "", expert_hf_prefix, D, width, ("w1", "w3", "w2")
        ):
            # Grouped experts number their weights; sequential experts number their
            # modules.
            linear = entry.name.removesuffix(".weight")
            grouped = f"{prefix}experts.{linear}.weight{expert}"
            sequential = f"{prefix}experts.local_experts.{expert}.{linear}.weight"
            yield replace(entry, names=(grouped, sequential), is_expert=True)
    shared_width = sizes.moe_shared_expert_intermediate_size
    shared_hf_prefix = f"{hf_prefix}shared_experts."
    yield from _dense_mlp_maps(
        f"{prefix}shared_experts.", shared_hf_prefix, D, shared_width
    )


def _norm_map(
    names: str | tuple[str, ...], key: str, size: int, zero_centred: bool
) -> TensorMap:
    """The map of a norm's gain ``[size]``; the files store the gain itself, Megatron the
    gain minus 1 if ``zero_centred``."""
    return tensor_map(names, {key: (size,)}, shift=-float(zero_centred))
