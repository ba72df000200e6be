"""Megatron's count of FLOPs for its log line of throughput, with the equations of :mod:`.stack`.

Megatron's own counts (core_r0.19.0, main and dev) have V^2 in place of K V for the delta rule, no
output gate of attention in hybrid models, and no routers. For Mamba2 they take an inner width of
twice the hidden size.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from ..compat.observe import log_once
from ..specs.gpt import GDN_VARIANTS, kinds_of_layers
from ..specs.stack import KDAHybridStack
from .stack import Stack


def stack_of_arguments(args: Any) -> Stack:
    """The stack that Megatron's parsed and validated command line describes.

    It has no options of 'K' layers; those of the last built stack are taken. A layer that
    :class:`.stack.Stack` does not know is a ValueError.
    """
    for name in ("multi_latent_attention", "moe_latent_size"):
        if getattr(args, name, None):
            raise ValueError(f"{name}: FLOPs of such layers are not known here.")
    variant, spec = args.experimental_attention_variant, " ".join(args.spec or ())
    if variant not in (None, *GDN_VARIANTS) or "gdp" in spec or "product" in spec:
        raise ValueError(f"layers of {variant or spec}: their FLOPs are not known here.")
    config = SimpleNamespace(
        **vars(args) | {"gated_linear_unit": args.swiglu, "num_moe_experts": args.num_experts}
    )
    if not args.group_query_attention:
        config.num_query_groups = args.num_attention_heads
    pattern = getattr(args, "hybrid_layer_pattern", None)
    if not pattern:  # a GPTModel's layers, two symbols each
        pairs = ["*G"[is_gdn] + "-E"[is_moe] for is_gdn, is_moe in kinds_of_layers(config)]
        pattern = "".join(pairs) + f"/{pairs[-1]}" * (args.mtp_num_layers or 0)
    return Stack.of(
        config, pattern, args.padded_vocab_size, not args.untie_embeddings_and_output_weights,
        kda=KDAHybridStack.kda_options,
    )  # fmt: skip


def num_floating_point_operations(
    args: Any,
    batch_size: int,
    seqlen_squared_sum_in_batch: float | None = None,
    total_real_tokens_in_batch: float | None = None,
) -> float:
    """As Megatron's function of this name; the last two arguments are of packed documents."""
    tokens, squares = total_real_tokens_in_batch, seqlen_squared_sum_in_batch
    if tokens is None:
        tokens = batch_size * args.seq_length
    if squares is None:
        squares = batch_size * args.seq_length**2
    return stack_of_arguments(args).flops_of_sums(round(tokens), round(squares)).step


def install() -> None:
    """Make Megatron's training loop count so, except for models that are not known."""
    from megatron.training import training

    theirs = training.num_floating_point_operations

    def count(args: Any, *others: Any, **named: Any) -> float:
        try:
            return num_floating_point_operations(args, *others, **named)
        except (ValueError, AttributeError) as error:  # another Megatron may lack an argument
            log_once(f"Megatron's own count of FLOPs is used: {error}")
            return theirs(args, *others, **named)

    if theirs.__module__ != __name__:
        training.num_floating_point_operations = count
