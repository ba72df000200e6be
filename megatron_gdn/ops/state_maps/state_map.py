"""The affine map of a recurrent state that a stretch of tokens makes, and steps along such maps.

Legend: N stretches or chains, H heads, K rows of a state, V columns, L steps of the longest chain.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import NamedTuple

import torch
from torch import Tensor

from ..host_tables import to_device


class StateShape(NamedTuple):
    """The states that one rank's heads carry: ``[heads, rows, columns]`` per sequence.

    ``diagonal``: a token multiplies each row of a state by a factor and does not mix rows.
    """

    heads: int
    rows: int
    columns: int
    diagonal: bool = False

    @property
    def map_columns(self) -> int:
        """Columns of ``local`` and ``through`` side by side."""
        return self.columns + (1 if self.diagonal else self.rows)

    @property
    def map_bytes(self) -> int:
        """Bytes of one fp32 :class:`StateMap` of all heads."""
        return self.heads * self.rows * self.map_columns * 4


class StateMap(NamedTuple):
    """``S_out = through S_in + local``, one map for each stretch and head.

    The delta rule mixes the rows of a state, so its ``through`` is a matrix. For a rule that only
    decays rows, ``through`` has one column, the factor of each row.
    """

    local: Tensor  # [N, H, K, V] fp32, S_out for S_in = 0
    through: Tensor  # [N, H, K, K] or [N, H, K, 1] fp32

    @property
    def is_diagonal(self) -> bool:
        return self.through.shape[-1] == 1

    def apply(self, state: Tensor) -> Tensor:
        """S_out, ``[N, H, K, V]``, from S_in ``state``."""
        carried = self.through * state if self.is_diagonal else self.through @ state
        return carried + self.local

    def then(self, later: StateMap) -> StateMap:
        """This map followed by ``later``."""
        if self.is_diagonal:
            return StateMap(later.apply(self.local), later.through * self.through)
        return StateMap(later.apply(self.local), later.through @ self.through)

    def transposed(self, d_local: Tensor) -> StateMap:
        """The map of gradients, ``dS_in = through^T dS_out + d_local``."""
        return StateMap(d_local, self.through if self.is_diagonal else self.through.mT)


NONE = -1


@dataclass(frozen=True, eq=False)
class Steps:
    """The maps that chains apply, and the places of the states between them.

    A step is ``(target, map)``: write the state to ``target``, then apply ``map``; NONE skips the
    write or the map. Every chain has a step.
    """

    chains: tuple[tuple[tuple[int, int], ...], ...]
    table: Tensor  # int32 [N, L, 2], the same on the device, padded with NONE

    @classmethod
    def build(cls, chains: Sequence[Sequence[tuple[int, int]]], device: torch.device) -> Steps:
        rows = list(zip(*zip_longest(*chains, fillvalue=(NONE, NONE)), strict=True))
        table = torch.tensor(rows, dtype=torch.int32, device="cpu")
        return cls(tuple(tuple(chain) for chain in chains), to_device(table, device))


class Cuts(NamedTuple):
    """The steps of a chain whose maps let no state through: ``local`` alone leaves them.

    Their ``through`` is never used, since 0 * NaN would carry NaN from one document to another.
    """

    flags: Tensor  # int32 [L] on the device
    known: tuple[bool, ...] | None  # the same; None if only the device knows it

    def at(self, step: int) -> bool | Tensor:
        return self.flags[step] > 0 if self.known is None else self.known[step]
