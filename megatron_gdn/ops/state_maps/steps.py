"""The steps of chains of state maps, as a table on the device.

Legend: N chains, L steps of the longest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

import torch
from torch import Tensor

from ..host_tables import to_device

NONE = -1


@dataclass(frozen=True, eq=False)
class Steps:
    """The maps that chains apply, and the places of the states between them.

    Attributes:
        chains: of every chain its steps ``(target, map)``: write the state to ``target``, then
            apply ``map``; NONE skips the write or the map. Every chain has a step.
        table: int32 ``[N, L, 2]``, the same on the device, padded with NONE.
    """

    chains: tuple[tuple[tuple[int, int], ...], ...]
    table: Tensor

    @classmethod
    def build(cls, chains: Sequence[Sequence[tuple[int, int]]], device: torch.device) -> Steps:
        rows = list(zip(*zip_longest(*chains, fillvalue=(NONE, NONE)), strict=True))
        table = torch.tensor(rows, dtype=torch.int32, device="cpu")
        return cls(tuple(tuple(chain) for chain in chains), to_device(table, device))
