"""The stages of a mixer between its projections; training and generation run the same
stages.

The source of the convolution's history and of the initial state:

| the rows of the batch are         | history (conv)           | state                            |
|-----------------------------------|--------------------------|----------------------------------|
| whole sequences                   | zeros                    | zero                             |
| pieces of sequences on many ranks | rows of the piece before | folded maps of the pieces before |
| sequences continued from a cache  | the cache                | the cache                        |
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from typing import NamedTuple, Protocol, cast

import torch
from torch import Tensor

from .documents import Documents
from .front.history import HistoryLink
from .front.plain import front_of
from .front.table import Front, FrontTable
from .generation.memory import MemoryShape
from .layout import Layout
from .readout.base import PlainReadout, Readout, SplitReadout
from .rules.base import Bits, Rule, RuleBackward, RuleForward
from .state_maps.state_map import StateShape


class GatedNorm(NamedTuple):
    """The output norm ``RMSNorm(o) * gamma * act(z)``; 1 + gamma for gamma if
    ``zero_centered``."""

    gamma: Tensor  # [V]
    eps: float = 1e-6
    zero_centered: bool = False
    activation: str = "silu"  # or "sigmoid"
    # the groups of heads that share a norm; None: a norm per head
    groups: int | None = None


@lru_cache(maxsize=64)
def _norm_and_gate(
    gate: slice,
    eps: float,
    zero_centered: bool,
    activation: str,
    groups: int | None,
    triton: bool,
) -> PlainReadout:
    """The readout with norm and gate, in Triton kernels if ``triton``, else in plain
    torch."""
    kind = PlainReadout
    if triton:
        from .readout.kernels import TritonReadout as kind
    return kind(gate, activation, eps, zero_centered, groups)


@lru_cache(maxsize=64)
def _gate_alone(gate: slice) -> PlainReadout:
    return PlainReadout(gate)


class Stages(NamedTuple):
    """A mixer's front, rule, readout and parameters, for rows of one device, dtype and
    scheme."""

    front: Front  # computes the rule's inputs from projection rows
    rule: Rule  # the recurrence
    readout: Readout | SplitReadout  # computes rows for out_proj from the rule's output
    # of the front, then the readout's gamma or None
    parameters: tuple[Tensor | None, ...]
    recompute: bool = False  # whether the backward computes front and rule again

    @property
    def on_grid(self) -> bool:
        """Whether chunks are counted from each sequence's start
        (``batch_invariant_mode``)."""
        return self.rule.bits is Bits.ON_GRID

    @property
    def front_parameters(self) -> tuple[Tensor | None, ...]:
        """The parameters of the front."""
        return self.parameters[:-1]

    # Only generation reads the following properties.

    @property
    def table(self) -> FrontTable:
        return self.front.table

    @property
    def state(self) -> StateShape:
        return self.table.state

    @property
    def history_length(self) -> int:
        """The number of rows before a token that the convolution reads: W - 1."""
        return cast(Tensor, self.parameters[0]).shape[-1] - 1

    @property
    def memory_shape(self) -> MemoryShape:
        """Sizes of the memory that generation keeps for one sequence."""
        table = self.front.table
        weight = cast(Tensor, self.parameters[0])
        on_grid = self.rule.bits is Bits.ON_GRID
        return MemoryShape.of(table.layout, table.state, weight.shape[-1], on_grid)


# Makes the front of rows from their layout, the rule, device, dtype and number of conv
# taps.
MakeFront = Callable[[Layout, Rule, torch.device, torch.dtype, int], Front]


def fronts_of(table: Callable[..., FrontTable], **settings: object) -> MakeFront:
    """Make fronts by the tables ``table(layout, **settings)``; the settings must be
    hashable."""
    return partial(front_by_table, partial(table, **settings))


def front_by_table(
    table: Callable[[Layout], FrontTable],
    layout: Layout,
    rule: Rule,
    device: torch.device,
    dtype: torch.dtype,
    taps: int,
    kernels: str = "auto",
) -> Front:
    """The front that gives ``rule`` its inputs, from rows of this layout, device and
    dtype.

    Args:
        table: makes the mixer's description of its front, for rows of a layout.
        kernels: ``"auto"``, ``"triton"`` or ``"torch"``.

    Raises:
        ValueError: ``kernels`` is unknown, or the rule has fp16 operands and the front
            leaves q and k at any length.
    """
    of_layout = table(layout)
    operands = rule.operand_dtype
    if operands is not None and not of_layout.unit_length:
        raise ValueError(
            f"this rule takes q and k in {operands}, but without unit length they may "
            "overflow; pass normalise_qk=False to resolve_rule too, or choose "
            "operands='bf16'."
        )
    return front_of(of_layout, device.type, dtype, taps, kernels, rule.bits, operands)


def stages_of(
    front: Front,
    rule: Rule,
    rows: Tensor,
    parameters: tuple[Tensor | None, ...],
    norm: GatedNorm | SplitReadout | None,
    *,
    recompute: bool = False,
    gates: Tensor | None = None,
) -> Stages:
    """The stages of a mixer with ``front`` and ``rule``, for one call.

    Args:
        rows: ``[S, B, P]``, S and B with any strides.
        parameters: the front's parameters, without ``gates``.
        norm: the gated output norm (gamma and its settings), or a readout that calls
            the norm. If None, the readout applies the gate and no norm.
        recompute: whether the backward computes front and rule again.
        gates: the columns of the layout's gates ``[S, B, .]``, if ``rows`` does not
            have these columns. Generation has no ``gates``.

    Raises:
        ValueError: rows or gates have a wrong shape or stride; the conv weight has a
            wrong number of channels or is not contiguous.
    """
    layout = front.layout
    weight = cast(Tensor, parameters[0])
    if gates is None:
        width = layout.width
    else:
        width = layout.main_width
    if rows.dim() != 3 or rows.shape[2] != width or rows.stride(2) != 1:
        raise ValueError(
            f"rows must be [S, B, {width}] with columns side by side in memory, for "
            f"sections of {dict(zip(layout.names, layout.widths, strict=True))} "
            f"columns; got {tuple(rows.shape)} with strides {rows.stride()}."
        )
    of_gates = rows.shape[:2] + (layout.width - width,)
    if gates is not None and gates.shape != of_gates:
        raise ValueError(
            f"the gates must be {list(of_gates)} beside rows "
            f"{tuple(rows.shape)}, got {tuple(gates.shape)}."
        )
    if weight.shape[0] != layout.conv_width or not weight.is_contiguous():
        raise ValueError(
            f"conv_weight must be contiguous [{layout.conv_width}, 1, W] for these "
            f"heads, got shape {tuple(weight.shape)} and strides {weight.stride()}."
        )
    gamma = None
    readout = norm
    if norm is None:
        readout = _gate_alone(layout.gate_columns)
    elif isinstance(norm, GatedNorm):
        gamma = norm.gamma
        readout = _norm_and_gate(
            layout.gate_columns,
            norm.eps,
            norm.zero_centered,
            norm.activation,
            norm.groups,
            front.triton,
        )
    if gates is not None:
        parameters += (gates.contiguous(),)
    kept = parameters + (gamma,)
    return Stages(front, rule, cast(Readout | SplitReadout, readout), kept, recompute)


class StateLink(Protocol):
    """Provides the initial states of the N sequences of a batch and the final states'
    gradients."""

    documents: Documents  # boundaries of the sequences, all batch rows end to end

    def forward_states(
        self, rule: Rule, forward: RuleForward, inputs: object
    ) -> tuple[Tensor | None, tuple[Tensor, ...]]:
        """The initial states ``[N, H, K, V]``, and the tensors that the backward needs.

        The caller saves these tensors. It passes them as ``kept`` to
        :meth:`backward_states` and :meth:`states_from_saved`.
        """
        ...

    def states_from_saved(self, kept: tuple[Tensor, ...]) -> Tensor | None:
        """The initial states ``[N, H, K, V]`` again, for a second run of the forward."""
        ...

    def backward_states(
        self, backward: RuleBackward, kept: tuple[Tensor, ...]
    ) -> tuple[Tensor | None, Tensor | None]:
        """The initial states and the gradients of the final states, ``[N, H, K, V]``
        each; None means zeros."""
        ...


@dataclass(frozen=True, eq=False)
class SequenceContext:
    """Boundaries, history and initial states of a batch; None means zero history or
    zero states.

    The boundaries, of documents or of pieces of documents, are the same in every batch
    row.
    """

    documents: Documents | None = None
    history: HistoryLink | None = None
    states: StateLink | None = None

    @cached_property
    def rule_documents(self) -> Documents | None:
        """The boundaries for the rule: those of ``states``, or ``documents`` if states
        is None."""
        if self.states is None:
            return self.documents
        return self.states.documents


WHOLE_SEQUENCES = SequenceContext()  # every batch row is one whole sequence
