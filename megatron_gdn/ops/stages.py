"""The stages of a mixer between its projections; training and generation run the same
stages.

Where the convolution's history and the initial state come from:

| the rows of the batch are         | history                  | initial state                |
|-----------------------------------|--------------------------|------------------------------|
| whole sequences                   | zeros                    | zeros                        |
| pieces of sequences on many ranks | rows of the piece before | state maps of earlier pieces |
| sequences continued from a cache  | the cache                | the cache                    |
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
    """The output norm with its gate: ``RMSNorm(o) * gamma * activation(z)``."""

    gamma: Tensor  # [V]
    eps: float = 1e-6
    zero_centered: bool = False  # whether 1 + gamma takes the place of gamma
    activation: str = "silu"  # or "sigmoid"
    # the groups of heads that share a norm; None: a norm per head
    groups: int | None = None


@lru_cache(maxsize=64)
def _readout_with_norm(
    gate: slice,
    eps: float,
    zero_centered: bool,
    activation: str,
    groups: int | None,
    triton: bool,
) -> PlainReadout:
    """The readout with norm and gate, in Triton kernels if ``triton``, else in plain
    torch.

    ``gate`` are the gate's columns of a row; the others are fields of
    :class:`GatedNorm`. Equal arguments share one readout.
    """
    readout_class = PlainReadout
    if triton:
        from .readout.kernels import TritonReadout

        readout_class = TritonReadout
    return readout_class(gate, activation, eps, zero_centered, groups)


@lru_cache(maxsize=64)
def _readout_without_norm(gate: slice) -> PlainReadout:
    return PlainReadout(gate)


class Stages(NamedTuple):
    """A mixer's front, rule, readout and parameters, for rows of one device, dtype and
    scheme."""

    front: Front  # computes the rule's inputs from projection rows
    rule: Rule  # the recurrence
    readout: Readout | SplitReadout  # computes rows for out_proj from the rule's output
    # the front's parameters, conv_weight [C, 1, W] first; then the readout's gamma or
    # None
    parameters: tuple[Tensor | None, ...]
    recompute: bool = False  # whether the backward computes front and rule again

    @property
    def on_grid(self) -> bool:
        """Whether the mixer runs in ``batch_invariant_mode``: in chunks that are
        counted from each sequence's start."""
        return self.rule.bits is Bits.ON_GRID

    @property
    def front_parameters(self) -> tuple[Tensor | None, ...]:
        """The parameters of the front, without gamma."""
        return self.parameters[:-1]

    # Only generation reads the following properties.

    @property
    def table(self) -> FrontTable:
        return self.front.table

    @property
    def state_shape(self) -> StateShape:
        return self.table.state_shape

    @property
    def history_length(self) -> int:
        """W - 1: how many rows before a token the convolution reads."""
        return cast(Tensor, self.parameters[0]).shape[-1] - 1

    @property
    def memory_shape(self) -> MemoryShape:
        """The sizes of the memory that generation keeps for one sequence."""
        table = self.front.table
        weight = cast(Tensor, self.parameters[0])
        on_grid = self.rule.bits is Bits.ON_GRID
        return MemoryShape.of(
            table.layout, table.state_shape, weight.shape[-1], on_grid
        )


# A function (layout, rule, device, dtype, taps) that makes the front of rows with this
# layout, device and dtype; taps is the width W of the convolution.
MakeFront = Callable[[Layout, Rule, torch.device, torch.dtype, int], Front]


def front_maker(table: Callable[..., FrontTable], **settings: object) -> MakeFront:
    """A function that makes fronts, each from ``table(layout, **settings)``.

    ``table`` is a mixer's function such as ``gdn_table``; its settings must be
    hashable.
    """
    return partial(front_by_table, partial(table, **settings))


def front_by_table(
    make_table: Callable[[Layout], FrontTable],
    layout: Layout,
    rule: Rule,
    device: torch.device,
    dtype: torch.dtype,
    taps: int,
    kernels: str = "auto",
) -> Front:
    """The front that computes the inputs of ``rule`` from rows of this layout, device
    and dtype.

    Args:
        make_table: gives the mixer's front as a table, for rows of a layout.
        taps: the width W of the convolution.
        kernels: ``"auto"``, ``"triton"`` or ``"torch"``.

    Raises:
        ValueError: ``kernels`` is unknown, or the rule has fp16 operands and the front
            does not scale q and k to unit length.
    """
    table = make_table(layout)
    operands = rule.operand_dtype
    if operands is not None and not table.normalises_qk:
        raise ValueError(
            f"this rule takes q and k in {operands}, but without unit length they may "
            "overflow; pass normalise_qk=False to resolve_rule too, or choose "
            "operands='bf16'."
        )
    return front_of(table, device.type, dtype, taps, kernels, rule.bits, operands)


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
        gates: ``[S, B, .]``, the columns of the sections with ``gates``, if another
            product computed them; then ``rows`` lacks these columns. Generation passes
            no ``gates``.

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
    gates_shape = rows.shape[:2] + (layout.width - width,)
    if gates is not None and gates.shape != gates_shape:
        raise ValueError(
            f"the gates must be {list(gates_shape)} beside rows "
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
        readout = _readout_without_norm(layout.gate_columns)
    elif isinstance(norm, GatedNorm):
        gamma = norm.gamma
        readout = _readout_with_norm(
            layout.gate_columns,
            norm.eps,
            norm.zero_centered,
            norm.activation,
            norm.groups,
            front.is_triton,
        )
    if gates is not None:  # the front's last parameter, which kernels read by columns
        parameters += (gates.contiguous(),)
    return Stages(
        front,
        rule,
        cast(Readout | SplitReadout, readout),
        parameters + (gamma,),
        recompute,
    )


class StateLink(Protocol):
    """Where a batch's initial states come from, and the gradients of its final states.

    The scheme chunkwise implements this: it exchanges states and gradients with other
    ranks.
    """

    # boundaries of the N sequences, with all batch rows end to end
    documents: Documents

    def forward_states(
        self, rule: Rule, forward: RuleForward, inputs: object
    ) -> tuple[Tensor | None, tuple[Tensor, ...]]:
        """The initial states ``[N, H, K, V]``, and the tensors that the backward needs.

        ``forward`` is ``rule.begin(inputs, self.documents)``, which has not run yet.
        The caller saves the tensors that the backward needs. It passes them as ``kept``
        to :meth:`backward_states` and :meth:`states_from_saved`.
        """
        ...

    def states_from_saved(self, kept: tuple[Tensor, ...]) -> Tensor | None:
        """The initial states ``[N, H, K, V]`` again, for a second forward."""
        ...

    def backward_states(
        self, backward: RuleBackward, kept: tuple[Tensor, ...]
    ) -> tuple[Tensor | None, Tensor | None]:
        """The initial states and the gradients of the final states, ``[N, H, K, V]``
        each; None means zeros. ``kept`` is from :meth:`forward_states`."""
        ...


@dataclass(frozen=True, eq=False)
class SequenceContext:
    """The boundaries inside a batch, and what comes before each of its sequences.

    The scheme of context parallelism makes this for each micro-batch.
    """

    # The boundaries of documents, or of pieces of documents, in every batch row. None:
    # each batch row is one sequence.
    documents: Documents | None = None
    history: HistoryLink | None = None  # the rows before each sequence; None: zeros
    states: StateLink | None = None  # the initial states; None: zeros

    @cached_property
    def rule_documents(self) -> Documents | None:
        """The boundaries that the rule gets: ``states.documents`` if there are states,
        else ``documents``."""
        if self.states is None:
            return self.documents
        return self.states.documents


WHOLE_SEQUENCES = SequenceContext()  # every batch row is one whole sequence
