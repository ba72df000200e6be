"""Flatten a model's ``config.json`` into one record, and list the maps of its tensors.

A GPTModel has one layer for each layer of the config, a HybridModel two (mixer, then MLP).
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F

from ..gdn.hf import Storage, gdn_layer_maps
from ..gdn.sizes import GDNDims
from ..mixers.tensor_map import HFRef, TensorMap, by_group, mapped
from ..ops.delta_rule.sizes import LINEAR
from .safetensors_files import TensorSpec
from .state_dict_adapter import GDN_FP32_CHECKPOINT_ARCHITECTURES

Architecture = Literal["hybrid", "gpt"]

_EMBEDDING = "embed_tokens.weight"
_LM_HEAD = "lm_head.weight"
# Weights of multi-token prediction and vision: an export copies them, no import loads them.
_PASSTHROUGH = ("mtp.", "model.visual.", "visual.")


@dataclass(frozen=True, slots=True, kw_only=True)
class HFModelConfig:
    """The sizes and settings of a model that weight mapping needs; an unused size is 0."""

    architecture: str  # one of GDN_FP32_CHECKPOINT_ARCHITECTURES
    storage: Storage  # how the files store the projections of Gated DeltaNet
    gdn: GDNDims
    hidden_size: int
    vocab_size: int
    tied: bool  # the output layer is the embedding
    num_attention_heads: int
    num_query_groups: int
    head_dim: int
    is_linear: tuple[bool, ...]  # for each layer: Gated DeltaNet (True) or attention (False)
    is_moe: tuple[bool, ...]  # for each layer: whether its MLP is a mixture of experts
    ffn_size: int
    num_experts: int
    experts_per_token: int
    expert_ffn_size: int
    shared_expert_ffn_size: int
    norm_eps: float
    rope_theta: float
    rotary_fraction: float

    @property
    def num_layers(self) -> int:
        return len(self.is_linear)

    @property
    def hybrid_layer_pattern(self) -> str:
        """HybridModel's pattern: for each layer one symbol for its mixer, one for its MLP."""
        pairs = zip(self.is_linear, self.is_moe, strict=True)
        return "".join(("G" if gdn else "*") + ("E" if moe else "-") for gdn, moe in pairs)

    def megatron_settings(self) -> dict[str, Any]:
        """The ``TransformerConfig`` fields that the weights need; ``num_layers`` is GPTModel's."""
        settings: dict[str, Any] = {
            "num_layers": self.num_layers,
            "hidden_size": self.hidden_size,
            "num_attention_heads": self.num_attention_heads,
            "num_query_groups": self.num_query_groups,
            "kv_channels": self.head_dim,
            "normalization": "RMSNorm",
            "layernorm_zero_centered_gamma": True,
            "layernorm_epsilon": self.norm_eps,
            "qk_layernorm": True,
            "attention_output_gate": True,
            "add_bias_linear": False,
            "add_qkv_bias": False,
            "gated_linear_unit": True,
            "activation_func": F.silu,
            "experimental_attention_variant": "gated_delta_net",
            "linear_attention_freq": [int(gdn) for gdn in self.is_linear],
            **self.gdn.config_fields,
            "ffn_hidden_size": self.ffn_size or self.expert_ffn_size,
        }
        if self.num_experts:
            settings |= {
                "num_moe_experts": self.num_experts,
                "moe_layer_freq": [int(moe) for moe in self.is_moe],
                "moe_ffn_hidden_size": self.expert_ffn_size,
                "moe_shared_expert_intermediate_size": self.shared_expert_ffn_size,
                "moe_shared_expert_gate": True,
                "moe_router_topk": self.experts_per_token,
                "moe_router_pre_softmax": False,
            }
        return settings


def read_hf_config(folder: str | Path) -> HFModelConfig:
    """Read ``folder/config.json``; errors are FileNotFoundError and those of `parse_hf_config`."""
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist; give a Hugging Face model folder.")
    try:
        config = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not JSON: {error}.") from error
    return parse_hf_config(config)


def parse_hf_config(config: Mapping[str, Any]) -> HFModelConfig:
    """Flatten a parsed ``config.json``; if it has a ``text_config``, sizes are read there.

    ``tie_word_embeddings`` is read at the top level only: the nested default is wrong for some
    published models. An unknown architecture, a missing field or an unsupported setting raises a
    ValueError.
    """
    known = sorted(GDN_FP32_CHECKPOINT_ARCHITECTURES)
    named = config.get("architectures") or []
    architecture = next((name for name in named if name in known), None)
    if architecture is None:
        raise ValueError(
            f"unknown architecture {list(named)}; known: {', '.join(known)}. Linear-"
            f"attention layers of other models convert one by one, see layer_from_hf of "
            f"megatron_gdn.hf."
        )
    text = config.get("text_config") or config

    def field(name: str, *default: Any) -> Any:
        value = text.get(name)
        if value is not None:
            return value
        if not default:
            raise ValueError(f"config.json of a {architecture} has no {name!r}.")
        return default[0]

    act, gate = field("hidden_act", "silu"), field("output_gate_type", None)
    if field("attention_bias", False):
        raise ValueError(
            "attention_bias=true is not supported; it must be false, as in all published models."
        )
    if act != "silu":
        raise ValueError(f"hidden_act={act!r} is not supported; it must be 'silu'.")
    if gate not in (None, "silu", "swish"):
        raise ValueError(
            f"output_gate_type={gate!r} is not supported in whole models; it must be 'silu'. A "
            f"single megatron_gdn.GatedDeltaNet takes output_gate_activation='sigmoid'."
        )
    if not field("attn_output_gate", True):
        raise ValueError(
            "attn_output_gate=false is not supported; it must be true: q_proj has the gate."
        )
    rope = field("rope_parameters", None) or field("rope_scaling", None) or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        raise ValueError(
            f"rope_type={kind!r} is not supported: positions are not scaled here. Set rope_type to "
            f"'default' to build the model without scaling."
        )
    is_linear = _linear_layers(field)
    is_moe = _moe_layers(field, len(is_linear))
    if any(is_moe) and not field("norm_topk_prob", True):
        raise ValueError(
            "norm_topk_prob=false is not supported; it must be true: weights sum to 1."
        )
    hidden, heads = field("hidden_size"), field("num_attention_heads")

    def expert_field(name: str) -> int:
        return field(name) if any(is_moe) else 0

    return HFModelConfig(
        architecture=architecture,
        storage="interleaved" if architecture == "Qwen3NextForCausalLM" else "flat",
        gdn=GDNDims(hidden_size=hidden, **{name: field(f"linear_{name}") for name in LINEAR}),
        hidden_size=hidden,
        vocab_size=field("vocab_size"),
        tied=bool(config.get("tie_word_embeddings", False)),
        num_attention_heads=heads,
        num_query_groups=field("num_key_value_heads"),
        head_dim=field("head_dim", hidden // heads),
        is_linear=is_linear,
        is_moe=is_moe,
        ffn_size=0 if all(is_moe) else field("intermediate_size"),
        num_experts=expert_field("num_experts"),
        experts_per_token=expert_field("num_experts_per_tok"),
        expert_ffn_size=expert_field("moe_intermediate_size"),
        shared_expert_ffn_size=expert_field("shared_expert_intermediate_size"),
        norm_eps=field("rms_norm_eps", 1e-6),
        rope_theta=rope.get("rope_theta", field("rope_theta", 10_000_000.0)),
        rotary_fraction=rope.get("partial_rotary_factor", field("partial_rotary_factor", 0.25)),
    )


def _linear_layers(field: Any) -> tuple[bool, ...]:
    """For each layer, whether it is Gated DeltaNet; without a list every N-th is attention."""
    count = field("num_hidden_layers")
    types = field("layer_types", None)
    if types is None:
        interval = field("full_attention_interval", 4)
        return tuple((layer + 1) % interval != 0 for layer in range(count))
    unknown = sorted(set(types) - {"linear_attention", "full_attention"})
    if unknown or len(types) != count:
        raise ValueError(
            f"layer_types must be {count} times 'linear_attention' or 'full_attention'; it has "
            f"{len(types)} entries{f' and also {unknown}' if unknown else ''}."
        )
    return tuple(kind == "linear_attention" for kind in types)


def _moe_layers(field: Any, count: int) -> tuple[bool, ...]:
    """For each layer, whether it has experts; ``mlp_only_layers`` have none."""
    if not field("num_experts", 0):
        return (False,) * count
    step, dense = field("decoder_sparse_step", 1), field("mlp_only_layers", [])
    return tuple((layer + 1) % step == 0 and layer not in dense for layer in range(count))


class Plan(NamedTuple):
    """What an import and an export do with every tensor of a folder."""

    maps: list[TensorMap]
    passthrough: list[str]  # keys that an export copies unchanged
    aliases: dict[str, str]  # keys that repeat another's tensor (a tied model's output layer)


def and_more(names: list[str]) -> str:
    """The words after the first of ``names`` in a message: how many others there are."""
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""


def model_maps(
    config: HFModelConfig,
    keys: Collection[str],
    model: Architecture = "hybrid",
    zero_centered_gamma: bool = True,
) -> Iterator[TensorMap]:
    """Yield the maps of a whole model; ``keys`` of the files show the text model's prefix."""
    root, hidden, vocab = _text_root(keys), config.hidden_size, config.vocab_size

    def norm(names: str | tuple[str, ...], key: str, size: int = hidden) -> TensorMap:
        # The file stores w of the gain 1 + w; a plain Megatron norm stores the whole gain.
        return mapped(names, {key: (size,)}, shift=float(not zero_centered_gamma))

    embedding = {root + _EMBEDDING: (vocab, hidden)}
    yield mapped("embedding.word_embeddings.weight", embedding, 0, pad_rows=True)
    for layer in range(config.num_layers):
        mixer = mlp = f"decoder.layers.{layer}."
        if model == "hybrid":
            mixer, mlp = f"decoder.layers.{2 * layer}.", f"decoder.layers.{2 * layer + 1}."
        hf, attention = f"{root}layers.{layer}.", f"{mixer}self_attention."
        if config.is_linear[layer]:
            fused = "in_proj"
            yield from gdn_layer_maps(
                attention, f"{hf}linear_attn.", config.gdn, config.storage, zero_centered_gamma
            )
        else:
            fused = "linear_qkv"
            yield from _attention_maps(attention, f"{hf}self_attn.", config)
            for one in "qk":
                names = f"{attention}{one}_layernorm.weight", f"{hf}self_attn.{one}_norm.weight"
                yield norm(*names, config.head_dim)
        in_norms = (f"{attention}{fused}.layer_norm_weight", f"{mixer}input_layernorm.weight")
        yield norm(in_norms, f"{hf}input_layernorm.weight")
        pre_norms = (f"{mlp}pre_mlp_layernorm.weight",)
        if config.is_moe[layer]:
            yield from _moe_maps(f"{mlp}mlp.", f"{hf}mlp.", config, keys)
        else:
            pre_norms = (f"{mlp}mlp.linear_fc1.layer_norm_weight", *pre_norms)
            yield from _mlp_maps(f"{mlp}mlp.", f"{hf}mlp.", hidden, config.ffn_size)
        yield norm(pre_norms, f"{hf}post_attention_layernorm.weight")
    final = "norm" if model == "hybrid" else "layernorm"
    yield norm(f"decoder.final_{final}.weight", f"{root}norm.weight")
    if not config.tied:
        yield mapped("output_layer.weight", {_LM_HEAD: (vocab, hidden)}, 0, pad_rows=True)


def _text_root(keys: Collection[str]) -> str:
    """Find the prefix of the text model: ``model.`` or ``model.language_model.``."""
    roots = {key.removesuffix(_EMBEDDING) for key in keys if key.endswith(f".{_EMBEDDING}")}
    roots = {root for root in roots if root.split(".")[0] == "model"}
    if len(roots) != 1:
        raise ValueError(
            f"missing key: the files must have one model.*{_EMBEDDING}, whose prefix is the text "
            f"model's; found the prefixes {sorted(roots)}."
        )
    return roots.pop()


def _attention_maps(p: str, hf: str, config: HFModelConfig) -> Iterator[TensorMap]:
    """Reorder rows ``[q | gate]`` per head to ``[q | gate | k | v]`` per query group."""
    hidden, heads, groups = config.hidden_size, config.num_attention_heads, config.num_query_groups
    q, k = heads * config.head_dim, groups * config.head_dim
    counts = {"q": 2 * q, "k": k, "v": k}
    sources = {f"{hf}{name}_proj.weight": (count, hidden) for name, count in counts.items()}
    in_file = torch.arange(2 * (q + k), device="cpu")
    q_then_gate = in_file[: 2 * q].view(heads, 2, -1).transpose(0, 1).flatten()
    rows = torch.cat([q_then_gate, in_file[2 * q :]])[by_group((q, q, k, k), groups)]
    yield mapped(f"{p}linear_qkv.weight", sources, 0, rows=rows)
    yield mapped(f"{p}linear_proj.weight", {f"{hf}o_proj.weight": (hidden, q)}, 1)


def _mlp_maps(p: str, hf: str, hidden: int, ffn: int) -> Iterator[TensorMap]:
    up = {f"{hf}{name}_proj.weight": (ffn, hidden) for name in ("gate", "up")}
    yield mapped(f"{p}linear_fc1.weight", up, 0, sections=(ffn, ffn))
    yield mapped(f"{p}linear_fc2.weight", {f"{hf}down_proj.weight": (hidden, ffn)}, 1)


def _moe_maps(p: str, hf: str, config: HFModelConfig, keys: Collection[str]) -> Iterator[TensorMap]:
    hidden, ffn, experts = config.hidden_size, config.expert_ffn_size, config.num_experts
    yield mapped(f"{p}router.weight", {f"{hf}gate.weight": (experts, hidden)})
    for e in range(experts):
        fc1, fc2 = _mlp_maps("", f"{hf}experts.{e}.", hidden, ffn)
        if f"{hf}experts.gate_up_proj" in keys:
            up = HFRef(f"{hf}experts.gate_up_proj", (experts, 2 * ffn, hidden), e)
            down = HFRef(f"{hf}experts.down_proj", (experts, hidden, ffn), e)
            fc1, fc2 = replace(fc1, sources=(up,)), replace(fc2, sources=(down,))
        for entry in (fc1, fc2):
            # Grouped experts number their weights; sequential experts number their modules.
            linear = entry.name.removesuffix(".weight")
            grouped = f"{p}experts.{linear}.weight{e}"
            sequential = f"{p}experts.local_experts.{e}.{linear}.weight"
            yield replace(entry, names=(grouped, sequential), is_expert=True)
    shared, gate = config.shared_expert_ffn_size, {f"{hf}shared_expert_gate.weight": (1, hidden)}
    yield from _mlp_maps(f"{p}shared_experts.", f"{hf}shared_expert.", hidden, shared)
    yield mapped(f"{p}shared_experts.gate_weight", gate)


def plan_of(
    config: HFModelConfig, specs: Mapping[str, TensorSpec], model: Architecture, centred: bool
) -> Plan:
    """Assign every tensor of the files to a map, to passthrough or to an alias, or refuse it.

    ``centred`` is the Megatron model's ``layernorm_zero_centered_gamma``.
    """
    for key, spec in specs.items():
        if spec.dtype.startswith("F8") or key.endswith("weight_scale_inv"):
            raise NotImplementedError(
                f"{key} is quantised ({spec.dtype}); block-scaled FP8 checkpoints are not read. "
                f"Convert the folder to BF16 first."
            )
    maps = list(model_maps(config, specs.keys(), model, centred))
    shapes = {source.key: source.shape for entry in maps for source in entry.sources}
    whose = f"a {config.architecture} with {config.num_layers} layers"
    if missing := [key for key in shapes if key not in specs]:
        raise ValueError(f"missing key {missing[0]!r}{and_more(missing)}: {whose} needs it.")
    for key, shape in shapes.items():
        if specs[key].shape != shape:
            raise ValueError(
                f"{key} has shape {specs[key].shape}, but config.json asks for {shape}."
            )
    aliases = {_LM_HEAD: maps[0].sources[0].key} if config.tied and _LM_HEAD in specs else {}
    rest = [key for key in specs if key not in shapes and key not in aliases]
    if unknown := [key for key in rest if not key.startswith(_PASSTHROUGH)]:
        raise ValueError(
            f"unknown key {unknown[0]!r}{and_more(unknown)}: it is no weight of {whose}, and "
            f"starts with none of {', '.join(_PASSTHROUGH)}, which an export copies "
            f"unchanged."
        )
    return Plan(maps, rest, aliases)
