"""Does one packed document reach another? Works on any module or model, patched or not."""

from __future__ import annotations

import logging
from collections.abc import Sequence
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
    """How much N packed documents change each other's outputs."""

    change: Tensor  # fp32 [N, N]: the largest change of document j's output when i is replaced
    largest: Tensor  # fp32 [N]: the largest output of each document

    def leaks(self, tolerance: float) -> list[Leak]:
        bound = tolerance * self.largest.max().item()
        documents = range(len(self.largest))
        return [
            Leak(origin, into, self.change[origin, into].item(), self.largest[into].item())
            for origin in documents
            for into in documents
            if origin != into and not self.change[origin, into].item() <= bound  # NaN leaks too
        ]


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
    parameter = next(module.parameters())
    generator = torch.Generator("cpu").manual_seed(seed)
    told = {**_told(source, lengths, parameter.device), **kwargs}
    if hasattr(module, "get_input_embeddings"):
        told.setdefault("use_cache", False)
    spans = torch.tensor(lengths, device="cpu").cumsum(0)
    spans = [(end - length, end) for length, end in zip(lengths, spans.tolist(), strict=True)]
    first, other = (_drawn(module, sum(lengths), generator).to(parameter.device) for _ in range(2))
    training = module.training
    module.eval()
    try:
        with torch.no_grad():
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


def packing_leaks(
    module: nn.Module,
    lengths: Sequence[int] = (5, 7, 4),
    *,
    tolerance: float = 1e-5,
    **kwargs: Any,
) -> list[Leak]:
    """Pairs of documents of which one reaches the other; see :func:`assert_no_packing_leak`."""
    return packing_reach(module, lengths, **kwargs).leaks(tolerance)


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
    found = reach.leaks(tolerance)
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


def _told(source: str, lengths: Sequence[int], device: torch.device) -> dict[str, Any]:
    length_N = torch.tensor(lengths, device="cpu")
    if source == "position_ids":
        positions = torch.cat([torch.arange(length, device="cpu") for length in lengths])
        return {"position_ids": positions[None].to(device)}
    if source != "cu_seq_lens_q":
        ids = torch.arange(1, len(lengths) + 1, device="cpu").repeat_interleave(length_N)
        name = "attention_mask" if source == "indexed_mask" else "_packed_seq_ids"
        return {name: ids[None].to(device)}
    offsets = torch.tensor([0, *lengths], device="cpu").cumsum(0).to(device, torch.int32)
    longest = max(lengths)
    return {
        "cu_seq_lens_q": offsets, "cu_seq_lens_k": offsets,
        "max_length_q": longest, "max_length_k": longest,
    }  # fmt: skip


def _drawn(module: Any, tokens: int, generator: torch.Generator) -> Tensor:
    """Random token ids for a model, or hidden states for a layer."""
    if hasattr(module, "get_input_embeddings"):
        vocabulary = module.get_input_embeddings().weight.shape[0]
        return torch.randint(vocabulary, (1, tokens), generator=generator, device="cpu")
    width = getattr(module, "hidden_size", None)
    if width is None:
        raise ValueError(
            f"{type(module).__name__} has no hidden_size, so hidden states cannot be drawn for it; "
            f"give a transformers model or linear-attention module."
        )
    hidden = torch.randn(1, tokens, width, generator=generator, device="cpu")
    return hidden.to(next(module.parameters()).dtype)


def _output(returned: Any) -> Tensor:
    for name in ("logits", "last_hidden_state"):
        if getattr(returned, name, None) is not None:
            return getattr(returned, name).float()
    return (returned[0] if isinstance(returned, tuple) else returned).float()
