"""The history and state that a sequence passes from one call of a recurrent mixer to the next.

Legend: N sequences, C convolved columns of a projection row, P all columns, W conv taps, H heads
with a state, K rows of a state, V columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..layout import Layout
from ..rules.chunk_table import CHUNK
from ..state_maps.state_map import StateShape


class Carry(NamedTuple):
    """History and states of N sequences; both zero before the first token.

    The history holds the last inputs of the convolution, oldest first, in the projection's dtype;
    for an aligned mixer (:mod:`.aligned`) whole projection rows, ``[N, W - 1 + 64, P]``, of which
    those after the last token may hold any finite numbers.
    """

    history: Tensor  # [N, C, W - 1]
    state: Tensor  # [N, H, K, V], fp32 (fp64 for fp64 rows)


class CarryShape(NamedTuple):
    """Sizes of one sequence's :class:`Carry` in one layer, on one tensor-parallel rank."""

    channels: int
    past: int  # rows of history
    heads: int
    rows: int
    columns: int
    rows_first: bool = False  # of an aligned mixer's history

    @classmethod
    def of(cls, layout: Layout, state: StateShape, taps: int, aligned: bool = False) -> CarryShape:
        """For a mixer with this rank's projection ``layout``, states and conv ``taps``."""
        channels = layout.width if aligned else layout.conv_width
        past = taps - 1 + (CHUNK if aligned else 0)
        return cls(channels, past, *state[:3], aligned)

    @property
    def history(self) -> tuple[int, int]:
        return self.window(self.past)

    def window(self, rows: int) -> tuple[int, int]:
        """The shape of so many rows, laid as in a history."""
        return (rows, self.channels) if self.rows_first else (self.channels, rows)

    @property
    def state(self) -> tuple[int, int, int]:
        return self.heads, self.rows, self.columns

    def zeros(self, sequences: int, dtype: torch.dtype, device: torch.device) -> Carry:
        """A carry of N sequences without a token yet; ``dtype`` is the projection's."""
        wide = torch.promote_types(dtype, torch.float32)
        return Carry(
            torch.zeros(sequences, *self.history, dtype=dtype, device=device),
            torch.zeros(sequences, *self.state, dtype=wide, device=device),
        )

    def check(self, carry: Carry, sequences: int, dtype: torch.dtype) -> None:
        """Refuse a carry of other sizes or dtypes.

        Raises:
            ValueError: shape or dtype; the message has both.
        """
        wide = torch.promote_types(dtype, torch.float32)
        wanted = {"history": (self.history, dtype), "state": (self.state, wide)}
        for name, (shape, of_dtype) in wanted.items():
            tensor = getattr(carry, name)
            if tuple(tensor.shape) != (sequences, *shape) or tensor.dtype != of_dtype:
                raise ValueError(
                    f"{name} must be {(sequences, *shape)} in {of_dtype} for {sequences} sequences "
                    f"of {dtype} rows, got {tuple(tensor.shape)} in {tensor.dtype}."
                )


def choose(before: Carry, after: Sequence[Carry], accepted: Tensor) -> Carry:
    """Roll every sequence back to its last accepted token.

    Args:
        before: the carry before the tokens.
        after: the carry after each of the s tokens.
        accepted: int64 ``[N]``, on the carries' device: how many tokens of each sequence stay, 0 to
            s. The host does not read it.
    """
    number = torch.arange(accepted.shape[0], device=accepted.device)
    return Carry(
        *(torch.stack(stage)[accepted, number] for stage in zip(before, *after, strict=True))
    )
