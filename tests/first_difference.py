"""The first module of a model whose outputs have other bits in one of two runs."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from megatron_gdn.inference.generate import evaluating, next_logits, static_context
from megatron_gdn.mixers.generation import GeneratingMixer
from megatron_gdn.testing import RowByRow


def outputs_of(model: nn.Module, calls: Sequence[tuple[int, Callable[[], Any]]]):
    """The outputs ``[T, ...]`` of every module, as they end; a call has ``calls`` tokens."""
    found: dict[str, list[Tensor]] = defaultdict(list)
    # Hooks on other modules inside a mixer would change how the mixer calls these.
    inside = [m.named_children() for m in model.modules() if isinstance(m, GeneratingMixer)]
    left_out = {id(m) for children in inside for name, m in children if "proj" not in name}
    tokens = 0

    def keep(name: str) -> Callable[..., None]:
        def hook(module, args, out) -> None:
            out = out[0] if isinstance(out, tuple) else out
            if isinstance(out, Tensor) and tokens in out.shape:
                found[name].append(out.clone().movedim(out.shape.index(tokens), 0))

        return hook

    named = [(n, m) for n, m in model.named_modules() if n and id(m) not in left_out]
    hooks = [module.register_forward_hook(keep(name)) for name, module in named]
    try:
        for tokens, call in calls:  # noqa: B007 - the hooks read it
            call()
    finally:
        for hook in hooks:
            hook.remove()
    return {name: torch.cat(pieces) for name, pieces in found.items()}


def first_difference(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> str | None:
    """None if all outputs that both runs have are equal to the bit."""
    for name, x in ours.items():
        y = theirs.get(name)
        if y is None or y.shape != x.shape or torch.equal(x, y):
            continue
        tokens = (x != y).flatten(1).any(1).nonzero()[:, 0].tolist()
        gap = (x.double() - y.double()).abs().max().item()
        return (
            f"{name} {tuple(x.shape)} differs first, at {len(tokens)} tokens from {tokens[0]} on, "
            f"by at most {gap:.3g} of {x.abs().max().item():.3g}"
        )
    return None


@torch.no_grad()
def where_generation_differs(model, text, prompt, at_once):
    """Between the two runs that ``check_generation`` compares; text ``[B, S]``."""
    positions = torch.arange(text.shape[1], device=text.device).expand_as(text)
    context = static_context(model, *text.shape)
    pieces = [text[:, :prompt], *text[:, prompt:].split(at_once, 1)]
    by_row = RowByRow() if model.config.batch_invariant_mode and not text.is_cuda else nullcontext()
    with evaluating(model), by_row:
        trained = [(text.shape[1], lambda: model(text, positions, None))]
        generated = [(x.shape[1], partial(next_logits, model, x, context)) for x in pieces]
        return first_difference(outputs_of(model, trained), outputs_of(model, generated))
