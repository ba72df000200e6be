"""Kimi Linear: the fields of its ``config.json``, Megatron's settings, and the maps of
its weights.

A HybridModel has 'K' (Kimi Delta Attention) or '+' (latent attention without position
embedding) for each layer, then '-' (MLP) or 'E' (experts).
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
from .field_groups import FieldGroups, without_effect
from .json_files import shown

# transformers' class
KIMI = "KimiLinearForCausalLM"

# Options of layers with which the published models compute. No field of the config sets
# the epsilon of the norms inside latent attention.
PUBLISHED_OPTIONS = {
    "gate_lower_bound": None,
    "use_qk_l2norm": True,
    "norm_epsilon": 1e-6,
}

# Fields of `linear_attn_config` -> names of KimiLinearConfig.
_NESTED = {
    "head_dim": "linear_head_dim",
    "num_heads": "linear_num_heads",
    "short_conv_kernel_size": "linear_conv_kernel_dim",
    "kda_layers": "kda_layers",
    "full_attn_layers": "full_attn_layers",
}
FIELDS = FieldGroups(
    model="Kimi Linear",
    read=frozenset(
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
    settings=frozenset(
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
    without_effect=without_effect(
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
    known_as={
        "n_group": "expert_groups",
        "topk_group": "chosen_expert_groups",
        "n_shared_experts": "shared_experts",
    },
)
_MIXERS = {"linear_attention": "K", "full_attention": "+"}
_MLPS = {"dense": "-", "sparse": "E"}


def with_usual_names(values: Mapping[str, Any], where: str) -> dict[str, Any]:
    """``values`` and those of its ``linear_attn_config`` under the names of
    KimiLinearConfig; errors are those of `FieldGroups.with_usual_names`."""
    values = dict(values)
    nested = values.pop("linear_attn_config", None) or {}
    check_field("linear_attn_config", nested, where)
    for name, value in nested.items():
        usual = _NESTED.get(name)
        if usual is None:
            raise ValueError(
                f"{where}: linear_attn_config has {shown(name)}, which is not known as "
                "a field of a Kimi Linear, and could change the model. Remove it if it "
                "does not."
            )
        if value is None:
            continue
        known = values.setdefault(usual, value)
        if known is None:
            values[usual] = value
        elif known != value:
            raise ValueError(
                f"{where}: linear_attn_config has {name}={shown(value)}, and "
                f"{usual}={shown(known)}; give one value."
            )
    return FIELDS.with_usual_names(values, where)


def pattern_of(fields: ConfigFields) -> str:
    """A HybridModel's pattern: for each layer the symbols of its mixer and of its
    MLP."""
    count = fields["num_hidden_layers"]
    mixers = _kinds("layer_types", _MIXERS, fields, _types_of_lists(fields, count))
    if mixers is None:
        # As transformers' config.
        mixers = ["+" if n > 0 and n % 4 == 0 else "K" for n in range(count)]
    dense = fields.get("first_k_dense_replace", None)
    by_number = None
    if dense is not None:
        by_number = ["dense" if n < dense else "sparse" for n in range(count)]
    mlps = _kinds("mlp_layer_types", _MLPS, fields, by_number)
    if mlps is None:
        mlps = ["-"] + ["E"] * (count - 1)
    return "".join(map(str.__add__, mixers, mlps))


def _types_of_lists(fields: ConfigFields, count: int) -> list[str] | None:
    """The layer types that the two lists of layer numbers name; None without lists."""
    delta = fields.get("kda_layers", None)
    full = fields.get("full_attn_layers", None)
    if delta is None and full is None:
        return None
    numbers = sorted((delta or []) + (full or []))
    if numbers != list(range(1, count + 1)):
        raise ValueError(
            f"{fields.where}: kda_layers and full_attn_layers must name each of the "
            f"{count} layers once, from 1; they name {shown(numbers)}."
        )
    return [
        "full_attention" if n in (full or []) else "linear_attention"
        for n in range(1, count + 1)
    ]


def _kinds(
    name: str,
    symbols: Mapping[str, str],
    fields: ConfigFields,
    otherwise: list[str] | None,
) -> list[str] | None:
    """A symbol for each layer by the field ``name``, or else by the kinds
    ``otherwise``; both must agree."""
    count = fields["num_hidden_layers"]
    kinds = fields.get(name, None)
    if kinds is None:
        kinds = otherwise
    if kinds is None:
        return None
    if otherwise is not None and list(kinds) != otherwise:
        raise ValueError(
            f"{fields.where}: {name}={shown(kinds)} contradicts the fields that give "
            f"{shown(otherwise)}; give one of them."
        )
    unknown = sorted(set(kinds) - symbols.keys())
    if unknown or len(kinds) != count:
        raise ValueError(
            f"{fields.where}: {name} must be {count} times one of "
            f"{', '.join(map(repr, symbols))}; it is {shown(kinds)}."
        )
    return [symbols[kind] for kind in kinds]


def sizes_of(fields: ConfigFields, pattern: str) -> SimpleNamespace:
    """The ``TransformerConfig`` fields that the config sets.

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
    fields.require_at_most("num_experts_per_tok", "num_experts")
    fields.require_several_experts_per_token()
    used = fields["num_experts_per_tok"]
    width = fields["moe_intermediate_size"]
    sizes = {
        # Megatron needs it also without "-" layers
        "ffn_hidden_size": width,
        "num_moe_experts": fields["num_experts"],
        "moe_ffn_hidden_size": width,
        "moe_shared_expert_intermediate_size": width * fields.get("shared_experts", 1),
        "moe_router_topk": used,
        "moe_router_topk_scaling_factor": fields.get("routed_scaling_factor", 2.446),
    }
    groups = fields.get("expert_groups", 1)
    chosen = fields.get("chosen_expert_groups", 1)
    if chosen == groups:
        return sizes
    if fields["num_experts"] % groups or chosen > groups:
        raise ValueError(
            f"{fields.where}: n_group={groups} must divide num_experts="
            f"{fields['num_experts']}, and topk_group={chosen} be at most n_group."
        )
    if used // chosen != 2:
        raise ValueError(
            f"{fields.where}: num_experts_per_tok={used} over topk_group={chosen} is "
            "not supported: Megatron scores a group by its best num_experts_per_tok // "
            "topk_group experts, the model by its best 2. Only a quotient of 2 is built."
        )
    return sizes | {"moe_router_num_groups": groups, "moe_router_group_topk": chosen}


def settings_of(pattern: str) -> dict[str, Any]:
    """The other ``TransformerConfig`` fields that the weights need."""
    settings: dict[str, Any] = {}
    if "+" in pattern:
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
    """The options of the 'K' layers: both gates have the head's dim as low rank."""
    return {
        "forget_rank": sizes.linear_key_head_dim,
        "output_rank": sizes.linear_value_head_dim,
    }


def layer_maps(
    symbols: str,
    mixer: str,
    mlp: str,
    hf: str,
    sizes: SimpleNamespace,
    keys: Collection[str],
    zero_centred: bool,
) -> Iterator[TensorMap]:
    """The maps of one layer: a mixer and an MLP or experts, with the norms before them.

    ``symbols``: of the two in a pattern; ``mixer``, ``mlp``, ``hf``: the prefixes of
    their keys in Megatron and of the layer's in the files; ``keys``: all keys of the
    files; ``zero_centred``: Megatron's ``layernorm_zero_centered_gamma``.
    """
    yield from _mixer_maps(symbols[0], mixer, hf, sizes, zero_centred)
    yield from _mlp_maps(symbols[1], mlp, hf, sizes, keys, zero_centred)


def _mixer_maps(
    symbol: str, p: str, hf: str, sizes: SimpleNamespace, zero_centred: bool
) -> Iterator[TensorMap]:
    """The maps of a layer's mixer and of the norm before it."""
    yield _norm(
        f"{p}input_layernorm.weight",
        f"{hf}input_layernorm.weight",
        sizes.hidden_size,
        zero_centred,
    )
    if symbol == "K":
        yield from kda_layer_maps(
            f"{p}self_attention.",
            f"{hf}self_attn.",
            KDADims.of(sizes, **kda_ranks(sizes)),
            "kimi_linear",
            zero_centered_gamma=zero_centred,
        )
    else:
        yield from _latent_maps(
            f"{p}self_attention.", f"{hf}self_attn.", sizes, zero_centred
        )


def _latent_maps(
    p: str, hf: str, sizes: SimpleNamespace, zero_centred: bool
) -> Iterator[TensorMap]:
    """The maps of latent attention. Megatron's rows are in the order of the files."""
    D = sizes.hidden_size
    H = sizes.num_attention_heads
    shared = sizes.qk_pos_emb_head_dim
    query = H * (sizes.qk_head_dim + shared)
    latent = sizes.kv_lora_rank
    up = H * (sizes.qk_head_dim + sizes.v_head_dim)
    if sizes.q_lora_rank is None:
        columns = {"linear_q_proj": ("q_proj", (query, D))}
        norms = {}
    else:
        rank = sizes.q_lora_rank
        columns = {
            "linear_q_down_proj": ("q_a_proj", (rank, D)),
            "linear_q_up_proj": ("q_b_proj", (query, rank)),
        }
        norms = {"q_layernorm": ("q_a_layernorm", rank)}
    columns |= {
        "linear_kv_down_proj": ("kv_a_proj_with_mqa", (latent + shared, D)),
        "linear_kv_up_proj": ("kv_b_proj", (up, latent)),
    }
    norms["kv_layernorm"] = ("kv_a_layernorm", latent)
    for name, (key, shape) in columns.items():
        yield tensor_map(f"{p}{name}.weight", {f"{hf}{key}.weight": shape}, 0)
    for name, (key, size) in norms.items():
        yield _norm(f"{p}{name}.weight", f"{hf}{key}.weight", size, zero_centred)
    output = {f"{hf}o_proj.weight": (D, H * sizes.v_head_dim)}
    yield tensor_map(f"{p}linear_proj.weight", output, 1)


def _mlp_maps(
    symbol: str,
    p: str,
    hf: str,
    sizes: SimpleNamespace,
    keys: Collection[str],
    zero_centred: bool,
) -> Iterator[TensorMap]:
    """The maps of a layer's MLP or experts and of the norm before them."""
    D = sizes.hidden_size
    # transformers saves dense MLPs under the name that published files have for experts
    saved = f"{hf}block_sparse_moe."
    names = [f"{p}pre_mlp_layernorm.weight"]
    if symbol == "E":
        yield from _expert_maps(f"{p}mlp.", saved, sizes)
    else:
        names.insert(0, f"{p}mlp.linear_fc1.layer_norm_weight")
        if f"{saved}gate_proj.weight" not in keys:
            saved = f"{hf}mlp."
        yield from _mlp(f"{p}mlp.", saved, D, sizes.ffn_hidden_size)
    key = f"{hf}post_attention_layernorm.weight"
    yield _norm(tuple(names), key, D, zero_centred)


def _mlp(
    p: str,
    hf: str,
    hidden: int,
    ffn: int,
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
) -> Iterator[TensorMap]:
    """The maps of an MLP from ``hidden`` to ``ffn``; ``names``: of its weights in the
    files."""
    gate, up, down = (f"{hf}{name}.weight" for name in names)
    sources = {gate: (ffn, hidden), up: (ffn, hidden)}
    yield tensor_map(f"{p}linear_fc1.weight", sources, 0, sections=(ffn, ffn))
    yield tensor_map(f"{p}linear_fc2.weight", {down: (hidden, ffn)}, 1)


def _expert_maps(p: str, hf: str, sizes: SimpleNamespace) -> Iterator[TensorMap]:
    """The maps of a router, its experts and the shared expert."""
    D = sizes.hidden_size
    experts = sizes.num_moe_experts
    yield tensor_map(f"{p}router.weight", {f"{hf}gate.weight": (experts, D)})
    bias = {f"{hf}gate.e_score_correction_bias": (experts,)}
    yield tensor_map(f"{p}router.expert_bias", bias, fp32=True)
    for e in range(experts):
        of_expert = f"{hf}experts.{e}."
        width = sizes.moe_ffn_hidden_size
        for entry in _mlp("", of_expert, D, width, ("w1", "w3", "w2")):
            # Grouped experts number their weights; sequential experts number their
            # modules.
            linear = entry.name.removesuffix(".weight")
            grouped = f"{p}experts.{linear}.weight{e}"
            sequential = f"{p}experts.local_experts.{e}.{linear}.weight"
            yield replace(entry, names=(grouped, sequential), is_expert=True)
    shared = sizes.moe_shared_expert_intermediate_size
    yield from _mlp(f"{p}shared_experts.", f"{hf}shared_experts.", D, shared)


def _norm(
    names: str | tuple[str, ...], key: str, size: int, zero_centred: bool
) -> TensorMap:
    """The map of a norm, whose gain itself is in the files."""
    return tensor_map(names, {key: (size,)}, shift=-float(zero_centred))
