"""Does one packed document reach another? Works on any module or model, patched or not.

Every document is changed in turn. Any change in the output of another document is a leak.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

logger = logging.getLogger(__name__)

SOURCES = ("position_ids", "cu_seq_lens_q", "packed_seq_ids", "indexed_mask")


class Leak(NamedTuple):
    """Document ``origin`` reached document ``into``."""

    origin: int
    into: int
    change: float  # largest change of the output at ``into``
    of: float  # largest output at ``into``


class PackingLeak(AssertionError):
    """What :func:`assert_no_packing_leak` raises; ``leaks`` lists the pairs of documents."""

    def __init__(self, message: str, leaks: list[Leak]) -> None:
        super().__init__(message)
        self.leaks = leaks


class Reach(NamedTuple):
    """How much N packed documents change each other's outputs.

    Attributes:
        change: fp32 ``[N, N]``; ``[i, j]`` is the largest change of document j's output when
            document i is replaced.
        largest: fp32 ``[N]``, the largest output of each document.
    """

    change: Tensor
    largest: Tensor


def packing_reach(
    module: nn.Module,
    lengths: Sequence[int] = (5, 7, 4),
    *,
    source: str = "position_ids",
    seed: int = 0,
    **kwargs: Any,
) -> Reach:
    """How much each packed document changes each output; see :func:`assert_no_packing_leak`."""
    if len(lengths) < 2 or min(lengths) < 1:
        raise ValueError(
            f"lengths={tuple(lengths)} must name two documents or more, of a token or more each."
        )
    if source not in SOURCES:
        raise ValueError(f"source={source!r} is not known; use one of {', '.join(SOURCES)}.")
    takes_ids = hasattr(module, "get_input_embeddings")
    parameter = next(module.parameters())
    generator = torch.Generator("cpu").manual_seed(seed)
    draw = _draw_tokens(module) if takes_ids else _draw_hidden(module, parameter.dtype)
    told = {**_told(source, lengths, parameter.device), **kwargs}
    if takes_ids:
        told.setdefault("use_cache", False)
    training = module.training
    module.eval()
    spans = _spans(lengths)
    try:
        with torch.no_grad():
            first = draw(sum(lengths), generator).to(parameter.device)
            other = draw(sum(lengths), generator).to(parameter.device)
            reference = _output(module(first, **told))
            change = torch.empty(len(spans), len(spans), device="cpu")
            for origin, (start, end) in enumerate(spans):
                changed = first.clone()
                changed[:, start:end] = other[:, start:end]
                difference = (_output(module(changed, **told)) - reference).abs()
                for into, (a, b) in enumerate(spans):
                    change[origin, into] = difference[:, a:b].max()
    finally:
        module.train(training)
    return Reach(change, torch.stack([reference[:, a:b].abs().max() for a, b in spans]).cpu())


def _found(reach: Reach, tolerance: float) -> list[Leak]:
    change, largest = reach
    bound = tolerance * largest.max().item()
    return [
        Leak(origin, into, change[origin, into].item(), largest[into].item())
        for origin in range(len(largest))
        for into in range(len(largest))
        if origin != into and not change[origin, into].item() <= bound  # NaN leaks too
    ]


def packing_leaks(
    module: nn.Module,
    lengths: Sequence[int] = (5, 7, 4),
    *,
    tolerance: float = 1e-5,
    **kwargs: Any,
) -> list[Leak]:
    """Pairs of documents of which one reaches the other; see :func:`assert_no_packing_leak`."""
    return _found(packing_reach(module, lengths, **kwargs), tolerance)


def assert_no_packing_leak(
    module: nn.Module,
    lengths: Sequence[int] = (5, 7, 4),
    *,
    source: str = "position_ids",
    tolerance: float = 1e-5,
    seed: int = 0,
    **kwargs: Any,
) -> str:
    """Raise if a packed document changes the output at another one.

    Lays documents of random tokens (or hidden states) in one row, replaces each by another of its
    length, and looks at the outputs of the rest. It needs no knowledge of the module, so it finds
    the leak of an unpatched transformers model as well.

    Args:
        module: a model with ``get_input_embeddings`` and logits or ``last_hidden_state``, or a
            layer from hidden states ``[1, S, H]`` to the same.
        lengths: of the documents.
        source: how the module is given them: ``"position_ids"``, ``"cu_seq_lens_q"`` (flash
            attention's keywords, which transformers refuses without its kernels),
            ``"packed_seq_ids"`` or ``"indexed_mask"``.
        tolerance: changes up to this fraction of the largest output are not leaks. 0 asks for
            equal bits; the rounding of experts may depend on tokens that are computed together.
        seed: of the random documents.
        kwargs: what else the module is called with.

    Returns:
        what was found, in one line, which is logged too.

    Raises:
        PackingLeak: says which document reached which, and by how much.
        ValueError: fewer than two documents, an unknown source.
    """
    reach = packing_reach(module, lengths, source=source, seed=seed, **kwargs)
    found = _found(reach, tolerance)
    if not found:
        others = reach.change.clone().fill_diagonal_(0)
        line = (
            f"{type(module).__name__}: no packed document of {tuple(lengths)} tokens, told by "
            f"{source}, reaches another (largest change {others.max().item():.1e}, largest output "
            f"{reach.largest.max().item():.1e})"
        )
        logger.info(line)
        return line
    lines = [
        f"  document {leak.origin} changes document {leak.into} by {leak.change:.3e} "
        f"(its largest output is {leak.of:.3e})"
        for leak in found
    ]
    raise PackingLeak(
        f"packed documents of {tuple(lengths)} tokens reach each other in "
        f"{type(module).__name__}:\n" + "\n".join(lines), found,
    )  # fmt: skip


def _spans(lengths: Sequence[int]) -> list[tuple[int, int]]:
    ends = torch.tensor(lengths, device="cpu").cumsum(0).tolist()
    return list(zip([0, *ends], ends, strict=False))


def _told(source: str, lengths: Sequence[int], device: torch.device) -> dict[str, Any]:
    length_N = torch.tensor(lengths, device="cpu")
    ids = length_N.gt(0).cumsum(0).repeat_interleave(length_N)[None].to(device)
    if source == "packed_seq_ids":
        return {"_packed_seq_ids": ids}
    if source == "indexed_mask":
        return {"attention_mask": ids}
    if source == "position_ids":
        positions = torch.cat([torch.arange(length, device="cpu") for length in lengths])
        return {"position_ids": positions[None].to(device)}
    offsets = torch.tensor([0, *lengths], device="cpu").cumsum(0).to(device, torch.int32)
    longest = max(lengths)
    return {
        "cu_seq_lens_q": offsets, "cu_seq_lens_k": offsets,
        "max_length_q": longest, "max_length_k": longest,
    }  # fmt: skip


Draw = Callable[[int, torch.Generator], Tensor]


def _draw_tokens(model: Any) -> Draw:
    vocabulary = model.get_input_embeddings().weight.shape[0]
    return lambda tokens, generator: torch.randint(
        vocabulary, (1, tokens), generator=generator, device="cpu"
    )


def _draw_hidden(layer: nn.Module, dtype: torch.dtype) -> Draw:
    width = getattr(layer, "hidden_size", None)
    if width is None:
        raise ValueError(
            f"{type(layer).__name__} has no hidden_size, so hidden states cannot be drawn for it; "
            f"give a transformers model or linear-attention module."
        )
    return lambda tokens, generator: torch.randn(
        1, tokens, width, generator=generator, device="cpu"
    ).to(dtype)


def _output(returned: Any) -> Tensor:
    for name in ("logits", "last_hidden_state"):
        if getattr(returned, name, None) is not None:
            return getattr(returned, name).float()
    return (returned[0] if isinstance(returned, tuple) else returned).float()
