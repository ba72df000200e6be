"""The front of all mixers: it turns projection rows into a rule's inputs, as a table
says.

convolved sections      SiLU(conv(x)), scaled to unit length if the table says so
gate sections           elementwise functions of :mod:`.gates`, per head or per channel

A mixer's ``front.py`` makes its :class:`FrontTable`. A new gate needs a
:class:`GateSection` there, a function in :mod:`.gates`, and for Triton the function
with its gradient in :mod:`.gate_kernels`.
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

# A front's parameters as a list, in the order of the docstring of :class:`Front`.
FrontParameterList = Sequence[Any]


class ConvolvedSection(NamedTuple):
    """A section, or a run of sections, of convolved columns. It becomes one input of
    the rule, ``[B, S, heads, width]``."""

    section: str  # the section's name in the layout
    rule_input: str  # the name of the rule's input
    has_unit_length: bool = False  # whether each head's vector is scaled to unit length

    @property
    def rule_inputs(self) -> tuple[str, ...]:
        """The one name, as a tuple like :attr:`GateSection.rule_inputs`."""
        return (self.rule_input,)


# The convolved sections of a table, in the order of a row's columns.
ConvolvedSections = tuple[ConvolvedSection, ConvolvedSection, ConvolvedSection]


def delta_sections(normalise_qk: bool) -> ConvolvedSections:
    """The delta rule's sections query, key and value; ``normalise_qk``: q and k have
    unit length."""
    return (
        ConvolvedSection("query", "q", normalise_qk),
        ConvolvedSection("key", "k", normalise_qk),
        ConvolvedSection("value", "v"),
    )


class GateSection(NamedTuple):
    """A section of gate columns. Its function makes fp32 inputs of the rule,
    ``[B, S, heads(, width)]``."""

    section: str  # the section's name in the layout
    # the names of the rule's inputs, one for each result of ``function``
    rule_inputs: tuple[str, ...]
    function: Callable[..., tuple[Tensor, ...]]  # of :mod:`.gates`
    # Whether the gate uses A_log [heads] and dt_bias [columns]. Exactly one gate of a
    # table does: FrontParameters and the kernels have no parameter of a second gate.
    has_A_log: bool = False
    # True: a value for each channel of a head. False: one value per head.
    per_channel: bool = False
    # two bounds that ``function`` gets, for example of a time step; a function may
    # ignore a bound
    low: float = 0.0
    high: float = 1.0


@dataclass(frozen=True, eq=False)
class FrontTable:
    """The sections of a row that a mixer's front reads, and the rule's inputs that the
    front makes.

    A decode step also reads the table. For each head the step updates the state S; the
    sections ``qkv_sections`` give q, k and v. The first gate is the log-decay g, and
    the last gate is the write strength w. With three gates, the second is the erase
    gate b:

        S = exp(g) S
        S = S + w k (v - S^T k)^T  or  S + k (w v - S^T (b k))^T  with b,  if ``erases``
        S = S + w k v^T                                                    otherwise
        o = scale S^T q,  plus D v if all tokens share an input D

    With ``steps`` n > 1 a token updates the state n times before it reads the state.
    Then k, v and w come from runs of n sections, one for each update, and only the
    first update decays (:mod:`..rules.steps`).
    """

    layout: Layout
    # The NamedTuple of the rule's inputs. Its fields are the inputs that the front makes
    # from the convolved sections, those from the gate sections, and ``shared_input``,
    # in this order.
    inputs_class: type[Any]
    state_shape: StateShape
    convolved_sections: ConvolvedSections
    gate_sections: tuple[GateSection, ...]
    # the name of an input that is equal for all tokens: a parameter [H] or [H V]
    shared_input: str | None = None
    qkv_sections: tuple[str, str, str] = ("query", "key", "value")
    scale: float = 1.0
    erases: bool = True
    steps: int = 1
    # Names of inputs that are not saved: the backward computes them again from the
    # rows. The names must be adjacent in ``inputs_class``.
    recomputed: tuple[str, ...] = ()

    @cached_property
    def normalises_qk(self) -> bool:
        """Whether q and k are scaled to unit length."""
        return any(part.has_unit_length for part in self.convolved_sections)


class FrontParameters(NamedTuple):
    """The parameters of a front by name; a parameter that the front does not have is
    None."""

    weight: Tensor  # [C, 1, W], of the convolution
    bias: Tensor | None  # [C], of the convolution
    A_log: Tensor  # [heads], fp32
    dt_bias: Tensor  # [heads * width], fp32
    shared_input: Tensor | None  # [H] or [H V], the rule's input that all tokens share
    # [S, B, .]: the columns of the layout's gates, if the projection rows lack them
    gate_rows: Tensor | None


class FrontArguments(NamedTuple):
    """The arguments that the forward and the backward of a front share, for one
    batch."""

    proj: Tensor  # projection rows [S, B, P]
    parameters: FrontParameters
    documents: Documents | None  # None: each batch row is one sequence
    history: History | None  # None: zeros before each sequence


@dataclass(frozen=True, eq=False)
class Front:
    """Computes a rule's inputs from projection rows ``[S, B, P]``; ``table`` says how.

    The argument ``parameters`` of :meth:`forward` and :meth:`backward` lists the conv
    weight ``[C, 1, W]``, the conv bias ``[C]`` or None, A_log and dt_bias. Then come
    the shared input, if the table has one, and the columns ``[S, B, .]`` of the
    layout's gates, if the rows do not contain them.
    """

    table: FrontTable
    # dtype of the convolved inputs; None: the rows' dtype
    operand_dtype: torch.dtype | None = None
    # whether a token's bits must not depend on its index in the buffer
    batch_invariant: bool = False

    is_triton: ClassVar[bool] = False  # whether the front runs in Triton

    def _make_inputs(
        self, arguments: FrontArguments, wanted: tuple[str, ...]
    ) -> Mapping[str, Tensor | None]:
        """The inputs ``[B, S, heads(, width)]`` that ``wanted`` names, by name. The
        shared input is missing: :meth:`forward` adds it. Inputs that are not wanted may
        be None."""
        raise NotImplementedError

    def _compute_gradients(
        self,
        arguments: FrontArguments,
        grads: Any,
        d_proj: Tensor,
        d_gate_rows: Tensor | None,
    ) -> tuple[Tensor | None, ...]:
        """Compute the gradients of weight, bias, A_log and dt_bias. ``grads`` has the
        gradients of the rule's inputs.

        A gradient in ``grads`` may have n heads for each head of its input; the front
        then sums these n heads. The results of one gate have the same n. ``grads`` may
        have a ``factor [H]`` by which a head's gradients must still be multiplied.
        Writes ``d_proj``, ``d_gate_rows`` and ``history.d_rows``.
        """
        raise NotImplementedError

    @cached_property
    def layout(self) -> Layout:
        return self.table.layout

    @cached_property
    def recomputed(self) -> tuple[str, ...]:
        """Names of the inputs that the backward computes again."""
        return self.table.recomputed

    @cached_property
    def input_names(self) -> tuple[str, ...]:
        """The names of the rule's inputs, in the order of the NamedTuple."""
        return self.table.inputs_class._fields

    @cached_property
    def convolved_inputs(self) -> tuple[str, ...]:
        """The names of the rule's inputs that are convolved."""
        return tuple(part.rule_input for part in self.table.convolved_sections)

    @cached_property
    def conv_channels(self) -> dict[str, slice]:
        """For each convolved section, by name: its channels among the channels
        ``0 .. C - 1`` of the convolution."""
        channels_of = {}
        first_column = self.layout.conv_columns.start
        for part in self.table.convolved_sections:
            columns = self.layout.columns(part.section)
            channels_of[part.section] = slice(
                columns.start - first_column, columns.stop - first_column
            )
        return channels_of

    def gates_of(
        self,
        proj: Tensor,
        A_log: Tensor,
        dt_bias: Tensor,
        gate_rows: Tensor | None = None,
        wanted: tuple[str, ...] | None = None,
    ) -> dict[str, Tensor]:
        """The gates' values ``[B, S, heads(, width)]`` by names of the rule's inputs;
        differentiable, in fp32 or wider.

        ``gate_rows``: the columns of the layout's gates, if ``proj`` lacks them.
        ``wanted``: names to compute; None: all.
        """
        wide = torch.promote_types(
            torch.promote_types(proj.dtype, A_log.dtype), torch.float32
        )
        made: dict[str, Tensor] = {}
        for gate in self.table.gate_sections:
            names = gate.rule_inputs
            if wanted is not None and not any(name in wanted for name in names):
                continue
            columns = self.layout.columns(gate.section)
            rows = proj
            first_column = 0
            # the columns of the layout's gates begin at ``main_width``
            if gate_rows is not None and columns.start >= self.layout.main_width:
                rows = gate_rows
                first_column = self.layout.main_width
            x_SBC = rows[
                ..., columns.start - first_column : columns.stop - first_column
            ]
            x = x_SBC.transpose(0, 1).to(wide)
            x = x.unflatten(-1, self.layout.shape_of(gate.section))
            A_log_H1 = None
            if gate.has_A_log:
                x = x + dt_bias.to(wide).view(x.shape[2:])
                A_log_H1 = A_log.to(wide)[:, None]
            values = gate.function(x, A_log_H1, gate.low, gate.high)
            for name, y in zip(names, values, strict=True):
                made[name] = y if gate.per_channel else y.squeeze(-1)
        return made

    def forward(
        self,
        proj: Tensor,
        parameters: FrontParameterList,
        documents: Documents | None,
        only: tuple[str, ...] | None = None,
        history: History | None = None,
    ) -> Any:
        """Compute the rule's inputs, a ``table.inputs_class``, from rows
        ``proj [S, B, P]``. The dimensions S and B of ``proj`` may have any strides.

        ``only``: the names to compute, adjacent in :attr:`input_names`; all other
        inputs are None.
        """
        named = self._named_parameters(parameters)
        arguments = FrontArguments(proj, named, documents, history)
        if only is None:
            wanted = self.input_names
        else:
            wanted = only
        made: dict[str, Tensor | None] = dict.fromkeys(self.input_names)
        made.update(self._make_inputs(arguments, wanted))
        if named.shared_input is not None:
            wide = torch.promote_types(named.shared_input.dtype, torch.float32)
            # the last field of the NamedTuple, expanded to all tokens without a copy
            shared = named.shared_input.to(wide).view(self.layout.state_heads, -1)
            made[self.input_names[-1]] = shared.expand(
                proj.shape[1], proj.shape[0], -1, -1
            )
        return self.table.inputs_class(
            **{name: made[name] if name in wanted else None for name in made}
        )

    def backward(
        self,
        proj: Tensor,
        parameters: FrontParameterList,
        grads: object,
        d_proj: Tensor,
        documents: Documents | None,
        history: History | None = None,
    ) -> tuple[Tensor | None, ...]:
        """The gradients of the parameters, in the parameters' order, shapes and dtypes.

        ``grads`` has the gradients of the rule's inputs as attributes. The method
        writes ``history.d_rows`` and ``d_proj [S, B, P]``. It writes each column of
        ``d_proj`` once, but not the output gate's columns: the readout writes these.

        A shared input is a parameter that is itself the rule's last input, the same for
        all tokens (Mamba2's D), so its gradient is summed over the tokens. ``gate_rows``
        are gates that stand beside ``proj``; their gradient is the last result.
        """
        named = self._named_parameters(parameters)
        arguments = FrontArguments(proj, named, documents, history)
        if named.gate_rows is None:
            d_gate_rows = None
        else:
            d_gate_rows = torch.empty_like(named.gate_rows)
        d_parameters = self._compute_gradients(arguments, grads, d_proj, d_gate_rows)
        if named.shared_input is not None:
            shared = named.shared_input
            d_shared = getattr(grads, self.input_names[-1]).sum((0, 1))
            d_parameters += (d_shared.to(shared.dtype).view(shared.shape),)
        if d_gate_rows is None:
            return d_parameters
        return d_parameters + (d_gate_rows,)

    def _named_parameters(self, parameters: FrontParameterList) -> FrontParameters:
        """Name the parameters of a list; the class's docstring gives their order."""
        weight, bias, A_log, dt_bias = parameters[:4]
        others = list(parameters[4:])
        shared = None
        if self.table.shared_input is not None:
            shared = others.pop(0)
        gate_rows = None
        if others:
            (gate_rows,) = others
        return FrontParameters(weight, bias, A_log, dt_bias, shared, gate_rows)
