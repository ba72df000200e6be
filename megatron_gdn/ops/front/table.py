"""The front of all mixers, which turns projection rows into a rule's inputs by a table.

convolved sections      SiLU(conv(x)), scaled to unit length if the table says so
gates                   elementwise functions of :mod:`.gates`, per head or per channel
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from ..documents import Documents
from ..layout import Layout
from ..state_maps.state_map import StateShape
from .history import History

# The parameters of a front, in the order that Front's docstring lists.
Parameters = Sequence[Any]


class Convolved(NamedTuple):
    """A section, or a run of sections, of convolved columns, which becomes a rule's
    input ``[B, S, heads, width]``."""

    section: str
    rule_input: str  # name of the rule's input
    unit_length: bool = False


def delta_sections(normalise_qk: bool = True) -> tuple[Convolved, Convolved, Convolved]:
    """The delta rule's sections query, key, value; ``normalise_qk``: q and k have unit
    length."""
    q, k = Convolved("query", "q", normalise_qk), Convolved("key", "k", normalise_qk)
    return q, k, Convolved("value", "v")


class Gate(NamedTuple):
    """A section of gate columns, which gives a rule fp32 inputs
    ``[B, S, heads(, width)]``."""

    section: str
    # names of the rule's inputs, one for each result of the function
    rule_input: tuple[str, ...]
    function: Callable[..., tuple[Tensor, ...]]  # of :mod:`.gates`
    # if it uses A_log [heads], dt_bias [columns]; in a table one gate does
    rated: bool = False
    channels: bool = False  # a value per channel of each head, not a value per head
    low: float = 0.0
    high: float = 1.0


@dataclass(frozen=True, eq=False)
class FrontTable:
    """The sections of a row that a mixer's front reads, and the rule's inputs that the
    front makes.

    A decode step updates the state S of each head. The sections ``step_sections`` give
    q, k and v. The first gate is the log-decay g, the last the write strength w; of
    three the second is b:

        S = exp(g) S
        S = S + w k (v - S^T k)^T  or  S + k (w v - S^T (b k))^T  with b,  if ``erases``
        S = S + w k v^T                                                    otherwise
        o = scale S^T q,  plus D v if tokens share a parameter D

    With ``steps`` n > 1 a token updates the state n times before it reads the state:
    the sections of k, v and w are runs of n sections, one for each update, and only the
    first update decays (:mod:`..rules.steps`).
    """

    layout: Layout
    # NamedTuple of the rule's inputs: convolved, gates, then ``shared``
    inputs: type[Any]
    state: StateShape
    convolved: tuple[Convolved, Convolved, Convolved]  # in the order of a row's columns
    gates: tuple[Gate, ...]
    # name of an input that all tokens share, a parameter [H] or [H V]
    shared: str | None = None
    step_sections: tuple[str, str, str] = ("query", "key", "value")
    scale: float = 1.0
    erases: bool = True
    steps: int = 1
    # Inputs that are not saved, adjacent in ``inputs``: the backward computes them from
    # the rows.
    recomputed: tuple[str, ...] = ()

    @cached_property
    def unit_length(self) -> bool:
        """Whether at least one convolved section (q, k) is scaled to unit length."""
        return any(part.unit_length for part in self.convolved)


class FrontParameters(NamedTuple):
    """The parameters of a front by name; a parameter that the front does not have is
    None."""

    weight: Tensor  # [C, 1, W]
    bias: Tensor | None  # [C]
    A_log: Tensor  # [heads], fp32
    dt_bias: Tensor  # [heads * width], fp32
    shared: Tensor | None  # the rule's input that all tokens share
    # the sections that the layout calls gates [S, B, .] if the rows lack them
    apart: Tensor | None


class Batch(NamedTuple):
    """Rows, parameters, documents and history, which a front's forward and backward
    both read."""

    proj: Tensor  # [S, B, P]
    given: FrontParameters
    documents: Documents | None
    history: History | None


@dataclass(frozen=True, eq=False)
class Front:
    """Computes a rule's inputs from projection rows ``[S, B, P]``; ``table`` says how.

    ``parameters``: conv weight ``[C, 1, W]``, conv bias ``[C]`` or None, A_log,
    dt_bias; the shared parameter, if the table has one; the gates' sections
    ``[S, B, .]``, if rows do not contain them.
    """

    table: FrontTable
    # dtype of the convolved inputs; None: the rows' dtype
    dtype: torch.dtype | None = None
    # whether bits must not depend on places in the buffer
    batch_invariant: bool = False

    triton: ClassVar[bool] = False
    # Takes a Batch and names of inputs; returns these inputs by name, without the
    # shared parameter.
    _make_inputs: ClassVar[Callable[..., Mapping[str, Tensor | None]]]
    # Takes a Batch, the rule's gradients, d_proj and d_apart; returns the gradients of
    # weight, bias, A_log and dt_bias; writes d_proj, d_apart and ``history.d_rows``.
    _compute_gradients: ClassVar[Callable[..., tuple[Tensor | None, ...]]]

    @cached_property
    def layout(self) -> Layout:
        return self.table.layout

    @cached_property
    def recomputed(self) -> tuple[str, ...]:
        """Names of the inputs that the backward computes again."""
        return self.table.recomputed

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The names of the rule's inputs, in the order of the NamedTuple."""
        return self.table.inputs._fields

    @cached_property
    def convolved(self) -> tuple[str, ...]:
        return tuple(part.rule_input for part in self.table.convolved)

    @cached_property
    def channels(self) -> dict[str, slice]:
        """For each convolved section's name, the slice of its channels in the
        convolution."""
        found = {}
        first = self.layout.conv_columns.start
        for part in self.table.convolved:
            columns = self.layout.columns(part.section)
            found[part.section] = slice(columns.start - first, columns.stop - first)
        return found

    def gates_of(
        self,
        proj: Tensor,
        A_log: Tensor,
        dt_bias: Tensor,
        apart: Tensor | None = None,
        wanted: tuple[str, ...] | None = None,
    ) -> dict[str, Tensor]:
        """The gates' values by names of the rule's inputs; differentiable, in fp32 or
        wider.

        ``apart``: gate columns if ``proj`` lacks them. ``wanted``: names to compute;
        None: all.
        """
        wide = torch.promote_types(
            torch.promote_types(proj.dtype, A_log.dtype), torch.float32
        )
        made: dict[str, Tensor] = {}
        for gate in self.table.gates:
            if wanted is not None and not any(
                name in wanted for name in gate.rule_input
            ):
                continue
            columns = self.layout.columns(gate.section)
            rows = proj
            first = 0
            if apart is not None and columns.start >= self.layout.main_width:
                rows = apart
                first = self.layout.main_width
            x_SBC = rows[..., columns.start - first : columns.stop - first]
            x = x_SBC.transpose(0, 1).to(wide)
            x = x.unflatten(-1, self.layout.shape_of(gate.section))
            rate = None
            if gate.rated:
                x = x + dt_bias.to(wide).view(x.shape[2:])
                rate = A_log.to(wide)[:, None]
            values = gate.function(x, rate, gate.low, gate.high)
            for name, y in zip(gate.rule_input, values, strict=True):
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
        """The rule's inputs from rows ``proj``, whose dimensions S and B may have any
        strides.

        ``only``: the names to compute, adjacent in :attr:`names`; all other inputs are
        None.
        """
        given = self._named_parameters(parameters)
        if only is None:
            wanted = self.names
        else:
            wanted = only
        made: dict[str, Tensor | None] = dict.fromkeys(self.names)
        made.update(self._make_inputs(Batch(proj, given, documents, history), wanted))
        if given.shared is not None and self.table.shared in wanted:
            wide = torch.promote_types(given.shared.dtype, torch.float32)
            shared = given.shared.to(wide).view(self.layout.state_heads, -1)
            made[self.names[-1]] = shared.expand(proj.shape[1], proj.shape[0], -1, -1)
        return self.table.inputs(
            **{name: made[name] if name in wanted else None for name in made}
        )

    def backward(
        self,
        proj: Tensor,
        parameters: Parameters,
        grads: object,
        d_proj: Tensor,
        documents: Documents | None,
        history: History | None = None,
    ) -> tuple[Tensor | None, ...]:
        """Gradients of the parameters, in their shapes and dtypes, from the rule's
        ``grads``.

        Writes ``history.d_rows``, and every column of ``d_proj`` ``[S, B, P]`` once,
        except the output gate's columns, which the readout writes.
        """
        given = self._named_parameters(parameters)
        if given.apart is None:
            d_apart = None
        else:
            d_apart = torch.empty_like(given.apart)
        batch = Batch(proj, given, documents, history)
        found = self._compute_gradients(batch, grads, d_proj, d_apart)
        if given.shared is not None:
            shared = given.shared
            d_shared = getattr(grads, self.names[-1]).sum((0, 1))
            found += (d_shared.to(shared.dtype).view(shared.shape),)
        if d_apart is None:
            return found
        return found + (d_apart,)

    def _named_parameters(self, parameters: Parameters) -> FrontParameters:
        """The list ``parameters``, in the order of the class's docstring, by name."""
        weight, bias, A_log, dt_bias = parameters[:4]
        others = list(parameters[4:])
        shared = None
        if self.table.shared is not None:
            shared = others.pop(0)
        apart = None
        if others:
            (apart,) = others
        return FrontParameters(weight, bias, A_log, dt_bias, shared, apart)
