"""Generates text with a Megatron model that is in training: a prefill, then token by
token.

The model may use tensor, sequence and context parallelism. To serve a model, use
Megatron's engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import torch
from megatron.core.inference.contexts import StaticInferenceContext
from megatron.core.inference.utils import InferenceMode
from megatron.core.transformer.attention import Attention
from megatron.core.utils import unwrap_model
from torch import Tensor, nn

from ..mixers.attention import TorchAttention

# Attribute -> the value that switches off sequence parallelism or FP8. Neither can run
# single tokens.
_OFF_VALUES_OF_MODULES = {
    "sequence_parallel": False,
    "scatter_to_sequence_parallel": False,
    "reduce_scatter_embeddings": False,
    "te_quant_params": None,  # a quantization recipe sets this attribute
}
_OFF_VALUES_OF_CONFIGS = {"sequence_parallel": False, "fp8": None}


def greedy(logits: Tensor) -> Tensor:
    """The most likely token of each row of ``logits [B, V]``."""
    return logits.argmax(-1)


def static_context(model: nn.Module, rows: int, tokens: int) -> StaticInferenceContext:
    """Make a context for ``rows`` sequences of up to ``tokens`` tokens, prompt
    included. Every context-parallel rank runs whole sequences.

    Raises:
        NotImplementedError: the model has pipeline stages, or it is built for context
            parallelism with another attention than `TorchAttention`.
    """
    config = unwrap_model([model])[0].config
    if config.pipeline_model_parallel_size > 1:
        raise NotImplementedError(
            "generate() needs a whole model on each rank, and "
            f"pipeline_model_parallel_size={config.pipeline_model_parallel_size}; use "
            "Megatron's engine, or load the checkpoint without pipeline stages."
        )
    cp = config.context_parallel_size
    if cp > 1:
        # Megatron cuts rotary angles into two equal parts per rank, so the number of
        # tokens must be even.
        tokens = tokens + tokens % 2
    context = StaticInferenceContext(rows, tokens)
    if cp > 1:
        unsupported = {
            type(module).__name__
            for module in model.modules()
            if isinstance(module, Attention)
            and not isinstance(getattr(module, "core_attention", None), TorchAttention)
        }
        if unsupported:
            raise NotImplementedError(
                f"{', '.join(sorted(unsupported))} cannot run whole sequences in a model "
                f"built with context_parallel_size={cp}. Load the checkpoint into a "
                "model without context parallelism, or use the local attention spec."
            )
        # Mixers and `TorchAttention` then run all tokens on each rank. Without this
        # attribute they refuse to generate with context parallelism.
        vars(context)["whole_on_every_rank"] = True
    return context


def next_logits(
    model: nn.Module, tokens: Tensor, context: StaticInferenceContext
) -> Tensor:
    """Run the next tokens, int64 ``[B, s]``, through the model and return their logits
    ``[B, s, V]``; afterwards ``context`` holds s more tokens.

    In Megatron's ``InferenceMode`` the context's config may limit the logits to the
    last token.
    """
    start = context.sequence_len_offset
    positions = torch.arange(start, start + tokens.shape[1], device=tokens.device)
    attention_mask = None
    logits = model(
        tokens,
        positions.expand_as(tokens),
        attention_mask,
        inference_context=context,
        runtime_gather_output=True,  # the columns of all tensor-parallel ranks
    )
    context.increment_sequence_len_offset(tokens.shape[1])
    return logits


def generate(
    model: nn.Module,
    prompt: Tensor,
    count: int,
    *,
    pick: Callable[[Tensor], Tensor] = greedy,
    stop: int | None = None,
    chunk: int | None = None,
) -> Tensor:
    """Continue prompts of equal length; every rank of the model must call this
    function.

    Args:
        model: a HybridModel or GPTModel, wrapped or not, without pipeline stages. The
            model runs in evaluation mode, without sequence parallelism and FP8: neither
            runs single tokens.
        prompt: int64 ``[B, S]`` with S >= 1, which must be the same on every rank.
        count: number of tokens to append.
        pick: maps fp32 logits ``[B, V]`` to tokens ``[B]``; must give the same tokens
            on every rank.
        stop: a token id; generation ends when each row has this token after its prompt.
        chunk: number of tokens to prefill at a time, which bounds memory; None: the
            whole prompt.

    Returns:
        int64 ``[B, S + count]``, with fewer columns if ``stop`` ended the generation.

    Raises:
        ValueError: a prompt that is empty or not ``[B, S]``.
        NotImplementedError: :func:`static_context` refuses the pipeline stages or the
            attention.
    """
    if prompt.dim() != 2 or 0 in prompt.shape:
        raise ValueError(
            "prompt must be tokens [B, S] with B >= 1 and S >= 1, got "
            f"{tuple(prompt.shape)}."
        )
    context = static_context(model, prompt.shape[0], prompt.shape[1] + count)
    tokens = prompt
    ended = torch.zeros(len(prompt), dtype=torch.bool, device=prompt.device)
    if InferenceMode.is_active():
        active = nullcontext()
    else:
        active = InferenceMode.active()
    with torch.inference_mode(), evaluating(model), active:
        tokens_run = 0
        for _ in range(count):
            # the tokens of each call: at first parts of the prompt, later one token
            calls = tokens[:, tokens_run:].split(chunk or tokens.shape[1], dim=1)
            for call_tokens in calls[:-1]:
                next_logits(model, call_tokens, context)
            logits = next_logits(model, calls[-1], context)[:, -1]
            tokens_run = tokens.shape[1]
            picked = pick(logits.float())
            tokens = torch.cat([tokens, picked[:, None]], dim=1)
            if stop is not None:
                ended |= picked == stop
                if bool(ended.all()):
                    break
    # `tokens` is an inference tensor. This clone is a usual tensor, since it is made
    # outside of inference mode.
    return tokens.clone()


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """In this context the model is in evaluation mode, and sequence parallelism and FP8
    are off."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with ready_for_single_tokens(model):
            yield
    finally:
        for module in training:
            module.training = True


@contextmanager
def ready_for_single_tokens(model: nn.Module) -> Iterator[None]:
    """In this context sequence parallelism and FP8 are off in modules and
    configurations."""
    owners: list = list(model.modules())
    # modules share configs, and each config is changed once
    owners += {id(m.config): m.config for m in owners if hasattr(m, "config")}.values()
    # (owner, name of the attribute, its value); the end of the context sets this value
    # again
    before: list[tuple[object, str, object]] = []
    for owner in owners:
        if isinstance(owner, nn.Module):
            off_values = _OFF_VALUES_OF_MODULES
        else:
            off_values = _OFF_VALUES_OF_CONFIGS
        for name, off in off_values.items():
            if value := getattr(owner, name, None):
                before.append((owner, name, value))
                setattr(owner, name, off)
    try:
        yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)
