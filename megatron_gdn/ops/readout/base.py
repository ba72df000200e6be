"""The interface of a readout: from the output of a rule to rows for out_proj.

    per head     y = RMSNorm(o) * act(gate)             :mod:`.plain`
    per group    y = RMSNorm_group(o * act(gate))       :mod:`.plain`
    gate alone   y = o * act(gate)                      :mod:`.plain`
    a module     y = norm(o, gate)                      :class:`Apart`

The gate is a section of the rows. Arithmetic is fp32 (fp64 for fp64), rounded once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Protocol

from torch import Tensor

from ..elementwise import sigmoid, silu

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"silu": silu, "sigmoid": sigmoid}


class Readout(Protocol):
    """The norm and the gate of a rule's output, forward and backward as plain calls."""

    reads_o: ClassVar[bool]  # whether the backward does

    @property
    def gate(self) -> slice: ...  # columns of a row, H * V of them

    def forward(
        self, o: Tensor, rows: Tensor, gamma: Tensor | None, *, out: Tensor | None = None
    ) -> Tensor:
        """``[S, B, H * V]`` contiguous, in the dtype of ``rows``; written to ``out`` if given.

        ``o`` is ``[B, S, H, V]``, contiguous, in any dtype, ``rows`` ``[S, B, P]`` with any strides
        of S and B; gamma is None if there is no norm.
        """
        ...

    def backward(
        self, d_out: Tensor, o: Tensor, rows: Tensor, gamma: Tensor | None, d_rows: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Gradients of o, in the dtype of ``rows``, and of gamma.

        Writes the gate's columns of ``d_rows`` ``[S, B, P]`` and no others.
        """
        ...


def heads_of(mixed: Tensor, heads: int) -> Tensor:
    """``[S, B, H * V]`` as ``[B, S, H, V]``, a view."""
    return mixed.unflatten(-1, (heads, -1)).transpose(0, 1)


@dataclass(frozen=True)
class Bare:
    """``o`` unchanged, in rows. Its backward writes zeros to the gate's columns."""

    gate: slice
    heads: int

    reads_o: ClassVar[bool] = False

    def forward(
        self, o: Tensor, rows: Tensor, gamma: Tensor | None, *, out: Tensor | None = None
    ) -> Tensor:
        y = o.to(rows.dtype).flatten(2).transpose(0, 1)
        return y.contiguous() if out is None else out.copy_(y)

    def backward(
        self, d_out: Tensor, o: Tensor | None, rows: Tensor, gamma: Tensor | None, d_rows: Tensor
    ) -> tuple[Tensor, None]:
        d_rows[..., self.gate].zero_()
        return heads_of(d_out, self.heads).contiguous(), None


@dataclass(frozen=True, eq=False)
class Apart:
    """A readout in two steps: ``inside`` with the recurrence, then ``call`` under autograd.

    If ``closed``, ``call`` runs later, on this rank's own tokens, after all heads are together.
    """

    inside: Readout
    call: Callable[[Tensor, Tensor], Tensor]  # (mixed [S, B, H V], rows [S, B, P]) -> [S, B, H V]
    closed: bool = False

    @property
    def gate(self) -> slice:
        return self.inside.gate

    def forward(
        self, o: Tensor, rows: Tensor, gamma: Tensor | None, *, out: Tensor | None = None
    ) -> Tensor:
        """Both steps. All heads must be on this rank."""
        y = self.call(self.inside.forward(o, rows, gamma), rows)
        return y if out is None else out.copy_(y)


def called_per_head(gate: slice, heads: int, norm: Callable[[Tensor, Tensor], Tensor]) -> Apart:
    """The readout whose norm is a module, called as ``norm(o, z)`` on ``[B, S, H, V]`` tensors."""

    def call(mixed: Tensor, rows: Tensor) -> Tensor:
        y = norm(heads_of(mixed, heads), heads_of(rows[..., gate], heads))
        return y.flatten(2).transpose(0, 1).contiguous()

    return Apart(Bare(gate, heads), call)
