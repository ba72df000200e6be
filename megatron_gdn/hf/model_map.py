"""Every tensor of a whole model: Megatron name, Hugging Face names, and the map between them.

Layers are numbered as Hugging Face numbers them. GPTModel has one layer for each, HybridModel two
(mixer, then MLP): `layer_names` says which.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from functools import partial, reduce
from typing import Literal

import torch
from torch import Tensor

from ..gdn.hf import gdn_layer_maps
from ..mixers.tensor_map import HFRef, TensorMap, mapped
from .model_config import HFModelConfig

Architecture = Literal["hybrid", "gpt"]

_EMBEDDING = "embed_tokens.weight"
LM_HEAD = "lm_head.weight"


def model_maps(
    config: HFModelConfig,
    keys: Collection[str],
    model: Architecture = "hybrid",
    zero_centered_gamma: bool = True,
) -> Iterator[TensorMap]:
    """The maps of a whole model, in the order of its layers.

    Args:
        config: the Hugging Face model.
        keys: the keys of its files; they say where the text model is and how experts are packed.
        model: which Megatron model the names are for.
        zero_centered_gamma: ``config.layernorm_zero_centered_gamma`` of that model.

    Raises:
        ValueError: no key ends in ``embed_tokens.weight``.
    """
    root, hidden, vocab = text_root(keys), config.hidden_size, config.vocab_size

    def norm(names: str | tuple[str, ...], key: str, size: int = hidden) -> TensorMap:
        # These norms multiply by (1 + w) in the file; a plain Megatron norm needs the whole gain.
        return mapped(names, {key: (size,)}, shift=float(not zero_centered_gamma))

    embedding = {root + _EMBEDDING: (vocab, hidden)}
    yield mapped("embedding.word_embeddings.weight", embedding, 0, pad_rows=True)
    for layer in range(config.num_layers):
        mixer, mlp = layer_names(layer, model)
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
    final = "decoder.final_norm.weight" if model == "hybrid" else "decoder.final_layernorm.weight"
    yield norm(final, f"{root}norm.weight")
    if not config.tied:
        yield mapped("output_layer.weight", {LM_HEAD: (vocab, hidden)}, 0, pad_rows=True)


def text_root(keys: Collection[str]) -> str:
    """The prefix of the text model: ``model.`` or ``model.language_model.``."""
    roots = {key.removesuffix(_EMBEDDING) for key in keys if key.endswith(f".{_EMBEDDING}")}
    roots = {root for root in roots if root.split(".")[0] == "model"}
    if len(roots) != 1:
        raise ValueError(
            f"missing key: exactly one model.*{_EMBEDDING} must say where the text model is, "
            f"found {sorted(roots)}."
        )
    return roots.pop()


def layer_names(layer: int, model: Architecture) -> tuple[str, str]:
    """Prefixes of the Megatron layers that hold a Hugging Face layer's mixer and its MLP."""
    if model == "gpt":
        return f"decoder.layers.{layer}.", f"decoder.layers.{layer}."
    return f"decoder.layers.{2 * layer}.", f"decoder.layers.{2 * layer + 1}."


def fuse_gated_qkv(pieces: Sequence[Tensor], groups: int, head_dim: int) -> Tensor:
    """``(q and gate [N 2A, D], k [QA, D], v [QA, D])`` to one projection, group by group.

    N attention heads, Q query groups, A head dim, D hidden.
    The file alternates ``[q | gate]`` head by head; Megatron keeps, for each query group,
    ``[q of its heads | gate of its heads | k | v]``.
    """
    q_gate, k, v = pieces
    hidden = q_gate.shape[-1]
    q_gate = q_gate.reshape(groups, -1, 2, head_dim, hidden).transpose(1, 2)
    grouped = [part.reshape(groups, -1, hidden) for part in (q_gate, k, v)]
    dtype = reduce(torch.promote_types, [part.dtype for part in pieces])
    return torch.cat([part.to(dtype) for part in grouped], 1).flatten(0, 1)


def unfuse_gated_qkv(qkv: Tensor, groups: int, head_dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """The inverse of `fuse_gated_qkv`."""
    hidden = qkv.shape[-1]
    grouped = qkv.reshape(groups, -1, hidden)
    q_gate, k, v = grouped.split([grouped.shape[1] - 2 * head_dim, head_dim, head_dim], 1)
    q_gate = q_gate.reshape(groups, 2, -1, head_dim, hidden).transpose(1, 2)
    return q_gate.reshape(-1, hidden), k.flatten(0, 1), v.flatten(0, 1)


def _attention_maps(p: str, hf: str, config: HFModelConfig) -> Iterator[TensorMap]:
    hidden, head_dim, groups = config.hidden_size, config.head_dim, config.num_query_groups
    rows = {
        "q": 2 * config.num_attention_heads * head_dim,
        "k": groups * head_dim,
        "v": groups * head_dim,
    }
    yield mapped(
        f"{p}linear_qkv.weight",
        {f"{hf}{name}_proj.weight": (count, hidden) for name, count in rows.items()},
        0,
        join=partial(fuse_gated_qkv, groups=groups, head_dim=head_dim),
        split=partial(unfuse_gated_qkv, groups=groups, head_dim=head_dim),
    )
    yield mapped(f"{p}linear_proj.weight", {f"{hf}o_proj.weight": (hidden, rows["q"] // 2)}, 1)


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
