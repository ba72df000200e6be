"""Measures whether generation gives tokens the same probabilities as the training
forward.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch._C import DispatchKey
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["GenerationGap", "check_generation"]

_aten = torch.ops.aten
# Functions whose result for a row depends only on this row of the first argument. Even
# these must run on single rows: a CPU rounds the last elements of a buffer differently.
_ROWWISE_FUNCTIONS = {
    _aten.silu.default,
    _aten.sigmoid.default,
    _aten.exp.default,
    _aten.cos.default,
    _aten.sin.default,
    _aten.gelu.default,
    _aten.tanh.default,
    _aten.softplus.default,
    _aten._softmax.default,
    _aten._log_softmax.default,
}


class RowByRow(TorchDispatchMode):
    """A mode of torch in which linear layers and elementwise functions compute one row
    at a time, on a CPU.

    A CPU library chooses its kernel by the number of rows, and another kernel would
    give other bits. On a GPU use Megatron's batch-invariant kernels instead of this
    mode.
    """

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        """torch calls this method for each operator ``function``; the result is that of
        the operator, computed row by row if rows are independent."""
        kwargs = kwargs or {}
        if function is _aten.mm.default:
            return _call_on_each_row(lambda row: function(row, args[1]), args[0])
        if function is _aten.addmm.default and args[0].dim() == 1:
            return _call_on_each_row(
                lambda row: function(args[0], row, args[2], **kwargs), args[1]
            )
        rows_are_independent = function in _ROWWISE_FUNCTIONS and args[0].dim() > 1
        if rows_are_independent and "softmax" in str(function):
            # args[1] is the dimension of the sum
            rows_are_independent = args[1] in (-1, args[0].dim() - 1)
            if rows_are_independent:
                args = args[0], -1, *args[2:]  # a row has fewer dimensions
        if rows_are_independent:
            flat = args[0].reshape(-1, args[0].shape[-1])
            result = _call_on_each_row(
                lambda row: function(row, *args[1:], **kwargs), flat
            )
            return result.view(*args[0].shape)
        if not _is_composite(function):
            return function(*args, **kwargs)
        with self:  # in inference mode torch has not decomposed ``function`` yet
            return function.decompose(*args, **kwargs)


@cache
def _is_composite(function) -> bool:
    """Whether torch computes ``function`` by calls of other functions."""
    return function.has_kernel_for_dispatch_key(DispatchKey.CompositeImplicitAutograd)


def _call_on_each_row(function, x: Tensor) -> Tensor:
    """Call ``function`` on each row ``[1, ...]`` of ``x`` by itself, and join the
    results."""
    return torch.cat([function(row.contiguous()) for row in x.split(1)])


class GenerationGap(NamedTuple):
    """Differences between generation and the training forward, over the tokens after
    the prompt.

    Attributes:
        max_log_prob, mean_log_prob: largest and mean absolute error of a token's
            log-probability.
        mean_kl, max_kl: mean, largest KL(training || generation) over the vocabulary,
            in nats.
        equal: whether all log-probabilities of all tokens of the vocabulary have the
            same bits.
        backend: the rule of the model's first recurrent layer.
    """

    max_log_prob: float
    mean_log_prob: float
    mean_kl: float
    max_kl: float
    equal: bool
    backend: str | None


@torch.no_grad()
def check_generation(
    model: nn.Module, tokens: Tensor, *, prompt: int = 1, at_once: int = 1
) -> GenerationGap:
    """Compare a text's log-probabilities in the training forward and in prefill and
    decode.

    In ``batch_invariant_mode`` the training forward and generation should give equal
    bits.

    Args:
        model: a HybridModel or GPTModel, wrapped or not, without context parallelism or
            pipeline stages. The model runs in evaluation mode and without sequence
            parallelism.
        tokens: int64 ``[B, S]`` with S > ``prompt``, the same on every rank.
        prompt: the number of tokens of the prefill.
        at_once: the number of tokens of each decode step after the prefill.

    Raises:
        ValueError: no token is left after the prompt.
        NotImplementedError: the model has context parallelism.
    """
    from ..inference.generate import (
        evaluating,
        next_logits,
        static_context,
        unwrap_model,
    )
    from ..mixers.base import RecurrentMixer

    B, S = tokens.shape
    if not 0 < prompt < S or at_once < 1:
        raise ValueError(
            f"prompt={prompt} and at_once={at_once} of {S} tokens leave nothing to "
            f"compare; set prompt to 1 .. {S - 1} and at_once to at least 1."
        )
    config = unwrap_model([model])[0].config
    if config.context_parallel_size > 1:
        raise NotImplementedError(
            "compare generation in a model with context_parallel_size=1."
        )
    by_row = config.batch_invariant_mode and not tokens.is_cuda
    with evaluating(model), RowByRow() if by_row else nullcontext():
        positions = torch.arange(S, device=tokens.device).expand(B, S)
        logits = model(tokens, positions, None, runtime_gather_output=True)
        context = static_context(model, B, S)
        # the tokens of the prefill, then those of each decode step
        steps = [tokens[:, :prompt]]
        steps.extend(tokens[:, prompt:].split(at_once, dim=1))
        generated_logits = torch.cat(
            [next_logits(model, step_tokens, context) for step_tokens in steps], 1
        )
        # log-probabilities of the whole vocabulary
        generated = generated_logits.float().log_softmax(-1)
        trained = logits.float().log_softmax(-1)
    # from the prompt's last token on, which predicts the first token after the prompt
    generated = generated[:, prompt - 1 :]
    trained = trained[:, prompt - 1 :]
    # the tokens after the prompt; the last position predicts a token that is not given
    text = tokens[:, prompt:, None]
    gap = (generated[:, :-1].gather(2, text) - trained[:, :-1].gather(2, text)).abs()
    kl = (trained.exp() * (trained - generated)).sum(-1)
    backend = None
    for module in model.modules():
        if isinstance(module, RecurrentMixer):
            backend = module.backend
            break
    return GenerationGap(
        max_log_prob=gap.max().item(),
        mean_log_prob=gap.mean().item(),
        mean_kl=kl.mean().item(),
        max_kl=kl.max().item(),
        equal=torch.equal(generated, trained),
        backend=backend,
    )
