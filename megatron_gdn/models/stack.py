"""Counts parameters and floating-point operations of a model by its layers.

``docs/models.md`` has the equations. The delta rule computes these products for a chunk
of C tokens, where S is the state before the chunk and A the chunk's triangular inverse:

    k k^T,  q k^T                               C C K multiply-adds each, per key head
    k S,  q S,  k^T x                           C K V multiply-adds each, per value head
    x = A (v - k S),  (q k^T) x                 C C V multiply-adds each, per value head

Kimi Delta Attention computes k k^T and q k^T per value head. Mamba2 has no k k^T, k S
and A. Only matrix products are counted. A backward counts as two forwards;
recomputation is not counted.

Legend: G key heads (groups in Mamba2), n attention heads, d dims of an attention head.
In latent attention a head has d columns of query and v columns of value.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

from ..compat.observe import log_once
from ..gdn.hf import gdn_layer_maps
from ..gdn.sizes import GDNDims
from ..kda.hf import kda_layer_maps
from ..kda.sizes import KDADims
from ..mamba2.hf import mamba2_layer_maps
from ..mamba2.sizes import Mamba2Dims
from ..mixers.tensor_map import TensorMap

if TYPE_CHECKING:
    from argparse import Namespace

# Megatron's TransformerConfig, or the arguments of a launch under its fields' names.
Config = Any
CHUNK = 64  # tokens of a chunk, in every rule of this package
MAMBA_TAPS = 4  # taps of a Mamba2 convolution; Megatron has no field for the number


class Flops(NamedTuple):
    """FLOPs of one forward, by part of the model."""

    projections: int
    convolution: int
    rule: int
    attention: int
    output: int

    @property
    def forward(self) -> int:
        return sum(self)

    @property
    def step(self) -> int:
        """FLOPs of forward and backward; step / (seconds * GPUs * peak FLOP/s) is the
        MFU."""
        return 3 * self.forward


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """Sizes and operation counts of one layer of a hybrid pattern, with the norm before
    it."""

    weights: int  # elements of the matrices that multiply every token's row
    vectors: int  # other parameters: norms, convolutions, gates
    idle_experts: int = 0  # weights of the experts that a token is not routed to
    convolution: int = 0  # multiply-adds per token
    rule: int = 0  # multiply-adds per token
    attention: int = 0  # multiply-adds per pair (query, key)
    state_bytes: int = 0  # bytes of a sequence's fp32 state
    # bytes of a sequence's last W - 1 bf16 rows, which the convolution reads
    conv_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """A language model: embedding, layers, multi-token prediction heads, norm, output
    layer."""

    layers: tuple[Layer, ...]
    hidden_size: int
    vocab_size: int
    tied: bool  # whether the output layer and the embedding share one weight
    # runs of the output layer: 1 + number of multi-token prediction heads
    outputs: int = 1

    @classmethod
    def of(
        cls,
        config: Config,
        pattern: str,
        vocab_size: int,
        tied: bool,
        *,
        kda: Mapping[str, int | None] | None = None,
    ) -> Stack:
        """Make the stack of a Megatron configuration; biases of linears are not
        counted.

        ``pattern`` has 'G', 'K', 'M', '*', '+', '-' and 'E' (another symbol is a
        ValueError), '|' between pipeline stages and '/' before each multi-token
        prediction head. ``tied``: the output layer uses the embedding's weight.
        ``kda``: options of the 'K' layers.
        """
        kda = kda or {}
        build = {
            "G": lambda: _gdn_layer(GDNDims.from_config(config)),
            "K": lambda: _kda_layer(
                KDADims.of(config, kda.get("forget_rank"), kda.get("output_rank"))
            ),
            "M": lambda: _mamba2_layer(
                Mamba2Dims.from_config(config, config.hidden_size, MAMBA_TAPS, 2)
            ),
            "*": lambda: _attention_layer(config),
            "+": lambda: _latent_attention_layer(config),
            "-": lambda: _mlp_layer(config),
            "E": lambda: _expert_layer(config),
        }
        parts = pattern.replace("|", "").split("/")
        main = parts[0]
        heads = parts[1:]
        symbols = set("".join(parts))
        if unknown := sorted(symbols - build.keys()):
            raise ValueError(
                f"the pattern {pattern!r} has {unknown}; FLOPs are known for 'G', 'K', "
                "'M', '*', '+', '-' and 'E' (with '|' and '/' between layers)."
            )
        made = {symbol: build[symbol]() for symbol in symbols}
        D = config.hidden_size
        layers = [made[symbol] for symbol in main]
        for head in heads:
            layers.append(Layer(weights=2 * D * D, vectors=3 * D))
            layers += [made[symbol] for symbol in head]
        return cls(
            layers=tuple(layers),
            hidden_size=D,
            vocab_size=vocab_size,
            tied=tied,
            outputs=1 + len(heads),
        )

    @property
    def parameters(self) -> int:
        """The number of all parameters."""
        return self.active_parameters + self._sum("idle_experts")

    @property
    def active_parameters(self) -> int:
        """The number of parameters that one token uses, with only the experts it is
        routed to."""
        ends = self.hidden_size * (self.vocab_size * (1 if self.tied else 2) + 1)
        return ends + self._sum("weights") + self._sum("vectors")

    @property
    def state_bytes(self) -> int:
        """Bytes of one sequence's fp32 states in all layers."""
        return self._sum("state_bytes")

    @property
    def conv_bytes(self) -> int:
        """Bytes of one sequence's bf16 convolution histories in all layers."""
        return self._sum("conv_bytes")

    def _sum(self, field: str) -> int:
        return sum(getattr(layer, field) for layer in self.layers)

    def flops(self, lengths: Sequence[int]) -> Flops:
        """FLOPs of one forward over documents with ``lengths`` tokens, without
        padding."""
        return self.flops_of_sums(
            sum(lengths), sum(length * length for length in lengths)
        )

    def flops_of_sums(self, tokens: int, squares: int) -> Flops:
        """FLOPs of one forward; ``squares`` is the sum of the documents' squared
        lengths."""
        return Flops(
            projections=2 * tokens * self._sum("weights"),
            convolution=2 * tokens * self._sum("convolution"),
            rule=2 * tokens * self._sum("rule"),
            # causal: 2 FLOPs for half of the pairs
            attention=squares * self._sum("attention"),
            output=2 * tokens * self.outputs * self.hidden_size * self.vocab_size,
        )


def _gdn_layer(dims: GDNDims) -> Layer:
    """The parameters and multiply-adds of a Gated DeltaNet layer."""
    G = dims.num_key_heads
    H, K, V = dims.state[:3]
    rule = H * (3 * K * V + 2 * CHUNK * V) + 2 * G * CHUNK * K
    return _recurrent_layer(dims, gdn_layer_maps("", "", dims, "flat"), rule)


def _kda_layer(dims: KDADims) -> Layer:
    """The parameters and multiply-adds of a Kimi Delta Attention layer."""
    H, K, V = dims.state[:3]
    rule = H * (3 * K * V + 2 * CHUNK * V + 2 * CHUNK * K)
    return _recurrent_layer(dims, kda_layer_maps("", "", dims, "kimi_linear"), rule)


def _mamba2_layer(dims: Mamba2Dims) -> Layer:
    """The parameters and multiply-adds of a Mamba2 layer."""
    G = dims.num_groups
    H, K, V = dims.state[:3]
    rule = H * (2 * K * V + CHUNK * V) + G * CHUNK * K
    return _recurrent_layer(dims, mamba2_layer_maps("", "", dims), rule)


def _recurrent_layer(
    dims: GDNDims | KDADims | Mamba2Dims, maps: list[TensorMap], rule: int
) -> Layer:
    """A layer with the parameters of ``maps``; ``rule`` is the number of multiply-adds
    of its rule per token."""
    shapes = [source.shape for entry in maps for source in entry.sources]
    matrices = sum(prod(shape) for shape in shapes if len(shape) == 2)
    D = dims.hidden_size
    W = dims.conv_kernel_dim
    channels = dims.layout.conv_width
    H, K, V = dims.state[:3]
    return Layer(
        weights=matrices,
        vectors=D + sum(map(prod, shapes)) - matrices,
        convolution=W * channels,
        rule=rule,
        state_bytes=4 * H * K * V,
        conv_bytes=2 * (W - 1) * channels,
    )


def _attention_layer(config: Config) -> Layer:
    """The parameters and multiply-adds of an attention layer."""
    D = config.hidden_size
    d = config.kv_channels
    n = config.num_attention_heads
    groups = config.num_query_groups
    if getattr(config, "attention_output_gate", False):
        gates = n
    else:
        gates = 0
    if getattr(config, "qk_layernorm", False):
        norms = 2 * d
    else:
        norms = 0
    weights = D * d * (n + gates + 2 * groups) + n * d * D
    return Layer(weights=weights, vectors=D + norms, attention=2 * n * d)


def _latent_attention_layer(config: Config) -> Layer:
    """The parameters and multiply-adds of a layer of latent attention."""
    D = config.hidden_size
    n = config.num_attention_heads
    shared = config.qk_pos_emb_head_dim
    d = config.qk_head_dim + shared
    v = config.v_head_dim
    latent = config.kv_lora_rank
    weights = D * (latent + shared) + latent * n * (config.qk_head_dim + v) + n * v * D
    vectors = D + latent
    rank = config.q_lora_rank
    if rank is None:
        weights += D * n * d
    else:
        weights += D * rank + rank * n * d
        vectors += rank
    return Layer(weights=weights, vectors=vectors, attention=n * (d + v))


def _mlp_layer(config: Config) -> Layer:
    """The parameters and multiply-adds of an MLP."""
    D = config.hidden_size
    return Layer(weights=_mlp_matrices(config) * D * config.ffn_hidden_size, vectors=D)


def _expert_layer(config: Config) -> Layer:
    """The parameters and multiply-adds of a layer of experts."""
    D = config.hidden_size
    experts = config.num_moe_experts
    used = config.moe_router_topk
    one = (
        _mlp_matrices(config)
        * D
        * (config.moe_ffn_hidden_size or config.ffn_hidden_size)
    )
    shared = (
        _mlp_matrices(config) * D * (config.moe_shared_expert_intermediate_size or 0)
    )
    if getattr(config, "moe_shared_expert_gate", False):
        gate = D
    else:
        gate = 0
    return Layer(
        weights=D * experts + used * one + shared + gate,
        vectors=D,
        idle_experts=(experts - used) * one,
    )


def _mlp_matrices(config: Config) -> int:
    """The number of weight matrices of one MLP."""
    if config.gated_linear_unit:
        return 3
    return 2


def stack_of_arguments(args: Namespace) -> Stack:
    """Make the stack that Megatron's parsed and validated arguments describe.

    Megatron's arguments have no options of 'K' layers, so the options of the last
    `KDAHybridStack` that was built are used. A layer that :class:`Stack` does not know
    is a ValueError.
    """
    from ..specs.gpt import GDN_VARIANTS, layer_kinds
    from ..specs.hybrid import KDAHybridStack

    pattern = getattr(args, "hybrid_layer_pattern", None)
    unknown = ["moe_latent_size"]
    if "+" not in (pattern or ""):
        unknown.append("multi_latent_attention")
    for name in unknown:
        if getattr(args, name, None):
            raise ValueError(f"{name}: FLOPs of layers with this option are not known.")
    variant = args.experimental_attention_variant
    spec = " ".join(args.spec or ())
    if variant not in (None, *GDN_VARIANTS) or "gdp" in spec or "product" in spec:
        raise ValueError(f"FLOPs of layers of {variant or spec} are not known.")
    config = SimpleNamespace(
        **vars(args)
        | {"gated_linear_unit": args.swiglu, "num_moe_experts": args.num_experts}
    )
    if not args.group_query_attention:
        config.num_query_groups = args.num_attention_heads
    if not pattern:  # a GPTModel: two symbols describe a layer, its mixer and its MLP
        pairs = ["*G"[is_gdn] + "-E"[is_moe] for is_gdn, is_moe in layer_kinds(config)]
        pattern = "".join(pairs) + f"/{pairs[-1]}" * (args.mtp_num_layers or 0)
    return Stack.of(
        config,
        pattern,
        args.padded_vocab_size,
        not args.untie_embeddings_and_output_weights,
        kda=KDAHybridStack.kda_options,
    )


def num_floating_point_operations(
    args: Namespace,
    batch_size: int,
    seqlen_squared_sum_in_batch: float | None = None,
    total_real_tokens_in_batch: float | None = None,
) -> float:
    """FLOPs of a training step; name and arguments are those of Megatron's function.

    For packed documents the last two arguments are the sum of squared lengths and the
    number of tokens without padding; None means ``batch_size`` sequences of
    ``args.seq_length`` tokens.
    """
    tokens = total_real_tokens_in_batch
    squares = seqlen_squared_sum_in_batch
    if tokens is None:
        tokens = batch_size * args.seq_length
    if squares is None:
        squares = batch_size * args.seq_length**2
    return stack_of_arguments(args).flops_of_sums(round(tokens), round(squares)).step


def count_flops_in_megatron() -> None:
    """Let Megatron count FLOPs by this module, except for models with layers unknown
    here."""
    from megatron.training import training

    megatron_count = training.num_floating_point_operations

    def count(args: Namespace, *others: Any, **named: Any) -> float:
        try:
            return num_floating_point_operations(args, *others, **named)
        except (
            ValueError,
            AttributeError,
        ) as error:  # another version may lack an argument
            log_once(f"Megatron's own count of FLOPs is used: {error}")
            return megatron_count(args, *others, **named)

    if megatron_count.__module__ != __name__:
        training.num_floating_point_operations = count
