"""Counts parameters and floating-point operations of a model by its layers.

``docs/models.md`` has the equations. S is the state before a chunk of C tokens, A is
the chunk's triangular inverse. For each chunk the delta rule computes these products:

    k k^T,  q k^T                               C C K multiply-adds each, per key head
    k S,  q S,  k^T x                           C K V multiply-adds each, per value head
    x = A (v - k S),  (q k^T) x                 C C V multiply-adds each, per value head

Kimi Delta Attention computes k k^T and q k^T per value head. Mamba2 has no k k^T, k S
and A. Only matrix products are counted. A backward counts as two forwards;
recomputation is not counted.

Legend: G key heads (groups in Mamba2), n attention heads, d dims of an attention head.
In latent attention a head has d columns of query and v columns of value.
A *multiply-add* counts as 2 FLOPs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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
MAMBA_EXPAND = 2  # a Mamba2's inner width / hidden size, if no number of heads is given


class Flops(NamedTuple):
    """FLOPs of one forward, by part of the model.

    ``output``: FLOPs of the output layer, which also runs for each multi-token
    prediction head.
    """

    projections: int
    convolution: int
    rule: int
    attention: int
    output: int

    @property
    def forward(self) -> int:
        """FLOPs of one forward."""
        return sum(self)

    @property
    def step(self) -> int:
        """FLOPs of forward and backward; step / (seconds * GPUs * peak FLOP/s) is the
        MFU."""
        return 3 * self.forward


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCounts:
    """Parameters and multiply-adds of one layer of a hybrid pattern, with the norm
    before it."""

    matrix_weights: int  # elements of the matrices that multiply each token
    vector_weights: int  # elements of other parameters: norms, convolutions, gates
    # elements of the experts to which a token is not routed
    idle_expert_weights: int = 0
    conv_multiply_adds: int = 0  # per token
    rule_multiply_adds: int = 0  # per token
    attention_multiply_adds: int = 0  # per pair (query, key)
    state_bytes: int = 0  # bytes of a sequence's fp32 state
    # bytes of a sequence's last W - 1 bf16 rows, which the convolution reads
    conv_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """A language model: embedding, layers, multi-token prediction heads, norm, output
    layer."""

    layers: tuple[LayerCounts, ...]
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
        """The stack of a Megatron configuration; biases of linears are not counted.

        Args:
            config: a ``TransformerConfig``, or an object with its fields.
            pattern: 'G', 'K', 'M', '*', '+', '-' and 'E' are layers, '|' is between
                pipeline stages, '/' is before each multi-token prediction head.
            vocab_size: rows of the embedding.
            tied: whether the output layer uses the embedding's weight.
            kda: options of the 'K' layers.

        Raises:
            ValueError: the pattern has another symbol.
        """
        layer_functions: dict[str, Callable[[], LayerCounts]] = {
            "G": lambda: _gdn_layer(config),
            "K": lambda: _kda_layer(config, kda or {}),
            "M": lambda: _mamba2_layer(config),
            "*": lambda: _attention_layer(config),
            "+": lambda: _latent_attention_layer(config),
            "-": lambda: _mlp_layer(config),
            "E": lambda: _expert_layer(config),
        }
        patterns = pattern.replace("|", "").split("/")
        main_pattern = patterns[0]
        head_patterns = patterns[1:]
        symbols = set("".join(patterns))
        if unknown := sorted(symbols - layer_functions.keys()):
            raise ValueError(
                f"the pattern {pattern!r} has {unknown}; FLOPs are known for 'G', 'K', "
                "'M', '*', '+', '-' and 'E' (with '|' and '/' between layers)."
            )
        layer_of_symbol = {symbol: layer_functions[symbol]() for symbol in symbols}
        D = config.hidden_size
        layers = [layer_of_symbol[symbol] for symbol in main_pattern]
        for head_pattern in head_patterns:
            # the head's projection from 2 D to D, and its norms
            layers.append(LayerCounts(matrix_weights=2 * D * D, vector_weights=3 * D))
            layers += [layer_of_symbol[symbol] for symbol in head_pattern]
        return cls(
            layers=tuple(layers),
            hidden_size=D,
            vocab_size=vocab_size,
            tied=tied,
            outputs=1 + len(head_patterns),
        )

    @property
    def parameters(self) -> int:
        """The number of all parameters."""
        return self.active_parameters + self._sum("idle_expert_weights")

    @property
    def active_parameters(self) -> int:
        """The number of parameters that one token uses: all parameters, except those of
        experts to which the token is not routed."""
        embeddings = self.vocab_size * self.hidden_size
        if not self.tied:
            embeddings *= 2  # embedding and output layer
        final_norm = self.hidden_size
        layers = self._sum("matrix_weights") + self._sum("vector_weights")
        return embeddings + final_norm + layers

    @property
    def state_bytes(self) -> int:
        """Bytes of one sequence's fp32 states in all layers."""
        return self._sum("state_bytes")

    @property
    def conv_bytes(self) -> int:
        """Bytes of one sequence's bf16 convolution histories in all layers."""
        return self._sum("conv_bytes")

    def _sum(self, field: str) -> int:
        """The sum over all layers of a field of :class:`LayerCounts`."""
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
        output_tokens = tokens * self.outputs
        return Flops(
            projections=2 * tokens * self._sum("matrix_weights"),
            convolution=2 * tokens * self._sum("conv_multiply_adds"),
            rule=2 * tokens * self._sum("rule_multiply_adds"),
            # Causal attention computes half of the pairs (query, key), 2 FLOPs each.
            attention=squares * self._sum("attention_multiply_adds"),
            output=2 * output_tokens * self.hidden_size * self.vocab_size,
        )


def _gdn_layer(config: Config) -> LayerCounts:
    """The parameters and multiply-adds of a Gated DeltaNet layer."""
    dims = GDNDims.from_config(config)
    G = dims.num_key_heads
    H, K, V = dims.state_shape[:3]
    rule_multiply_adds = H * (3 * K * V + 2 * CHUNK * V) + 2 * G * CHUNK * K
    maps = gdn_layer_maps("", "", dims, "flat")
    return _recurrent_layer(dims, maps, rule_multiply_adds)


def _kda_layer(config: Config, options: Mapping[str, int | None]) -> LayerCounts:
    """The parameters and multiply-adds of a Kimi Delta Attention layer; ``options``: its
    ``forget_rank`` and ``output_rank``, if given."""
    dims = KDADims.of(config, options.get("forget_rank"), options.get("output_rank"))
    H, K, V = dims.state_shape[:3]
    rule_multiply_adds = H * (3 * K * V + 2 * CHUNK * V + 2 * CHUNK * K)
    maps = kda_layer_maps("", "", dims, "kimi_linear")
    return _recurrent_layer(dims, maps, rule_multiply_adds)


def _mamba2_layer(config: Config) -> LayerCounts:
    """The parameters and multiply-adds of a Mamba2 layer."""
    dims = Mamba2Dims.from_config(config, config.hidden_size, MAMBA_TAPS, MAMBA_EXPAND)
    G = dims.num_groups
    H, K, V = dims.state_shape[:3]
    rule_multiply_adds = H * (2 * K * V + CHUNK * V) + G * CHUNK * K
    maps = mamba2_layer_maps("", "", dims)
    return _recurrent_layer(dims, maps, rule_multiply_adds)


def _recurrent_layer(
    dims: GDNDims | KDADims | Mamba2Dims, maps: list[TensorMap], rule_multiply_adds: int
) -> LayerCounts:
    """The parameters and multiply-adds of a recurrent layer.

    ``maps``: the maps of its weights, which have the shapes of all parameters.
    ``rule_multiply_adds``: per token. These are the products of a chunk, which the
    module's docstring lists, divided by C.
    """
    shapes = [source.shape for entry in maps for source in entry.sources]
    matrices = sum(prod(shape) for shape in shapes if len(shape) == 2)
    D = dims.hidden_size
    W = dims.conv_kernel_dim
    channels = dims.layout.conv_width
    H, K, V = dims.state_shape[:3]
    return LayerCounts(
        matrix_weights=matrices,
        vector_weights=D + sum(map(prod, shapes)) - matrices,
        conv_multiply_adds=W * channels,
        rule_multiply_adds=rule_multiply_adds,
        state_bytes=4 * H * K * V,
        conv_bytes=2 * (W - 1) * channels,
    )


def _attention_layer(config: Config) -> LayerCounts:
    """The parameters and multiply-adds of an attention layer."""
    D = config.hidden_size
    d = config.kv_channels
    n = config.num_attention_heads
    groups = config.num_query_groups
    heads = n + 2 * groups  # heads of q, k and v, which linear_qkv computes
    if getattr(config, "attention_output_gate", False):
        heads += n
    vector_weights = D
    if getattr(config, "qk_layernorm", False):
        vector_weights += 2 * d
    matrix_weights = D * d * heads + n * d * D
    return LayerCounts(
        matrix_weights=matrix_weights,
        vector_weights=vector_weights,
        attention_multiply_adds=2 * n * d,
    )


def _latent_attention_layer(config: Config) -> LayerCounts:
    """The parameters and multiply-adds of a layer of latent attention."""
    D = config.hidden_size
    n = config.num_attention_heads
    shared_dim = config.qk_pos_emb_head_dim
    d = config.qk_head_dim + shared_dim
    v = config.v_head_dim
    latent = config.kv_lora_rank
    matrix_weights = D * (latent + shared_dim)  # linear_kv_down_proj
    matrix_weights += latent * n * (config.qk_head_dim + v)  # linear_kv_up_proj
    matrix_weights += n * v * D  # linear_proj
    vector_weights = D + latent
    rank = config.q_lora_rank
    if rank is None:
        matrix_weights += D * n * d
    else:
        matrix_weights += D * rank + rank * n * d
        vector_weights += rank
    return LayerCounts(
        matrix_weights=matrix_weights,
        vector_weights=vector_weights,
        attention_multiply_adds=n * (d + v),
    )


def _mlp_layer(config: Config) -> LayerCounts:
    """The parameters and multiply-adds of an MLP."""
    D = config.hidden_size
    return LayerCounts(
        matrix_weights=_mlp_weights(config, config.ffn_hidden_size), vector_weights=D
    )


def _expert_layer(config: Config) -> LayerCounts:
    """The parameters and multiply-adds of a layer of experts."""
    D = config.hidden_size
    experts = config.num_moe_experts
    experts_per_token = config.moe_router_topk
    expert = _mlp_weights(config, config.moe_ffn_hidden_size)
    shared_expert = _mlp_weights(
        config, config.moe_shared_expert_intermediate_size or 0
    )
    router = D * experts
    matrix_weights = router + experts_per_token * expert + shared_expert
    if getattr(config, "moe_shared_expert_gate", False):
        matrix_weights += D
    return LayerCounts(
        matrix_weights=matrix_weights,
        vector_weights=D,
        idle_expert_weights=(experts - experts_per_token) * expert,
    )


def _mlp_weights(config: Config, width: int) -> int:
    """The number of weights of one MLP with the inner width ``width``."""
    if config.gated_linear_unit:
        matrices = 3  # gate, up and down
    else:
        matrices = 2
    return matrices * config.hidden_size * width


def stack_of_arguments(args: Namespace) -> Stack:
    """The stack that Megatron's parsed and validated arguments ``args`` describe.

    Megatron's arguments have no options of 'K' layers. So the options are those of the
    `KDAHybridStack` that this process built last. Raises a ValueError for a layer that
    :class:`Stack` cannot count.
    """
    from ..specs.gpt import GDN_VARIANTS, layer_kinds
    from ..specs.hybrid import KDAHybridStack

    pattern = getattr(args, "hybrid_layer_pattern", None)
    unknown_options = ["moe_latent_size"]
    # If the pattern has '+' layers, this option only describes them. Else it changes
    # the '*' layers.
    if "+" not in (pattern or ""):
        unknown_options.append("multi_latent_attention")
    for name in unknown_options:
        if getattr(args, name, None):
            raise ValueError(f"{name}: FLOPs of layers with this option are not known.")
    variant = args.experimental_attention_variant
    spec = " ".join(args.spec or ())
    # specs of Gated DeltaProduct, ours and Megatron's, have one of these words
    if variant not in (None, *GDN_VARIANTS) or "gdp" in spec or "product" in spec:
        raise ValueError(f"FLOPs of layers of {variant or spec} are not known.")
    config = SimpleNamespace(**vars(args))
    config.gated_linear_unit = args.swiglu
    config.num_moe_experts = args.num_experts
    if not args.group_query_attention:
        config.num_query_groups = args.num_attention_heads
    if not pattern:  # a GPTModel: two symbols describe a layer, its mixer and its MLP
        pairs = []
        for is_gdn, is_moe in layer_kinds(config):
            mixer = "G" if is_gdn else "*"
            mlp = "E" if is_moe else "-"
            pairs.append(mixer + mlp)
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

    For packed documents, ``seqlen_squared_sum_in_batch`` is the sum of their squared
    lengths, and ``total_real_tokens_in_batch`` is the number of tokens without padding.
    None means ``batch_size`` sequences of ``args.seq_length`` tokens.
    """
    tokens = total_real_tokens_in_batch
    squares = seqlen_squared_sum_in_batch
    if tokens is None:
        tokens = batch_size * args.seq_length
    if squares is None:
        squares = batch_size * args.seq_length**2
    return stack_of_arguments(args).flops_of_sums(round(tokens), round(squares)).step


def count_flops_in_megatron() -> None:
    """Let Megatron's training count FLOPs by `num_floating_point_operations`; Megatron
    itself still counts models that have layers unknown to :class:`Stack`."""
    from megatron.training import training

    megatron_count = training.num_floating_point_operations

    def count(args: Namespace, *others: Any, **named: Any) -> float:
        """FLOPs of a training step, for the arguments of Megatron's function."""
        try:
            return num_floating_point_operations(args, *others, **named)
        # AttributeError: another version of Megatron may lack an argument
        except (ValueError, AttributeError) as error:
            log_once(f"Megatron's own count of FLOPs is used: {error}")
            return megatron_count(args, *others, **named)

    if megatron_count.__module__ != __name__:  # else an earlier call has replaced it
        training.num_floating_point_operations = count
