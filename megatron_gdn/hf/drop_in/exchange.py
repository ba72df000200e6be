"""Exchange rows that lie in any order over ranks for contiguous shares, and back.

Legend: B batch, s tokens of one rank, H width of a row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from ...ops.host_tables import to_device

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass(frozen=True, eq=False)
class RowExchange:
    """Sends every row to the rank ``position // s``, which puts it at ``position % s``.

    Attributes:
        sent: int64 ``[s]``, the local rows in the order in which they are sent.
        placed: int64 ``[s]``, for each row of the contiguous share its index among those received.
        sends, receives: rows for and from each rank.
    """

    group: ProcessGroup
    sent: Tensor
    placed: Tensor
    sends: tuple[int, ...]
    receives: tuple[int, ...]

    @classmethod
    def of(cls, positions: Tensor, group: ProcessGroup, device: torch.device) -> RowExchange:
        """From int64 ``[cp, s]`` on the host: the positions that every rank holds."""
        (size, tokens), rank = positions.shape, group.rank()
        sent = positions[rank].argsort()
        owner = positions // tokens
        sends = owner[rank].bincount(minlength=size).tolist()
        receives = (owner == rank).sum(-1).tolist()
        # Every rank sends its rows in the order of their positions, so they arrive sorted by rank.
        arriving = torch.cat([mine[mine // tokens == rank].sort().values for mine in positions])
        placed = arriving.argsort()
        return cls(
            group, to_device(sent, device), to_device(placed, device), tuple(sends), tuple(receives)
        )

    def there(self, x_BsH: Tensor) -> Tensor:
        """To contiguous shares; the gradient takes the way back."""
        return _Exchange.apply(x_BsH, self, True)

    def back(self, y_BsH: Tensor) -> Tensor:
        """From contiguous shares."""
        return _Exchange.apply(y_BsH, self, False)

    def _move(self, x_BsH: Tensor, there: bool) -> Tensor:
        rows = x_BsH.transpose(0, 1)
        if there:
            out = self._send(rows.index_select(0, self.sent), self.sends, self.receives)
            out = out.index_select(0, self.placed)
        else:
            arrived = torch.empty_like(rows, memory_format=torch.contiguous_format)
            arrived[self.placed] = rows
            returned = self._send(arrived, self.receives, self.sends)
            out = torch.empty_like(returned)
            out[self.sent] = returned
        return out.transpose(0, 1).contiguous()

    def _send(self, rows: Tensor, sends: tuple[int, ...], receives: tuple[int, ...]) -> Tensor:
        out = rows.new_empty(rows.shape)
        dist.all_to_all_single(
            out, rows.contiguous(), list(receives), list(sends), group=self.group
        )
        return out


class _Exchange(torch.autograd.Function):
    """A permutation of rows over ranks: its adjoint is its inverse."""

    @staticmethod
    def forward(ctx, x: Tensor, exchange: RowExchange, there: bool) -> Tensor:
        ctx.exchange, ctx.there = exchange, there
        return exchange._move(x, there)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:
        return _Exchange.apply(grad, ctx.exchange, not ctx.there), None, None
