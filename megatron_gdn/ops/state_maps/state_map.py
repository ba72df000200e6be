"""The affine map that successive tokens apply to a recurrent state, and chains of such
maps.

    S_after = through @ S_before + local

A chain has the maps of a sequence's segments (:mod:`.segments`), or of its pieces on
different ranks. On a GPU one launch applies the maps of all chains
(:mod:`.chains_kernels`).

Legend: N stretches or chains, H heads, K rows of a state, V columns, L steps of the
longest chain, P maps, Q states that a call writes, X columns of the state to which a
chain is applied.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..host_tables import to_device
from ..switches import full_fp32_matmul

# the most rows of a state that the kernel takes; one program loads all rows
MOST_STATE_ROWS = 128
NO_INDEX = -1  # in a step of a chain: write no state, or apply no map


class StateShape(NamedTuple):
    """The states of one rank's heads: ``[heads, rows, columns]`` for each sequence."""

    heads: int
    rows: int
    columns: int
    # whether a token only multiplies each row of a state by a factor, and mixes no rows
    diagonal: bool = False

    @property
    def map_columns(self) -> int:
        """The number of columns of ``local`` and ``through`` together."""
        return self.columns + (1 if self.diagonal else self.rows)

    @property
    def map_bytes(self) -> int:
        """Bytes of one sequence's fp32 :class:`StateMap`, all heads together."""
        return self.heads * self.rows * self.map_columns * 4

    def no_maps(self, like: Tensor) -> StateMap:
        """The maps of zero sequences, N = 0, in fp32 (fp64 if ``like`` is fp64) on the
        device of ``like``."""
        wide = torch.promote_types(like.dtype, torch.float32)
        maps = like.new_empty(0, self.heads, self.rows, self.map_columns, dtype=wide)
        return StateMap(maps[..., : self.columns], maps[..., self.columns :])


class StateMap(NamedTuple):
    """``S_out = through @ S_in + local``, one map for each sequence and head.

    The delta rule mixes the rows of a state, so its ``through`` is a matrix. If a rule
    only decays rows, ``through`` has one column, the factor of each row.
    """

    local: Tensor  # [N, H, K, V] fp32, S_out for S_in = 0
    through: Tensor  # [N, H, K, K] or [N, H, K, 1] fp32

    @property
    def is_diagonal(self) -> bool:
        """Whether ``through`` is one factor for each row instead of a matrix."""
        return self.through.shape[-1] == 1

    def apply(self, state: Tensor) -> Tensor:
        """The state S_out after the map, ``[N, H, K, V]``; ``state`` is S_in."""
        if self.is_diagonal:
            carried = self.through * state
        else:
            carried = self.through @ state
        return carried + self.local

    def transposed(self, d_local: Tensor) -> StateMap:
        """The map of gradients, ``dS_in = through^T dS_out + d_local``."""
        return StateMap(d_local, self.through if self.is_diagonal else self.through.mT)


@dataclass(frozen=True, eq=False)
class ChainSteps:
    """For each chain, which maps are applied, and where the states between them go.

    A step is ``(target, map)``: write the state to index ``target`` of the output, then
    apply the map of index ``map``. NO_INDEX skips the write or the map. Every chain has
    at least one step.
    """

    chains: tuple[tuple[tuple[int, int], ...], ...]  # the steps of each chain
    # int32 [chains, L, 2]: ``chains`` on the device; L is the number of steps of the
    # longest chain, and shorter chains end in steps (NO_INDEX, NO_INDEX)
    table: Tensor

    @classmethod
    def build(
        cls, chains: Sequence[Sequence[tuple[int, int]]], device: torch.device
    ) -> ChainSteps:
        """The steps ``chains``, with a table on ``device``."""
        longest = max(map(len, chains), default=0)
        padded = []
        for chain in chains:
            missing = longest - len(chain)
            padded.append(list(chain) + [(NO_INDEX, NO_INDEX)] * missing)
        table = torch.tensor(padded, dtype=torch.int32, device="cpu")
        return cls(tuple(tuple(chain) for chain in chains), to_device(table, device))


def follow_chains(
    local: Tensor,
    through: Tensor,
    steps: ChainSteps,
    out: Tensor,
    start: Tensor | None = None,
    cuts: Tensor | None = None,
    compose: bool = False,
) -> Tensor:
    """Apply the maps of every chain in order, and write the states at the targets of
    its steps.

    Args:
        local: ``[P, H, K, V]`` fp32 (or fp64, in plain torch).
        through: ``[P, H, K, K]``, any strides; or ``[P, H, K, 1]``, one factor per row.
        out: ``[Q, H, K, X]``, overwritten; X is V, with ``compose`` V plus
            ``through``'s columns.
        start: ``[N, H, K, V]``, the states before the first maps; None: zero.
        cuts: int32 ``[L]`` on the device, for one chain without ``compose``. A step
            whose entry is 1 sets the state to its map's ``local``; the state before has
            no effect, even if it is NaN.
        compose: write each chain's composed map to ``out`` instead of states, with
            ``local`` and ``through`` side by side. ``start`` must then be None.

    Returns:
        ``out``, computed in fp32 even if torch's TF32 switches are on. The GPU kernel
        replaces each factor by a sum of two TF32 numbers, to within 2^-20, and adds in
        a fixed order.
    """
    P, H, K, V = local.shape
    assert through.shape[:3] == (P, H, K) and out.shape[1:3] == (H, K)
    dense = through.shape[3] == K
    assert dense or through.shape[3] == 1
    assert out.shape[3] == (V + through.shape[3] if compose else V)
    if compose:
        assert all(chain[0][0] == NO_INDEX for chain in steps.chains), (
            "the identity is not written"
        )
    if (
        local.is_cuda
        and local.dtype == torch.float32
        and dense
        and K <= MOST_STATE_ROWS
    ):
        from . import chains_kernels

        return chains_kernels.follow_chains_on_gpu(
            local, through, steps.table, out, start, cuts, compose
        )
    return follow_chains_in_torch(local, through, steps, out, start, cuts, compose)


def follow_chains_in_torch(
    local: Tensor,
    through: Tensor,
    steps: ChainSteps,
    out: Tensor,
    start: Tensor | None,
    cuts: Tensor | None = None,
    compose: bool = False,
) -> Tensor:
    """:func:`follow_chains` in plain torch."""
    V = local.shape[-1]
    rows_decay = through.shape[-1] < through.shape[-2]
    with full_fp32_matmul(local.device.type):
        for n, chain in enumerate(steps.chains):
            # None stands for zeros, or for the identity with ``compose``
            state = None if start is None else start[n]
            for j, (target, index) in enumerate(chain):
                if target != NO_INDEX:
                    out[target] = 0 if state is None else state
                if index == NO_INDEX:
                    continue
                if state is not None:
                    if rows_decay:
                        product = through[index] * state
                    else:
                        product = through[index] @ state
                    # with ``compose`` the columns after the first V belong to
                    # ``through``
                    product[..., :V].add_(local[index])
                    if cuts is None:
                        state = product
                    else:
                        state = torch.where(cuts[j] > 0, local[index], product)
                elif compose:
                    state = torch.cat([local[index], through[index]], dim=-1)
                else:
                    state = local[index]
    return out
