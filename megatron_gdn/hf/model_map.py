"""The maps between Megatron's tensors and Hugging Face's for a whole model.

GPTModel has one layer for each layer of a Hugging Face model, HybridModel two (mixer, then MLP).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import Literal, NamedTuple

import torch

from ..gdn.hf import gdn_layer_maps
from ..mixers.tensor_map import HFRef, TensorMap, by_group, mapped
from .model_config import HFModelConfig
from .safetensors_files import TensorSpec

Architecture = Literal["hybrid", "gpt"]

_EMBEDDING = "embed_tokens.weight"
_LM_HEAD = "lm_head.weight"
# Multi-token prediction and vision weights: an export copies them, they are never loaded.
_PASSTHROUGH = ("mtp.", "model.visual.", "visual.")


class Plan(NamedTuple):
    """What an import and an export do with every tensor of a folder."""

    maps: list[TensorMap]
    passthrough: list[str]  # keys that an export copies unchanged
    aliases: dict[str, str]  # keys that repeat another's tensor (a tied model's output layer)


def and_more(names: list[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""


def model_maps(
    config: HFModelConfig,
    keys: Collection[str],
    model: Architecture = "hybrid",
    zero_centered_gamma: bool = True,
) -> Iterator[TensorMap]:
    """The maps of a whole model; ``keys`` of the files have the text model's prefix."""
    root, hidden, vocab = _text_root(keys), config.hidden_size, config.vocab_size

    def norm(names: str | tuple[str, ...], key: str, size: int = hidden) -> TensorMap:
        # These norms multiply by (1 + w) in the file; a plain Megatron norm needs the whole gain.
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
    """The prefix of the text model: ``model.`` or ``model.language_model.``."""
    roots = {key.removesuffix(_EMBEDDING) for key in keys if key.endswith(f".{_EMBEDDING}")}
    roots = {root for root in roots if root.split(".")[0] == "model"}
    if len(roots) != 1:
        raise ValueError(
            f"missing key: exactly one model.*{_EMBEDDING} must say where the text model is, "
            f"found {sorted(roots)}."
        )
    return roots.pop()


def _attention_maps(p: str, hf: str, config: HFModelConfig) -> Iterator[TensorMap]:
    """Rows ``[q | gate]`` head by head become ``[q | gate | k | v]`` query group by query group."""
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
            # Grouped experts number their weights, sequential ones their modules.
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
                f"{key} is quantised ({spec.dtype}, block-scaled FP8 checkpoints); convert the "
                f"folder to BF16 first."
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
            f"starts with none of {', '.join(_PASSTHROUGH)}, which are carried through "
            f"unchanged."
        )
    return Plan(maps, rest, aliases)
