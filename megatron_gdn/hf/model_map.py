"""Read a model's ``config.json`` into one `HFModelConfig`, and make a `TensorMap` for
each of the model's tensors.

A GPTModel has one layer for each layer of the config, a HybridModel has two (mixer,
then MLP).

In ``tensor_map(names, sources, dim)``, ``names`` are Megatron's names and ``sources`` is
a dict: key in the files -> shape. Tensor-parallel ranks divide the dimension ``dim``;
without ``dim`` every rank has the whole tensor. `TensorMap` has the other arguments.
``prefix`` is the start of Megatron's names, ``hf_prefix`` is the start of keys in the
files. ``zero_centred``: Megatron stores the gains of norms minus 1. Transformer Engine
fuses a norm into the linear after it, so such a norm has two possible names in Megatron.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import torch
import torch.nn.functional as F

from ..gdn.hf import Storage, gdn_layer_maps
from ..gdn.sizes import GDNDims
from ..kda.sizes import KDADims
from ..mixers.tensor_map import HFRef, TensorMap, rows_by_group, tensor_map
from ..ops.delta_rule.sizes import LINEAR_SIZES
from . import kimi, nemotron, qwen
from .config_fields import ConfigFields
from .json_files import read_object, short_text
from .kimi import KIMI_ARCHITECTURE
from .state_dict_adapter import GDN_FP32_CHECKPOINT_ARCHITECTURES

# Megatron's model class: HybridModel or GPTModel.
MegatronModelKind = Literal["hybrid", "gpt"]

EMBEDDING_KEY = "embed_tokens.weight"
LM_HEAD_KEY = "lm_head.weight"
# transformers' class of a model with Mamba2 layers, which can be built, but not filled
# from files
NEMOTRON_ARCHITECTURE = "NemotronHForCausalLM"

# Symbol of a layer ("": every layer) -> fields of a TransformerConfig -> names of these
# fields in `FIELD_TABLE`.
_SIZE_FIELDS = {
    "": {
        "hidden_size": "hidden_size",
        "num_attention_heads": "num_attention_heads",
        "num_query_groups": "num_key_value_heads",
    },
    "G": {f"linear_{name}": f"linear_{name}" for name in LINEAR_SIZES},
    "M": {
        "mamba_num_heads": "mamba_num_heads",
        "mamba_head_dim": "mamba_head_dim",
        "mamba_state_dim": "ssm_state_size",
        "mamba_num_groups": "n_groups",
    },
    "E": {
        # Megatron needs this field also without "-" layers.
        "ffn_hidden_size": "moe_intermediate_size",
        "num_moe_experts": "num_experts",
        "moe_ffn_hidden_size": "moe_intermediate_size",
        "moe_shared_expert_intermediate_size": "shared_expert_intermediate_size",
        "moe_router_topk": "num_experts_per_tok",
    },
    # after "E": if a model has MLPs and experts, ffn_hidden_size is the MLPs' width
    "-": {"ffn_hidden_size": "intermediate_size"},
}
# For errors: class in transformers -> why its whole model cannot be converted. Single
# layers of these models can.
_WHAT_MEGATRON_LACKS = {
    "BailingHybridForCausalLM": "Megatron's latent attention has no output gate. ",
    "Glm5NextForConditionalGeneration": (
        "Megatron has no hyper-connections and no attention over indexed tokens. "
    ),
    "OlmoHybridForCausalLM": "Megatron has no norm after attention. ",
    "Qwen4ExpForCausalLM": (
        "Megatron has no hyper-connections and no attention over indexed tokens. "
    ),
}
# Attributes of built layers -> the values with which the published models compute.
_PUBLISHED_OPTIONS = {
    "output_gate_activation": "silu",
    "allow_neg_eigval": False,
    "use_qk_l2norm": True,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class HFModelConfig:
    """What a ``config.json`` says about the model and its weights."""

    architecture: str  # the class in transformers
    # A HybridModel's layers, one symbol each. G: Gated DeltaNet, K: Kimi Delta Attention,
    # M: Mamba2, *: attention, +: latent attention, -: MLP, E: experts
    hybrid_layer_pattern: str
    sizes: SimpleNamespace  # fields of a TransformerConfig
    vocab_size: int
    tied: bool  # whether the output layer uses the embedding's weight
    rope_theta: float
    rotary_fraction: float  # 0 means no rotary embedding
    # lower bound of Mamba2's time steps (transformers does not read time_step_limit)
    time_step_min: float = 0.0

    @property
    def storage(self) -> Storage:
        """How the files store the projections of Gated DeltaNet."""
        if self.architecture == "Qwen3NextForCausalLM":
            return "interleaved"
        return "flat"

    @property
    def published_options(self) -> dict[str, Any]:
        """Attributes of built layers -> the values with which the published model
        computes."""
        if self.architecture == KIMI_ARCHITECTURE:
            return kimi.PUBLISHED_OPTIONS
        return _PUBLISHED_OPTIONS

    @property
    def stores_gains_minus_1(self) -> bool:
        """Whether the files, and a built model, hold the gains of norms minus 1."""
        return self.architecture != KIMI_ARCHITECTURE

    @property
    def gdn(self) -> GDNDims:
        """The sizes of the 'G' layers."""
        return GDNDims.from_config(self.sizes)

    @property
    def kda(self) -> KDADims:
        """The sizes of the 'K' layers."""
        return KDADims.of(self.sizes, **self.kda_options)

    @property
    def kda_options(self) -> dict[str, int]:
        """The constructor options that the published weights of 'K' layers need; {} for
        a model without 'K' layers."""
        if "K" in self.hybrid_layer_pattern:
            return kimi.kda_ranks(self.sizes)
        return {}

    @property
    def mamba_options(self) -> dict[str, Any]:
        """The constructor options of the 'M' layers with which the published model
        computes; {} for a model without 'M' layers."""
        if "M" in self.hybrid_layer_pattern:
            return {"dt_limit": (self.time_step_min, math.inf)}
        return {}

    def megatron_settings(self, model: MegatronModelKind = "gpt") -> dict[str, Any]:
        """The ``TransformerConfig`` fields of a HybridModel or GPTModel that computes
        what the published model does.

        Dtypes, parallel sizes and dropout are not among the fields.

        Raises:
            NotImplementedError: ``model`` is "gpt" and the model has Mamba2 layers or
                is a Kimi Linear.
        """
        pattern = self.hybrid_layer_pattern
        settings = dict(vars(self.sizes))
        settings |= {"normalization": "RMSNorm", "add_bias_linear": False}
        if self.architecture == NEMOTRON_ARCHITECTURE:
            from megatron.core.activations import squared_relu

            settings |= {"gated_linear_unit": False, "activation_func": squared_relu}
            expert_settings = {
                "moe_router_score_function": "sigmoid",
                "moe_router_enable_expert_bias": True,
            }
        elif self.architecture == KIMI_ARCHITECTURE:
            settings |= {"gated_linear_unit": True, "activation_func": F.silu}
            settings |= kimi.settings_of(pattern)
            expert_settings = {}
        else:
            settings |= {
                "gated_linear_unit": True,
                "activation_func": F.silu,
                "layernorm_zero_centered_gamma": True,
                "qk_layernorm": True,
                "attention_output_gate": True,
            }
            expert_settings = {"moe_shared_expert_gate": True}
        if "E" in pattern:
            settings |= expert_settings
        if model == "hybrid":
            return settings | {"num_layers": len(pattern), "is_hybrid_model": True}
        if "M" in pattern:
            raise NotImplementedError(
                f"{self.architecture} has Mamba2 layers, and a GPTModel cannot have "
                "any; use model='hybrid' (pretrain_hybrid.py)."
            )
        if self.architecture == KIMI_ARCHITECTURE:
            raise NotImplementedError(
                f"{self.architecture} has Kimi Delta Attention, and this package builds "
                "no GPTModel with it; use model='hybrid' (pretrain_hybrid.py)."
            )
        mixers = pattern[::2]
        mlps = pattern[1::2]
        # Both lists have one number per layer: 1 for experts or for Gated DeltaNet,
        # else 0.
        if "E" in mlps:
            settings["moe_layer_freq"] = [int(kind == "E") for kind in mlps]
        return settings | {
            "num_layers": len(mixers),
            "experimental_attention_variant": "gated_delta_net",
            "linear_attention_freq": [int(kind == "G") for kind in mixers],
        }


def read_hf_config(folder: str | Path) -> HFModelConfig:
    """Read ``folder/config.json``; raise a FileNotFoundError if it is missing, else the
    errors of `parse_hf_config`."""
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} does not exist; give a Hugging Face model folder."
        )
    return parse_hf_config(read_object(path), str(path))


def parse_hf_config(
    config: Mapping[str, Any], where: str = "config.json"
) -> HFModelConfig:
    """The `HFModelConfig` of a parsed ``config.json``; sizes are read in its
    ``text_config``, if it has one.

    ``tie_word_embeddings`` is always read at the top level, since that of
    ``text_config`` is wrong for some published models. `config_fields.FIELD_TABLE` has
    the type and the range of each field.

    Args:
        config: the parsed file.
        where: the file's name, for errors.

    Raises:
        ValueError: the architecture is unknown, or a field is missing, has an illegal
            type or value, or contradicts another field.
    """
    top = ConfigFields(config, where)
    known = sorted(GDN_FP32_CHECKPOINT_ARCHITECTURES) + [KIMI_ARCHITECTURE]
    named = top.get("architectures", [])
    architecture = next(
        (name for name in named if name in known + [NEMOTRON_ARCHITECTURE]), None
    )
    if architecture is None:
        reasons = "".join(_WHAT_MEGATRON_LACKS.get(name, "") for name in named)
        raise ValueError(
            f"unknown architecture {short_text(named)}; known: {', '.join(known)}. "
            f"{reasons}Linear-attention layers of other models convert one by one, see "
            "layer_from_hf of megatron_gdn.hf."
        )
    if architecture == KIMI_ARCHITECTURE:
        return _kimi_config(config, where)
    if architecture == NEMOTRON_ARCHITECTURE:
        return _nemotron_config(config, where)
    text = top.get("text_config", {}) or config
    values = qwen.canonical_fields(config, text, architecture, where)
    fields = ConfigFields(values, where, architecture)
    pattern = qwen.pattern_of(fields, architecture)
    sizes = _sizes_of(fields, pattern)
    # The defaults are those of transformers.
    sizes.kv_channels = fields.get("head_dim", 256)
    sizes.layernorm_epsilon = fields.get("rms_norm_eps", 1e-6)
    return HFModelConfig(
        architecture=architecture,
        hybrid_layer_pattern=pattern,
        sizes=sizes,
        vocab_size=fields["vocab_size"],
        tied=top.get("tie_word_embeddings", False),
        rope_theta=fields.get("rope_theta", 10_000.0),
        rotary_fraction=fields.get("partial_rotary_factor", 0.25),
    )


def _sizes_of(fields: ConfigFields, pattern: str) -> SimpleNamespace:
    """The sizes of the layers in ``pattern``, as fields of a ``TransformerConfig``.

    Raises a ValueError if a size is missing, or if two sizes do not fit each other.
    """
    sizes = SimpleNamespace()
    for symbol, names in _SIZE_FIELDS.items():
        if symbol in pattern:  # "" is in every pattern
            for megatron_name, hf_name in names.items():
                setattr(sizes, megatron_name, fields[hf_name])
    fields.require_multiple("num_attention_heads", "num_key_value_heads")
    if "G" in pattern:
        fields.require_multiple("linear_num_value_heads", "linear_num_key_heads")
    if "M" in pattern:
        fields.require_multiple("mamba_num_heads", "n_groups")
    if "E" in pattern:
        fields.require_at_most("num_experts_per_tok", "num_experts")
    return sizes


def _nemotron_config(config: Mapping[str, Any], where: str) -> HFModelConfig:
    """The config of a NemotronH, from the parsed file ``config``."""
    values = nemotron.NEMOTRON_FIELDS.canonical_fields(config, where)
    fields = ConfigFields(values, where, NEMOTRON_ARCHITECTURE, nemotron.NAMES_IN_TABLE)
    pattern = nemotron.pattern_of(fields)
    sizes = _sizes_of(fields, pattern)
    # The defaults are those of transformers.
    sizes.kv_channels = fields.get("head_dim", 128)
    sizes.layernorm_epsilon = fields.get("rms_norm_eps", 1e-5)
    if "E" in pattern:
        fields.require_several_experts_per_token()
        scaling = fields.get("routed_scaling_factor", 1.0)
        sizes.moe_router_topk_scaling_factor = scaling
    return HFModelConfig(
        architecture=NEMOTRON_ARCHITECTURE,
        hybrid_layer_pattern=pattern,
        sizes=sizes,
        vocab_size=fields["vocab_size"],
        tied=fields.get("tie_word_embeddings", False),
        # attention has no rotary embedding
        rope_theta=0.0,
        rotary_fraction=0.0,
        time_step_min=fields.get("time_step_min", 1e-3),
    )


def _kimi_config(config: Mapping[str, Any], where: str) -> HFModelConfig:
    """The config of a Kimi Linear, from the parsed file ``config``."""
    values = kimi.canonical_fields(config, where)
    fields = ConfigFields(
        values, where, KIMI_ARCHITECTURE, kimi.KIMI_FIELDS.names_in_table
    )
    pattern = kimi.pattern_of(fields)
    return HFModelConfig(
        architecture=KIMI_ARCHITECTURE,
        hybrid_layer_pattern=pattern,
        sizes=kimi.sizes_of(fields, pattern),
        vocab_size=fields["vocab_size"],
        tied=fields.get("tie_word_embeddings", False),
        # attention has no rotary embedding
        rope_theta=0.0,
        rotary_fraction=0.0,
    )


def text_model_prefix(keys: Iterable[str]) -> str:
    """The prefix of the text model's keys, such as "model." or "model.language_model.".

    ``keys`` are all keys of the files.
    """
    for key in keys:
        if key.startswith("model.") and key.endswith(f".{EMBEDDING_KEY}"):
            return key.removesuffix(EMBEDDING_KEY)
    return "model."


def model_maps(
    config: HFModelConfig,
    keys: Collection[str],
    model: MegatronModelKind = "hybrid",
    zero_centered_gamma: bool = True,
) -> Iterator[TensorMap]:
    """Yield the maps of all weights of a text model.

    Args:
        config: the model's config.
        keys: all keys of the files; they show the text model's prefix, and whether a
            tensor holds one expert or all experts of a layer.
        model: whether Megatron's model is a HybridModel or a GPTModel.
        zero_centered_gamma: Megatron's ``layernorm_zero_centered_gamma``.
    """
    hidden = config.sizes.hidden_size
    vocab = config.vocab_size
    text_prefix = text_model_prefix(keys)
    embedding = "embedding.word_embeddings.weight"
    output = "output_layer.weight"
    # The last pipeline stage of a tied model has a copy of the embedding.
    if config.tied:
        names = (embedding, output)
    else:
        names = (embedding,)
    source = {text_prefix + EMBEDDING_KEY: (vocab, hidden)}
    yield tensor_map(names, source, 0, pad_rows=True)
    pattern = config.hybrid_layer_pattern
    for layer in range(len(pattern) // 2):
        symbols = pattern[2 * layer : 2 * layer + 2]
        if model == "hybrid":
            mixer_prefix = f"decoder.layers.{2 * layer}."
            mlp_prefix = f"decoder.layers.{2 * layer + 1}."
        else:
            mixer_prefix = f"decoder.layers.{layer}."
            mlp_prefix = mixer_prefix
        hf_prefix = f"{text_prefix}layers.{layer}."
        if config.architecture == KIMI_ARCHITECTURE:
            yield from kimi.layer_maps(
                symbols,
                mixer_prefix,
                mlp_prefix,
                hf_prefix,
                config.sizes,
                keys,
                zero_centered_gamma,
            )
        else:
            yield from _qwen_mixer_maps(
                symbols[0], mixer_prefix, hf_prefix, config, zero_centered_gamma
            )
            yield from _qwen_mlp_or_expert_maps(
                symbols[1], mlp_prefix, hf_prefix, config, keys, zero_centered_gamma
            )
    if model == "hybrid":
        final_norm = "decoder.final_norm.weight"
    else:
        final_norm = "decoder.final_layernorm.weight"
    key = f"{text_prefix}norm.weight"
    yield _norm_map(final_norm, key, hidden, config, zero_centered_gamma)
    if not config.tied:
        yield tensor_map(output, {LM_HEAD_KEY: (vocab, hidden)}, 0, pad_rows=True)


def _qwen_mixer_maps(
    symbol: str,
    prefix: str,
    hf_prefix: str,
    config: HFModelConfig,
    zero_centred: bool,
) -> Iterator[TensorMap]:
    """Yield the maps of a mixer of Qwen, "G" or "*", and of the norms inside and before
    it."""
    attention = f"{prefix}self_attention."
    if symbol == "G":
        fused_norm = f"{attention}in_proj.layer_norm_weight"
        yield from gdn_layer_maps(
            attention,
            f"{hf_prefix}linear_attn.",
            config.gdn,
            config.storage,
            zero_centred,
        )
    else:
        fused_norm = f"{attention}linear_qkv.layer_norm_weight"
        yield from _attention_maps(attention, f"{hf_prefix}self_attn.", config)
        for name in ("q", "k"):
            yield _norm_map(
                f"{attention}{name}_layernorm.weight",
                f"{hf_prefix}self_attn.{name}_norm.weight",
                config.sizes.kv_channels,
                config,
                zero_centred,
            )
    yield _norm_map(
        (fused_norm, f"{prefix}input_layernorm.weight"),
        f"{hf_prefix}input_layernorm.weight",
        config.sizes.hidden_size,
        config,
        zero_centred,
    )


def _qwen_mlp_or_expert_maps(
    symbol: str,
    prefix: str,
    hf_prefix: str,
    config: HFModelConfig,
    keys: Collection[str],
    zero_centred: bool,
) -> Iterator[TensorMap]:
    """Yield the maps of an MLP ("-") or experts ("E") of Qwen, and of the norm before
    them; ``keys``: all keys of the files."""
    sizes = config.sizes
    norm_names = (f"{prefix}pre_mlp_layernorm.weight",)
    if symbol == "E":
        yield from _expert_maps(f"{prefix}mlp.", f"{hf_prefix}mlp.", config, keys)
    else:
        fused_norm = f"{prefix}mlp.linear_fc1.layer_norm_weight"
        norm_names = (fused_norm,) + norm_names
        yield from _mlp_maps(
            f"{prefix}mlp.",
            f"{hf_prefix}mlp.",
            sizes.hidden_size,
            sizes.ffn_hidden_size,
        )
    key = f"{hf_prefix}post_attention_layernorm.weight"
    yield _norm_map(norm_names, key, sizes.hidden_size, config, zero_centred)


def _norm_map(
    names: str | tuple[str, ...],
    key: str,
    size: int,
    config: HFModelConfig,
    zero_centred: bool,
) -> TensorMap:
    """The map of a norm's gain ``[size]``.

    The file stores the gain minus 1 if ``config.stores_gains_minus_1``, Megatron stores
    the gain minus 1 if ``zero_centred``; else each stores the gain itself.
    """
    shift = float(config.stores_gains_minus_1) - float(zero_centred)
    return tensor_map(names, {key: (size,)}, shift=shift)


def _attention_maps(
    prefix: str, hf_prefix: str, config: HFModelConfig
) -> Iterator[TensorMap]:
    """Yield the maps of softmax attention with an output gate.

    The rows of the file's q_proj are ``[q | gate]`` head by head. Megatron's rows are
    ``[q | gate | k | v]`` group by group: q of all query heads of the group, the gates
    of these heads, then k and v of the group's key head.
    """
    sizes = config.sizes
    hidden = sizes.hidden_size
    heads = sizes.num_attention_heads
    groups = sizes.num_query_groups
    q_rows = heads * sizes.kv_channels
    k_rows = groups * sizes.kv_channels
    row_counts = {"q_proj": 2 * q_rows, "k_proj": k_rows, "v_proj": k_rows}
    sources = {
        f"{hf_prefix}{name}.weight": (count, hidden)
        for name, count in row_counts.items()
    }
    # File rows in Megatron's order: first sort them by section, [q | gate | k | v], then
    # by group.
    file_rows = torch.arange(sum(row_counts.values()), device="cpu")
    q_and_gate = file_rows[: 2 * q_rows].view(heads, 2, -1)
    q_then_gate = q_and_gate.transpose(0, 1).flatten()
    by_section = torch.cat([q_then_gate, file_rows[2 * q_rows :]])
    rows = by_section[rows_by_group((q_rows, q_rows, k_rows, k_rows), groups)]
    yield tensor_map(f"{prefix}linear_qkv.weight", sources, 0, rows=rows)
    output = {f"{hf_prefix}o_proj.weight": (hidden, q_rows)}
    yield tensor_map(f"{prefix}linear_proj.weight", output, 1)


def _mlp_maps(
    prefix: str, hf_prefix: str, hidden: int, ffn: int
) -> Iterator[TensorMap]:
    """Yield the maps of one MLP: fc1 ``[2 ffn, hidden]``, then fc2 ``[hidden, ffn]``."""
    gate_and_up = {
        f"{hf_prefix}gate_proj.weight": (ffn, hidden),
        f"{hf_prefix}up_proj.weight": (ffn, hidden),
    }
    yield tensor_map(f"{prefix}linear_fc1.weight", gate_and_up, 0, sections=(ffn, ffn))
    down = {f"{hf_prefix}down_proj.weight": (hidden, ffn)}
    yield tensor_map(f"{prefix}linear_fc2.weight", down, 1)


def _expert_maps(
    prefix: str, hf_prefix: str, config: HFModelConfig, keys: Collection[str]
) -> Iterator[TensorMap]:
    """Yield the maps of a router, its experts and the shared expert.

    Some files have the tensors of all experts stacked, as ``experts.gate_up_proj`` and
    ``experts.down_proj``; ``keys``, all keys of the files, show this.
    """
    sizes = config.sizes
    hidden = sizes.hidden_size
    ffn = sizes.moe_ffn_hidden_size
    experts = sizes.num_moe_experts
    router = {f"{hf_prefix}gate.weight": (experts, hidden)}
    yield tensor_map(f"{prefix}router.weight", router)
    stacked_up = f"{hf_prefix}experts.gate_up_proj"
    stacked_down = f"{hf_prefix}experts.down_proj"
    for expert in range(experts):
        fc1, fc2 = _mlp_maps("", f"{hf_prefix}experts.{expert}.", hidden, ffn)
        if stacked_up in keys:
            up = HFRef(stacked_up, (experts, 2 * ffn, hidden), expert)
            down = HFRef(stacked_down, (experts, hidden, ffn), expert)
            fc1 = replace(fc1, sources=(up,))
            fc2 = replace(fc2, sources=(down,))
        for entry in (fc1, fc2):
            # Grouped experts number their weights; sequential experts number their
            # modules.
            linear = entry.name.removesuffix(".weight")
            grouped = f"{prefix}experts.{linear}.weight{expert}"
            sequential = f"{prefix}experts.local_experts.{expert}.{linear}.weight"
            yield replace(entry, names=(grouped, sequential), is_expert=True)
    shared_width = sizes.moe_shared_expert_intermediate_size
    yield from _mlp_maps(
        f"{prefix}shared_experts.", f"{hf_prefix}shared_expert.", hidden, shared_width
    )
    gate = {f"{hf_prefix}shared_expert_gate.weight": (1, hidden)}
    yield tensor_map(f"{prefix}shared_experts.gate_weight", gate)
