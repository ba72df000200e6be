"""Every tensor of a whole model: Megatron name, Hugging Face names, and the map between them.

Layers are numbered as Hugging Face numbers them. GPTModel has one layer for each, HybridModel two
(mixer, then MLP): `layer_names` says which.
"""

# N attention heads, Q query groups, A attention head dim, D hidden, I ffn size, E experts.

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from ..model_config import HFModelConfig
from .gdn_layer import gdn_layer_maps
from .tensor_map import HFRef, TensorMap

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
    root = text_root(keys)
    hidden, vocab = config.hidden_size, config.vocab_size
    # These norms multiply by (1 + w) in the file; a plain Megatron norm needs the whole gain.
    shift = 0.0 if zero_centered_gamma else 1.0
    yield TensorMap(
        names=("embedding.word_embeddings.weight",),
        sources=(HFRef(root + _EMBEDDING, (vocab, hidden)),),
        shard_dim=0,
        pad_rows=True,
    )
    for layer in range(config.num_layers):
        mixer, mlp = layer_names(layer, model)
        hf = f"{root}layers.{layer}."
        if config.is_linear[layer]:
            attention = f"{mixer}self_attention."
            fused_norm = f"{attention}in_proj.layer_norm_weight"
            yield from gdn_layer_maps(
                attention, f"{hf}linear_attn.", config.gdn, config.storage, zero_centered_gamma
            )
        else:
            fused_norm = f"{mixer}self_attention.linear_qkv.layer_norm_weight"
            yield from _attention_maps(f"{mixer}self_attention.", f"{hf}self_attn.", config, shift)
        yield _norm(
            (fused_norm, f"{mixer}input_layernorm.weight"),
            f"{hf}input_layernorm.weight",
            hidden,
            shift,
        )
        if config.is_moe[layer]:
            pre_norms = (f"{mlp}pre_mlp_layernorm.weight",)
            yield from _moe_maps(f"{mlp}mlp.", f"{hf}mlp.", config, keys)
        else:
            pre_norms = (
                f"{mlp}mlp.linear_fc1.layer_norm_weight",
                f"{mlp}pre_mlp_layernorm.weight",
            )
            yield from _mlp_maps(f"{mlp}mlp.", f"{hf}mlp.", hidden, config.ffn_size)
        yield _norm(pre_norms, f"{hf}post_attention_layernorm.weight", hidden, shift)
    final = "decoder.final_norm.weight" if model == "hybrid" else "decoder.final_layernorm.weight"
    yield _norm((final,), f"{root}norm.weight", hidden, shift)
    if not config.tied:
        yield TensorMap(
            names=("output_layer.weight",),
            sources=(HFRef(LM_HEAD, (vocab, hidden)),),
            shard_dim=0,
            pad_rows=True,
        )


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


def _norm(names: tuple[str, ...], key: str, size: int, shift: float) -> TensorMap:
    return TensorMap(names=names, sources=(HFRef(key, (size,)),), shift=shift)


def fuse_gated_qkv(pieces: Sequence[Tensor], groups: int, head_dim: int) -> Tensor:
    """``(q and gate [N 2A, D], k [QA, D], v [QA, D])`` to one projection, group by group.

    The file alternates ``[q | gate]`` head by head; Megatron keeps, for each query group,
    ``[q of its heads | gate of its heads | k | v]``.
    """
    q_gate, k, v = pieces
    hidden = q_gate.shape[-1]
    q_gate = q_gate.reshape(groups, -1, 2, head_dim, hidden).transpose(1, 2)
    grouped = [part.reshape(groups, -1, hidden) for part in (q_gate, k, v)]
    dtype = torch.promote_types(torch.promote_types(q_gate.dtype, k.dtype), v.dtype)
    return torch.cat([part.to(dtype) for part in grouped], 1).flatten(0, 1)


def unfuse_gated_qkv(qkv: Tensor, groups: int, head_dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """The inverse of `fuse_gated_qkv`."""
    hidden = qkv.shape[-1]
    grouped = qkv.reshape(groups, -1, hidden)
    q_gate, k, v = grouped.split([grouped.shape[1] - 2 * head_dim, head_dim, head_dim], 1)
    q_gate = q_gate.reshape(groups, 2, -1, head_dim, hidden).transpose(1, 2)
    return q_gate.reshape(-1, hidden), k.flatten(0, 1), v.flatten(0, 1)


def _attention_maps(
    prefix: str, hf: str, config: HFModelConfig, shift: float
) -> Iterator[TensorMap]:
    hidden, head_dim, groups = config.hidden_size, config.head_dim, config.num_query_groups
    query_rows = config.num_attention_heads * head_dim
    sizes = {"groups": groups, "head_dim": head_dim}
    yield TensorMap(
        names=(f"{prefix}linear_qkv.weight",),
        sources=(
            HFRef(f"{hf}q_proj.weight", (2 * query_rows, hidden)),
            HFRef(f"{hf}k_proj.weight", (groups * head_dim, hidden)),
            HFRef(f"{hf}v_proj.weight", (groups * head_dim, hidden)),
        ),
        join=partial(fuse_gated_qkv, **sizes),
        split=partial(unfuse_gated_qkv, **sizes),
        shard_dim=0,
    )
    yield TensorMap(
        names=(f"{prefix}linear_proj.weight",),
        sources=(HFRef(f"{hf}o_proj.weight", (hidden, query_rows)),),
        shard_dim=1,
    )
    for name, hf_name in (("q_layernorm", "q_norm"), ("k_layernorm", "k_norm")):
        yield _norm((f"{prefix}{name}.weight",), f"{hf}{hf_name}.weight", head_dim, shift)


def _mlp_maps(prefix: str, hf: str, hidden: int, ffn: int) -> Iterator[TensorMap]:
    yield TensorMap(
        names=(f"{prefix}linear_fc1.weight",),
        sources=tuple(HFRef(f"{hf}{n}_proj.weight", (ffn, hidden)) for n in ("gate", "up")),
        shard_dim=0,
        sections=(ffn, ffn),
    )
    yield TensorMap(
        names=(f"{prefix}linear_fc2.weight",),
        sources=(HFRef(f"{hf}down_proj.weight", (hidden, ffn)),),
        shard_dim=1,
    )


def _moe_maps(
    prefix: str, hf: str, config: HFModelConfig, keys: Collection[str]
) -> Iterator[TensorMap]:
    hidden, ffn, experts = config.hidden_size, config.expert_ffn_size, config.num_experts
    packed = f"{hf}experts.gate_up_proj" in keys
    yield TensorMap(
        names=(f"{prefix}router.weight",),
        sources=(HFRef(f"{hf}gate.weight", (experts, hidden)),),
    )
    for e in range(experts):
        if packed:
            up = (HFRef(f"{hf}experts.gate_up_proj", (experts, 2 * ffn, hidden), e),)
            down = HFRef(f"{hf}experts.down_proj", (experts, hidden, ffn), e)
        else:
            one = f"{hf}experts.{e}."
            up = tuple(HFRef(f"{one}{n}_proj.weight", (ffn, hidden)) for n in ("gate", "up"))
            down = HFRef(f"{one}down_proj.weight", (hidden, ffn))
        yield TensorMap(
            names=_expert_names(prefix, e, "linear_fc1"),
            sources=up,
            shard_dim=0,
            sections=(ffn, ffn),
            expert=e,
            num_experts=experts,
        )
        yield TensorMap(
            names=_expert_names(prefix, e, "linear_fc2"),
            sources=(down,),
            shard_dim=1,
            expert=e,
            num_experts=experts,
        )
    shared = config.shared_expert_ffn_size
    yield from _mlp_maps(f"{prefix}shared_experts.", f"{hf}shared_expert.", hidden, shared)
    yield TensorMap(
        names=(f"{prefix}shared_experts.gate_weight",),
        sources=(HFRef(f"{hf}shared_expert_gate.weight", (1, hidden)),),
    )


def _expert_names(prefix: str, expert: int, linear: str) -> tuple[str, ...]:
    """Grouped experts number their weights, sequential ones their modules."""
    return (
        f"{prefix}experts.{linear}.weight{expert}",
        f"{prefix}experts.local_experts.{expert}.{linear}.weight",
    )
