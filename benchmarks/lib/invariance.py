"""Packs one document with others in several orders and compares that document's
results."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .repeats import Difference, difference_of


class Arrangement(NamedTuple):
    """Documents packed into one buffer.

    Attributes:
        name: "alone", "first", "last", ...
        order: which documents follow one another; 0 is the one that is watched.
    """

    name: str
    order: tuple[int, ...]


def arrangements(others: int) -> list[Arrangement]:
    """Document 0 alone, before, after and amid documents 1 .. ``others``.

    All but the first hold the same documents, so their buffers have the same size.
    """
    rest = tuple(range(1, others + 1))
    middle = (*rest[: others // 2], 0, *rest[others // 2 :])
    found = [
        Arrangement("alone", (0,)),
        Arrangement("first", (0, *rest)),
        Arrangement("last", (*rest, 0)),
        Arrangement("in the middle", middle),
        Arrangement("first, the others reversed", (0, *rest[::-1])),
    ]
    return [
        one
        for i, one in enumerate(found)
        if one.order not in [f.order for f in found[:i]]
    ]


def check_batch_invariance(
    run: Callable[[Tensor, list[int], Tensor], Mapping[str, Tensor]],
    documents: Sequence[Tensor],
    d_documents: Sequence[Tensor],
) -> list[Difference]:
    """Whether document 0 has the same bits at every place and beside any neighbours.

    Args:
        run: ``run(x, offsets, d_out)`` over a packed buffer ``x`` ``[T, ...]`` with
            documents between the offsets; returns tensors by name whose dimension 0 is
            the buffer's: the output, the gradient of ``x``.
        documents: their rows, ``[t, ...]`` each; the first is the one that is watched.
        d_documents: gradients of their outputs, likewise.

    Returns:
        What differed, in which arrangement; an empty list when nothing did. In a buffer
        of another size the projections around the rule are matrix products of another
        shape, for which the library may take another kernel. So a layer may differ
        between "alone" and the other arrangements although the mixer without the
        projections does not.
    """
    places = arrangements(len(documents) - 1)
    found: list[Difference] = []
    expected: dict[str, Tensor] = {}
    for arrangement in places:
        lengths = [len(documents[n]) for n in arrangement.order]
        offsets = [0, *torch.tensor(lengths, device="cpu").cumsum(0).tolist()]
        results = run(
            torch.cat([documents[n] for n in arrangement.order]),
            offsets,
            torch.cat([d_documents[n] for n in arrangement.order]),
        )
        place = arrangement.order.index(0)
        mine = slice(offsets[place], offsets[place + 1])
        for name, value in results.items():
            if name not in expected:
                expected[name] = value[mine].detach().clone()
                continue
            difference = difference_of(
                name, arrangement.name, expected[name], value[mine]
            )
            if difference is not None:
                found.append(difference)
    return found
