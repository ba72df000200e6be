"""Packs one document with others in several orders and compares that document's
results."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from .repeats import Difference, difference_of


def arrangements(others: int) -> dict[str, list[int]]:
    """The orders of document 0, which is watched, and documents 1 .. ``others``.

    All but the first hold the same documents, so their buffers have the same size.
    """
    rest = list(range(1, others + 1))
    return {
        "alone": [0],
        "first": [0, *rest],
        "last": [*rest, 0],
        "in the middle": [*rest[: others // 2], 0, *rest[others // 2 :]],
        "first, the others reversed": [0, *rest[::-1]],
    }


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
        documents: their rows, ``[t, ...]`` each.
        d_documents: gradients of their outputs, likewise.

    Returns:
        What differed, in which arrangement. In a buffer of another size the projections
        around the rule are matrix products of another shape, for which the library may
        take another kernel. So a layer may differ between "alone" and the other
        arrangements although the mixer without the projections does not.
    """
    found: list[Difference] = []
    expected: dict[str, Tensor] = {}
    for arrangement, order in arrangements(len(documents) - 1).items():
        offsets = [0, *accumulate(len(documents[n]) for n in order)]
        x = torch.cat([documents[n] for n in order])
        d_out = torch.cat([d_documents[n] for n in order])
        place = order.index(0)
        for name, value in run(x, offsets, d_out).items():
            mine = value[offsets[place] : offsets[place + 1]]
            if arrangement == "alone":
                expected[name] = mine.detach().clone()
                continue
            difference = difference_of(name, arrangement, expected[name], mine)
            if difference is not None:
                found.append(difference)
    return found
