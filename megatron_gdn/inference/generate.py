"""Text from a Megatron model in training: prefill once, then a token at a time.

Any tensor, sequence and context parallelism will do. To serve a model, use Megatron's engines.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from megatron.core.inference.contexts import StaticInferenceContext
from megatron.core.inference.utils import InferenceMode
from megatron.core.transformer.attention import Attention
from megatron.core.utils import unwrap_model
from torch import Tensor, nn

from ..mixers.attention import TorchAttention

# Settings of sequence parallelism and FP8, which take no single token, and their values when off.
_OFF_IN_MODULES = {
    "sequence_parallel": False,
    "scatter_to_sequence_parallel": False,
    "reduce_scatter_embeddings": False,
    "te_quant_params": None,  # of a quantization recipe
}
_OFF_IN_CONFIGS = {"sequence_parallel": False, "fp8": None}


def greedy(logits: Tensor) -> Tensor:
    """The most likely token of each row of ``[B, V]``."""
    return logits.argmax(-1)


def static_context(model: nn.Module, rows: int, tokens: int) -> StaticInferenceContext:
    """A context for ``rows`` sequences of up to ``tokens`` tokens, prompt included.

    Every context-parallel rank runs whole sequences. A pipelined model, or attention that is not
    this package's under context parallelism, is a NotImplementedError.
    """
    config = unwrap_model([model])[0].config
    if config.pipeline_model_parallel_size > 1:
        raise NotImplementedError(
            f"generation here runs on whole models, and pipeline_model_parallel_size="
            f"{config.pipeline_model_parallel_size}; use Megatron's engine, or load the checkpoint "
            f"without pipeline stages."
        )
    cp = config.context_parallel_size
    # Megatron cuts the rotary angles of so many positions into two pieces for each rank.
    context = StaticInferenceContext(rows, tokens if cp == 1 else tokens + tokens % 2)
    if cp > 1:
        others = {
            type(module).__name__
            for module in model.modules()
            if isinstance(module, Attention)
            and not isinstance(getattr(module, "core_attention", None), TorchAttention)
        }
        if others:
            raise NotImplementedError(
                f"{', '.join(sorted(others))} cannot run whole sequences in a model built with "
                f"context_parallel_size={cp}. Load the checkpoint into a model without context "
                f"parallelism, or use the local attention spec."
            )
        vars(context)["whole_on_every_rank"] = True
    return context


def next_logits(model: nn.Module, tokens: Tensor, context: StaticInferenceContext) -> Tensor:
    """Run the next tokens ``[B, s]`` through the model; their logits ``[B, s, V]``.

    In Megatron's ``InferenceMode`` the context's config may ask for the last token's only.
    """
    start = context.sequence_len_offset
    positions = torch.arange(start, start + tokens.shape[1], device=tokens.device)
    logits = model(
        tokens, positions.expand_as(tokens), None,
        inference_context=context, runtime_gather_output=True,
    )  # fmt: skip
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
    """Continue prompts of equal length; every rank of the model takes part.

    Args:
        model: a HybridModel or GPTModel, wrapped or not, not pipelined. It generates in evaluation
            mode, without sequence parallelism, which cannot cut a single token, and without FP8,
            which takes no less than 16.
        prompt: int64 ``[B, S]``, S from 1, the same on every rank.
        count: how many tokens to append.
        pick: from float32 logits ``[B, V]`` to tokens ``[B]``; must be the same on every rank.
        stop: end when every row has had this token after its prompt.
        chunk: prefill so many tokens at a time, to bound memory; None: the prompt at once.

    Returns:
        int64 ``[B, S + count]``, or fewer columns after ``stop``.

    Raises:
        ValueError: a prompt that is empty or not ``[B, S]``.
        NotImplementedError: see :func:`static_context`.
    """
    if prompt.dim() != 2 or 0 in prompt.shape:
        raise ValueError(
            f"prompt must be tokens [B, S] with at least one of each, got {tuple(prompt.shape)}."
        )
    context = static_context(model, prompt.shape[0], prompt.shape[1] + count)
    tokens, ended = prompt, torch.zeros(len(prompt), dtype=torch.bool, device=prompt.device)
    active = nullcontext() if InferenceMode.is_active() else InferenceMode.active()
    with torch.inference_mode(), evaluating(model), active:
        fed = 0
        for _ in range(count):
            for piece in tokens[:, fed:].split(chunk or tokens.shape[1], dim=1):
                logits = next_logits(model, piece, context)[:, -1]
            fed = tokens.shape[1]
            picked = pick(logits.float())
            tokens = torch.cat([tokens, picked[:, None]], dim=1)
            if stop is not None:
                ended |= picked == stop
                if bool(ended.all()):
                    break
    return tokens.clone()


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode without sequence parallelism and FP8; all are as before afterwards."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with single_tokens(model):
            yield
    finally:
        for module in training:
            module.training = True


@contextmanager
def single_tokens(model: nn.Module) -> Iterator[None]:
    """Inside, every tensor-parallel rank runs whole sequences, in the dtype of the weights."""
    things: list[Any] = list(model.modules())
    things += {id(m.config): m.config for m in things if hasattr(m, "config")}.values()
    before: list[tuple[Any, str, Any]] = []
    for thing in things:
        table = _OFF_IN_MODULES if isinstance(thing, nn.Module) else _OFF_IN_CONFIGS
        for name, off in table.items():
            if value := getattr(thing, name, None):
                before.append((thing, name, value))
                setattr(thing, name, off)
    try:
        yield
    finally:
        for thing, name, value in before:
            setattr(thing, name, value)
