"""One front for all mixers: the table that a mixer states, and the front that follows from it.

convolved sections      SiLU(conv(x)), scaled to unit length if the table says so
gates                   functions of single columns, of :mod:`.gates`, per head or per channel
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from ..documents import Documents
from ..layout import Layout
from ..state_maps.state_map import StateShape
from .history import History

# conv weight [C, 1, W], conv bias [C] or None, then the other parameters of the front.
Parameters = Sequence[Any]


class Convolved(NamedTuple):
    """A section of convolved columns, ``[B, S, heads, width]`` for the rule."""

    section: str
    makes: str  # the rule's input
    unit_length: bool = False


def delta_sections(normalise_qk: bool = True) -> tuple[Convolved, Convolved, Convolved]:
    """The convolved sections of the delta rule."""
    q, k = Convolved("query", "q", normalise_qk), Convolved("key", "k", normalise_qk)
    return q, k, Convolved("value", "v")


class Gate(NamedTuple):
    """A section whose columns are gates: ``[B, S, heads]`` or ``[B, S, heads, width]``, fp32."""

    section: str
    makes: tuple[str, ...]  # the rule's inputs, as many as the function makes
    function: Callable[..., tuple[Tensor, ...]]  # of :mod:`.gates`
    rated: bool = False  # takes A_log, one per head, and dt_bias, one per column; one gate does
    channels: bool = False  # for each channel of a head
    low: float = 0.0
    high: float = 1.0


@dataclass(frozen=True, eq=False)
class FrontTable:
    """The sections that a mixer's front reads from a row, and the inputs that it makes.

    One decoded token, from q, k and v of ``step_sections``, g of the first gate, the write strength
    w of the last and the state S of each head:

        S = exp(g) S;    S = S + w k (v - S^T k)^T,  or  S + w k v^T  if nothing is erased,
                         or, with b of a gate between,  S + k (w v - S^T (b k))^T
        o = scale S^T q, and + D v if tokens share a parameter D
    """

    layout: Layout
    inputs: type[Any]  # the rule's, a NamedTuple: the convolved, then the gates in their order
    state: StateShape
    convolved: tuple[Convolved, Convolved, Convolved]  # in the order of the columns
    gates: tuple[Gate, ...]
    # An input that is a parameter, ``[H]`` or ``[H V]``, the same for every token: the last one.
    shared: str | None = None
    step_sections: tuple[str, str, str] = ("query", "key", "value")
    scale: float = 1.0
    erases: bool = True

    @property
    def unit_length(self) -> bool:
        return any(part.unit_length for part in self.convolved)


class FrontParameters(NamedTuple):
    """The parameters of a front by name."""

    weight: Tensor  # [C, 1, W]
    bias: Tensor | None  # [C]
    A_log: Tensor  # [heads], fp32
    dt_bias: Tensor  # [heads * width], fp32
    shared: Tensor | None
    apart: Tensor | None  # the gates' sections [S, B, .], if the rows do not hold them


class Batch(NamedTuple):
    """The tensors that both ways of a front read."""

    proj: Tensor  # [S, B, P]
    given: FrontParameters
    documents: Documents | None
    history: History | None


@dataclass(frozen=True, eq=False)
class TableFront:
    """Projection rows ``[S, B, P]`` to the inputs of a rule and back, by a table, as plain calls.

    Parameters: conv weight ``[C, 1, W]``, conv bias ``[C]`` or None, A_log, dt_bias; then, if the
    table has one, the parameter that tokens share, and the gates' sections ``[S, B, .]``, if rows
    do not hold them.
    """

    table: FrontTable
    dtype: torch.dtype | None = None  # of the convolved inputs; None is the projection's
    batch_invariant: bool = False  # the bits of a packed document do not depend on its place
    # Inputs, neighbours in ``names``, that the mixer computes again in the backward.
    again: tuple[str, ...] = ()

    triton: ClassVar[bool] = False
    # Takes a Batch and names of inputs; makes these inputs, except the shared one.
    _make: ClassVar[Callable[..., dict[str, Any]]]
    # Takes a Batch, the rule's gradients, d_proj and d_apart; returns the gradients of weight,
    # bias, A_log and dt_bias, and writes the columns and ``history.d_rows``.
    _gradients: ClassVar[Callable[..., tuple[Tensor | None, ...]]]

    @cached_property
    def layout(self) -> Layout:
        return self.table.layout

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The rule's inputs in order."""
        return self.table.inputs._fields

    @cached_property
    def convolved(self) -> tuple[str, ...]:
        return tuple(part.makes for part in self.table.convolved)

    def channels(self, section: str) -> slice:
        """The channels of the convolution that belong to a section."""
        columns, first = self.layout.columns(section), self.layout.conv_columns.start
        return slice(columns.start - first, columns.stop - first)

    def gates_of(
        self,
        proj: Tensor,
        A_log: Tensor,
        dt_bias: Tensor,
        apart: Tensor | None = None,
        wanted: tuple[str, ...] | None = None,
    ) -> dict[str, Tensor]:
        """The gates in plain torch, differentiable, in fp32 or wider."""
        wide = torch.promote_types(torch.promote_types(proj.dtype, A_log.dtype), torch.float32)
        rows = (proj if apart is None else apart).transpose(0, 1)
        made: dict[str, Tensor] = {}
        for gate in self.table.gates:
            if wanted is not None and not any(name in wanted for name in gate.makes):
                continue
            columns, first = self.layout.columns(gate.section), 0
            if apart is not None:
                first = self.layout.main_width
            x = rows[..., columns.start - first : columns.stop - first].to(wide)
            x = x.unflatten(-1, self.layout.shape_of(gate.section))
            rate = None
            if gate.rated:
                x, rate = x + dt_bias.to(wide).view(x.shape[2:]), A_log.to(wide)[:, None]
            values = gate.function(x, rate, gate.low, gate.high)
            for name, y in zip(gate.makes, values, strict=True):
                made[name] = y if gate.channels else y.squeeze(-1)
        return made

    def forward(
        self,
        proj: Tensor,
        parameters: Parameters,
        documents: Documents | None,
        only: tuple[str, ...] | None = None,
        history: History | None = None,
    ) -> Any:
        """The rule's inputs, a NamedTuple, from rows with any strides of S and B.

        Taps never cross a document's boundaries, the same in every batch row; the ``history``, if
        any, lies before them. With ``only``, neighbours in :attr:`names`, the others are None.
        """
        given, wanted = self._named(parameters), self.names if only is None else only
        made: dict[str, Any] = dict.fromkeys(self.names)
        made |= self._make(Batch(proj, given, documents, history), wanted)
        if given.shared is not None and self.table.shared in wanted:
            wide = torch.promote_types(given.shared.dtype, torch.float32)
            shared = given.shared.to(wide).view(self.layout.state_heads, -1)
            made[self.names[-1]] = shared.expand(proj.shape[1], proj.shape[0], -1, -1)
        return self.table.inputs(**{name: made[name] if name in wanted else None for name in made})

    def backward(
        self,
        proj: Tensor,
        parameters: Parameters,
        grads: Any,
        d_proj: Tensor,
        documents: Documents | None,
        history: History | None = None,
    ) -> tuple[Tensor | None, ...]:
        """Gradients of the parameters, in their shapes and dtypes, from the rule's ``grads``.

        Writes every column of ``d_proj`` ``[S, B, P]`` once, except the gate's, which the readout
        writes, and ``history.d_rows``.
        """
        given = self._named(parameters)
        d_apart = None if given.apart is None else torch.empty_like(given.apart)
        batch = Batch(proj, given, documents, history)
        found = self._gradients(batch, grads, d_proj, d_apart)
        if given.shared is not None:
            shared = given.shared
            d_shared = getattr(grads, self.names[-1]).sum((0, 1))
            found = (*found, d_shared.to(shared.dtype).view(shared.shape))
        return found if d_apart is None else (*found, d_apart)

    def _named(self, parameters: Parameters) -> FrontParameters:
        weight, bias, A_log, dt_bias, *others = parameters
        shared = None if self.table.shared is None else others.pop(0)
        return FrontParameters(weight, bias, A_log, dt_bias, shared, *(others or (None,)))
