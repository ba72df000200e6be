"""Which heads of a request a saved file holds, and how files of other ranks become this rank's.

Tensor-parallel ranks hold equal shares of every section of a history and of the heads of a state.
A file says for each tensor which stretches of the whole it holds, so that requests can be loaded
where the model runs on another number of ranks.

Legend: C conv channels, W conv taps, H heads with a state, K rows of a state, V columns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .carry import Carry, CarryShape

# First index, last index + 1, size of the whole.
Stretch = tuple[int, int, int]


def stretches(shape: CarryShape) -> tuple[list[Stretch], list[Stretch]]:
    """The stretches of the history's channels, one a section, and of the state's heads."""
    rank, ranks = shape.rank, shape.ranks

    def of(width: int) -> Stretch:
        return rank * width, (rank + 1) * width, ranks * width

    return [of(width) for width in shape.sections or (shape.channels,)], [of(shape.heads)]


def carry_of(files: Sequence[Mapping[str, Any]], layer: Any, shape: CarryShape) -> Carry:
    """One layer's carry ``[C, W - 1]``, ``[H, K, V]`` of this rank, out of saved files.

    Args:
        files: of one request, as :meth:`.requests.RequestPool.save` gave them on some or all ranks.

    Raises:
        ValueError: heads that this rank needs are in none of them, or their model has other sizes.
    """
    made = []
    for tensor, wanted in enumerate(stretches(shape)):
        sections, dim = [], int(shape.rows_first and tensor == 0)
        for number, stretch in enumerate(wanted):
            pieces = [_piece(file, layer, tensor, number, len(wanted), dim) for file in files]
            sections.append(_join(pieces, stretch, dim, f"layer {layer!r}"))
        made.append(torch.cat(sections, dim))
    return Carry(*made)


def _piece(
    file: Mapping[str, Any], layer: Any, tensor: int, number: int, sections: int, dim: int
) -> tuple[Stretch, Tensor]:
    held = file["heads"][layer][tensor]
    if len(held) != sections:
        raise ValueError(
            f"layer {layer!r} was saved with {len(held)} sections of channels, this one has "
            f"{sections}; load it where the same model runs."
        )
    widths, stored = [end - begin for begin, end, _ in held], file["layers"][layer][tensor]
    if stored.shape[dim] != sum(widths):
        raise ValueError(
            f"layer {layer!r} was saved as {tuple(stored.shape)}, without {sum(widths)} columns in "
            f"dimension {dim}: by an earlier version, or by another layer. Run the prompt again."
        )
    return held[number], stored.split(widths, dim)[number]


def _join(pieces: list[tuple[Stretch, Tensor]], wanted: Stretch, dim: int, what: str) -> Tensor:
    at, end, total = wanted
    found = []
    for (first, last, of), tensor in sorted(pieces, key=lambda piece: piece[0]):
        if of != total:
            raise ValueError(
                f"{what} was saved of {of} channels or heads in a section, and this model has "
                f"{total}; load it where the same model runs."
            )
        if first <= at < last:
            stop = min(last, end)
            found.append(tensor.narrow(dim, at - first, stop - at))
            at = stop
    if at < end:
        raise ValueError(
            f"{what} needs {wanted[0]} to {end - 1} of the {total} channels or heads of a section, "
            f"and the saved hold none from {at} on; give what every tensor-parallel rank saved, as "
            f"a list."
        )
    return torch.cat(found, dim)
