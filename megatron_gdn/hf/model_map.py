"""Flatten a model's ``config.json`` into one record, and make a `TensorMap` for each
tensor.

A GPTModel has one layer for each layer of the config, a HybridModel has two (mixer,
then MLP).
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
from .json_files import read_object, shown
from .kimi import KIMI
from .state_dict_adapter import GDN_FP32_CHECKPOINT_ARCHITECTURES

Architecture = Literal["hybrid", "gpt"]

EMBEDDING = "embed_tokens.weight"
LM_HEAD = "lm_head.weight"
# a Mamba2 model that can be built but not filled from files
NEMOTRON = "NemotronHForCausalLM"

# For each kind of layer, fields of a TransformerConfig -> fields of config.json. "" is
# any kind.
_SIZES = {
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
        # Megatron needs it also without "-" layers
        "ffn_hidden_size": "moe_intermediate_size",
        "num_moe_experts": "num_experts",
        "moe_ffn_hidden_size": "moe_intermediate_size",
        "moe_shared_expert_intermediate_size": "shared_expert_intermediate_size",
        "moe_router_topk": "num_experts_per_tok",
    },
    "-": {"ffn_hidden_size": "intermediate_size"},
}
# What Megatron lacks of models whose layers alone are converted.
_LACKS = {
    "BailingHybridForCausalLM": "Megatron's latent attention has no output gate. ",
    "Glm5NextForConditionalGeneration": (
        "Megatron has no hyper-connections and no attention over indexed tokens. "
    ),
    "OlmoHybridForCausalLM": "Megatron has no norm after attention. ",
    "Qwen4ExpForCausalLM": (
        "Megatron has no hyper-connections and no attention over indexed tokens. "
    ),
}
_PUBLISHED_OPTIONS = {
    "output_gate_activation": "silu",
    "allow_neg_eigval": False,
    "use_qk_l2norm": True,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class HFModelConfig:
    """What a ``config.json`` says about the model and its weights."""

    architecture: str  # the class in transformers
    # G: GDN, K: Kimi Delta Attention, M: Mamba2, *: attention, +: latent attention, -:
    # MLP, E: experts
    hybrid_layer_pattern: str
    sizes: SimpleNamespace  # fields of a TransformerConfig
    vocab_size: int
    tied: bool  # whether the output layer uses the embedding's weight
    rope_theta: float
    rotary_fraction: float  # 0 means no rotary embedding
    # Mamba2 takes no smaller time step; transformers ignores its time_step_limit
    time_step_min: float = 0.0

    @property
    def storage(self) -> Storage:
        """How the files store the projections of Gated DeltaNet."""
        if self.architecture == "Qwen3NextForCausalLM":
            return "interleaved"
        return "flat"

    @property
    def published_options(self) -> dict[str, Any]:
        """Options of layers -> the values with which the published model computes."""
        if self.architecture == KIMI:
            return kimi.PUBLISHED_OPTIONS
        return _PUBLISHED_OPTIONS

    @property
    def stores_gains_minus_1(self) -> bool:
        """Whether the files, and a built model, hold the gains of norms minus 1."""
        return self.architecture != KIMI

    @property
    def gdn(self) -> GDNDims:
        return GDNDims.from_config(self.sizes)

    @property
    def kda(self) -> KDADims:
        return KDADims.of(self.sizes, **self.kda_options)

    @property
    def kda_options(self) -> dict[str, int]:
        """The options of the 'K' layers that their weights need."""
        if "K" in self.hybrid_layer_pattern:
            return kimi.kda_ranks(self.sizes)
        return {}

    @property
    def mamba_options(self) -> dict[str, Any]:
        """The options of the 'M' layers with which the published model computes."""
        if "M" in self.hybrid_layer_pattern:
            return {"dt_limit": (self.time_step_min, math.inf)}
        return {}

    def megatron_settings(self, model: Architecture = "gpt") -> dict[str, Any]:
        """The ``TransformerConfig`` fields that the weights need.

        Raises:
            NotImplementedError: ``model`` is "gpt" and the model has Mamba2 layers or
                is a Kimi Linear.
        """
        pattern = self.hybrid_layer_pattern
        settings = dict(vars(self.sizes))
        settings |= {"normalization": "RMSNorm", "add_bias_linear": False}
        if self.architecture == NEMOTRON:
            from megatron.core.activations import squared_relu

            settings |= {"gated_linear_unit": False, "activation_func": squared_relu}
            experts = {
                "moe_router_score_function": "sigmoid",
                "moe_router_enable_expert_bias": True,
            }
        elif self.architecture == KIMI:
            settings |= {"gated_linear_unit": True, "activation_func": F.silu}
            settings |= kimi.settings_of(pattern)
            experts = {}
        else:
            settings |= {
                "gated_linear_unit": True,
                "activation_func": F.silu,
                "layernorm_zero_centered_gamma": True,
                "qk_layernorm": True,
                "attention_output_gate": True,
            }
            experts = {"moe_shared_expert_gate": True}
        settings |= experts if "E" in pattern else {}
        if model == "hybrid":
            return settings | {"num_layers": len(pattern), "is_hybrid_model": True}
        if "M" in pattern:
            raise NotImplementedError(
                f"{self.architecture} has Mamba2 layers, and a GPTModel cannot have "
                "any; use model='hybrid' (pretrain_hybrid.py)."
            )
        if self.architecture == KIMI:
            raise NotImplementedError(
                f"{self.architecture} has Kimi Delta Attention, and this package builds "
                "no GPTModel with it; use model='hybrid' (pretrain_hybrid.py)."
            )
        mixers = pattern[::2]
        mlps = pattern[1::2]
        if "E" in mlps:
            settings["moe_layer_freq"] = [int(kind == "E") for kind in mlps]
        return settings | {
            "num_layers": len(mixers),
            "experimental_attention_variant": "gated_delta_net",
            "linear_attention_freq": [int(kind == "G") for kind in mixers],
        }


def read_hf_config(folder: str | Path) -> HFModelConfig:
    """Read ``folder/config.json``; raise a FileNotFoundError, or as `parse_hf_config`
    does."""
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} does not exist; give a Hugging Face model folder."
        )
    return parse_hf_config(read_object(path), str(path))


def parse_hf_config(
    config: Mapping[str, Any], where: str = "config.json"
) -> HFModelConfig:
    """Flatten a parsed ``config.json``; if it has a ``text_config``, sizes are read
    there.

    ``tie_word_embeddings`` is read at the top level: that of ``text_config`` is wrong
    for some published models. `config_fields.FIELDS` has the type and the range of each
    field.

    Args:
        config: the parsed file.
        where: the file's name, for errors.

    Raises:
        ValueError: the architecture is unknown, or a field is missing, has an illegal
            type or value, or contradicts another field.
    """
    top = ConfigFields(config, where)
    known = sorted(GDN_FP32_CHECKPOINT_ARCHITECTURES) + [KIMI]
    named = top.get("architectures", [])
    architecture = next((name for name in named if name in known + [NEMOTRON]), None)
    if architecture is None:
        lacks = "".join(_LACKS.get(name, "") for name in named)
        raise ValueError(
            f"unknown architecture {shown(named)}; known: {', '.join(known)}. {lacks}"
            "Linear-attention layers of other models convert one by one, see "
            "layer_from_hf of megatron_gdn.hf."
        )
    if architecture == KIMI:
        return _kimi_config(config, where)
    if architecture == NEMOTRON:
        return _nemotron_config(config, where)
    text = top.get("text_config", {}) or config
    values = qwen.with_usual_names(config, text, architecture, where)
    fields = ConfigFields(values, where, architecture)
    pattern = qwen.pattern_of(fields, architecture)
    sizes = _sizes_of(fields, pattern)
    # What transformers takes for a missing field.
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
    """The sizes of the layers in ``pattern``, as fields of a ``TransformerConfig``."""
    tables = [table for kind, table in _SIZES.items() if kind in pattern]
    pairs = (pair for table in tables for pair in table.items())
    sizes = SimpleNamespace(**{field: fields[hf_name] for field, hf_name in pairs})
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
    values = nemotron.FIELDS.with_usual_names(config, where)
    fields = ConfigFields(values, where, NEMOTRON, nemotron.OWN_NAMES)
    pattern = nemotron.pattern_of(fields)
    sizes = _sizes_of(fields, pattern)
    # What transformers takes for a missing field.
    sizes.kv_channels = fields.get("head_dim", 128)
    sizes.layernorm_epsilon = fields.get("rms_norm_eps", 1e-5)
    if "E" in pattern:
        fields.require_several_experts_per_token()
        scaling = fields.get("routed_scaling_factor", 1.0)
        sizes.moe_router_topk_scaling_factor = scaling
    return HFModelConfig(
        architecture=NEMOTRON,
        hybrid_layer_pattern=pattern,
        sizes=sizes,
        vocab_size=fields["vocab_size"],
        tied=fields.get("tie_word_embeddings", False),
        rope_theta=0.0,
        rotary_fraction=0.0,
        time_step_min=fields.get("time_step_min", 1e-3),
    )


def _kimi_config(config: Mapping[str, Any], where: str) -> HFModelConfig:
    """The config of a Kimi Linear, from the parsed file ``config``."""
    values = kimi.with_usual_names(config, where)
    fields = ConfigFields(values, where, KIMI, kimi.FIELDS.known_as)
    pattern = kimi.pattern_of(fields)
    return HFModelConfig(
        architecture=KIMI,
        hybrid_layer_pattern=pattern,
        sizes=kimi.sizes_of(fields, pattern),
        vocab_size=fields["vocab_size"],
        tied=fields.get("tie_word_embeddings", False),
        rope_theta=0.0,
        rotary_fraction=0.0,
    )


def root_of(keys: Iterable[str]) -> str:
    """The prefix of a text model's keys in files with these ``keys``, such as
    "model."."""
    roots = (
        key.removesuffix(EMBEDDING) for key in keys if key.endswith(f".{EMBEDDING}")
    )
    return next((root for root in roots if root.startswith("model.")), "model.")


def model_maps(
    config: HFModelConfig,
    keys: Collection[str],
    model: Architecture = "hybrid",
    zero_centered_gamma: bool = True,
) -> Iterator[TensorMap]:
    """Yield the maps of a whole model; ``keys``: all keys of the files, with the
    model's prefix."""
    hidden = config.sizes.hidden_size
    vocab = config.vocab_size
    root = root_of(keys)

    def norm(names: str | tuple[str, ...], key: str, size: int = hidden) -> TensorMap:
        # For a gain of 1 + w the file stores w (Kimi Linear's: the gain itself); a
        # plain Megatron norm stores the gain itself.
        shift = float(config.stores_gains_minus_1) - float(zero_centered_gamma)
        return tensor_map(names, {key: (size,)}, shift=shift)

    embedding = "embedding.word_embeddings.weight"
    output = "output_layer.weight"
    # The last pipeline stage of a tied model has a copy of the embedding.
    if config.tied:
        names = (embedding, output)
    else:
        names = (embedding,)
    yield tensor_map(names, {root + EMBEDDING: (vocab, hidden)}, 0, pad_rows=True)
    pattern = config.hybrid_layer_pattern
    for layer, (mixer_kind, mlp_kind) in enumerate(
        zip(pattern[::2], pattern[1::2], strict=True)
    ):
        mixer = mlp = f"decoder.layers.{layer}."
        if model == "hybrid":
            mixer = f"decoder.layers.{2 * layer}."
            mlp = f"decoder.layers.{2 * layer + 1}."
        hf = f"{root}layers.{layer}."
        if config.architecture == KIMI:
            yield from kimi.layer_maps(
                mixer_kind + mlp_kind,
                mixer,
                mlp,
                hf,
                config.sizes,
                keys,
                zero_centered_gamma,
            )
            continue
        attention = f"{mixer}self_attention."
        if mixer_kind == "G":
            fused = "in_proj"
            yield from gdn_layer_maps(
                attention,
                f"{hf}linear_attn.",
                config.gdn,
                config.storage,
                zero_centered_gamma,
            )
        else:
            fused = "linear_qkv"
            yield from _attention_maps(attention, f"{hf}self_attn.", config)
            for one in "qk":
                yield norm(
                    f"{attention}{one}_layernorm.weight",
                    f"{hf}self_attn.{one}_norm.weight",
                    config.sizes.kv_channels,
                )
        in_norms = (
            f"{attention}{fused}.layer_norm_weight",
            f"{mixer}input_layernorm.weight",
        )
        yield norm(in_norms, f"{hf}input_layernorm.weight")
        pre_norms = (f"{mlp}pre_mlp_layernorm.weight",)
        if mlp_kind == "E":
            yield from _moe_maps(f"{mlp}mlp.", f"{hf}mlp.", config, keys)
        else:
            pre_norms = (f"{mlp}mlp.linear_fc1.layer_norm_weight",) + pre_norms
            yield from _mlp_maps(
                f"{mlp}mlp.", f"{hf}mlp.", hidden, config.sizes.ffn_hidden_size
            )
        yield norm(pre_norms, f"{hf}post_attention_layernorm.weight")
    if model == "hybrid":
        final = "norm"
    else:
        final = "layernorm"
    yield norm(f"decoder.final_{final}.weight", f"{root}norm.weight")
    if not config.tied:
        yield tensor_map(output, {LM_HEAD: (vocab, hidden)}, 0, pad_rows=True)


def _attention_maps(p: str, hf: str, config: HFModelConfig) -> Iterator[TensorMap]:
    """Maps of attention; rows ``[q | gate]`` per head become ``[q | gate | k | v]`` per
    group."""
    sizes = config.sizes
    hidden = sizes.hidden_size
    heads = sizes.num_attention_heads
    groups = sizes.num_query_groups
    q, k = heads * sizes.kv_channels, groups * sizes.kv_channels
    counts = {"q": 2 * q, "k": k, "v": k}
    sources = {
        f"{hf}{name}_proj.weight": (count, hidden) for name, count in counts.items()
    }
    in_file = torch.arange(2 * (q + k), device="cpu")
    q_then_gate = in_file[: 2 * q].view(heads, 2, -1).transpose(0, 1).flatten()
    rows = torch.cat([q_then_gate, in_file[2 * q :]])[
        rows_by_group((q, q, k, k), groups)
    ]
    yield tensor_map(f"{p}linear_qkv.weight", sources, 0, rows=rows)
    yield tensor_map(f"{p}linear_proj.weight", {f"{hf}o_proj.weight": (hidden, q)}, 1)


def _mlp_maps(p: str, hf: str, hidden: int, ffn: int) -> Iterator[TensorMap]:
    """The maps of an MLP from ``hidden`` to ``ffn``; ``p``, ``hf``: Megatron's, HF's
    key prefix."""
    up = {f"{hf}{name}_proj.weight": (ffn, hidden) for name in ("gate", "up")}
    yield tensor_map(f"{p}linear_fc1.weight", up, 0, sections=(ffn, ffn))
    yield tensor_map(
        f"{p}linear_fc2.weight", {f"{hf}down_proj.weight": (hidden, ffn)}, 1
    )


def _moe_maps(
    p: str, hf: str, config: HFModelConfig, keys: Collection[str]
) -> Iterator[TensorMap]:
    """The maps of a router, its experts and the shared expert; ``keys``: all keys of
    the files."""
    sizes = config.sizes
    hidden = sizes.hidden_size
    ffn = sizes.moe_ffn_hidden_size
    experts = sizes.num_moe_experts
    yield tensor_map(f"{p}router.weight", {f"{hf}gate.weight": (experts, hidden)})
    for e in range(experts):
        fc1, fc2 = _mlp_maps("", f"{hf}experts.{e}.", hidden, ffn)
        if f"{hf}experts.gate_up_proj" in keys:
            up = HFRef(f"{hf}experts.gate_up_proj", (experts, 2 * ffn, hidden), e)
            down = HFRef(f"{hf}experts.down_proj", (experts, hidden, ffn), e)
            fc1 = replace(fc1, sources=(up,))
            fc2 = replace(fc2, sources=(down,))
        for entry in (fc1, fc2):
            # Grouped experts number their weights; sequential experts number their
            # modules.
            linear = entry.name.removesuffix(".weight")
            grouped = f"{p}experts.{linear}.weight{e}"
            sequential = f"{p}experts.local_experts.{e}.{linear}.weight"
            yield replace(entry, names=(grouped, sequential), is_expert=True)
    shared = sizes.moe_shared_expert_intermediate_size
    yield from _mlp_maps(f"{p}shared_experts.", f"{hf}shared_expert.", hidden, shared)
    gate = {f"{hf}shared_expert_gate.weight": (1, hidden)}
    yield tensor_map(f"{p}shared_experts.gate_weight", gate)
