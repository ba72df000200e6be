"""A front with one Triton launch forward and one backward; :mod:`.plain` is the
twin."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import ClassVar, NamedTuple

import torch
import triton
from torch import Tensor

from ..elementwise import L2NORM_EPS
from ..kernels.launch import LAUNCH_CACHE_SIZE, Launch
from ..kernels.reduce import sum_rows
from ..kernels.tiles import (
    FrontTile,
    block_dim,
    front_backward_tile,
    front_forward_tile,
    require_32_bits,
    tile_of_32_bit_offsets,
    within_grid,
    within_shared_memory,
)
from . import gate_kernels
from . import gates as plain_gates
from .history_kernels import lead_in, lead_in_backward
from .kernels import front_backward_kernel, front_forward_kernel
from .table import Front, FrontArguments, FrontTable

_CONVOLVED_COUNT = 3  # convolved sections of a table; each makes one input of the rule
# how many arguments the kernels have for the results of gates; a table may need fewer
_MOST_GATE_RESULTS = 3


class SectionOutput(NamedTuple):
    """The rule's inputs that one section makes."""

    names: tuple[str, ...]  # two if the section is a gate with two results
    shape: tuple[int, ...]  # of one token: [heads] or [heads, dim]


@dataclass(frozen=True, eq=False)
class TritonFront(Front):
    """The front in Triton. It needs rows whose columns are adjacent in memory, a
    contiguous conv weight, and a W of at least 2.

    With ``batch_invariant``, all tiles of packed rows run the same code, without fused
    multiply-adds. Otherwise the compiler may fuse a product and a sum in one copy of a
    loop, but not in the other copy.
    """

    tile: FrontTile | None = None  # None: :mod:`..kernels.tiles` chooses the tile

    is_triton: ClassVar[bool] = True

    @cached_property
    def section_outputs(self) -> tuple[SectionOutput, ...]:
        """For each section, the rule's inputs that it makes. Convolved sections come
        first, then gate sections."""
        layout = self.layout
        made = []
        for part in self.table.convolved_sections:
            made.append(SectionOutput(part.rule_inputs, layout.shape_of(part.section)))
        for gate in self.table.gate_sections:
            heads, width = layout.shape_of(gate.section)
            shape = (heads, width) if gate.per_channel else (heads,)
            made.append(SectionOutput(gate.rule_inputs, shape))
        return tuple(made)

    def _make_inputs(
        self, arguments: FrontArguments, wanted: tuple[str, ...]
    ) -> dict[str, Tensor | None]:
        """Compute the rule's inputs that ``wanted`` names, in one launch.

        Returns inputs ``[B, S, heads(, width)]`` by name, without the shared input. If
        no input of a section is wanted, its inputs are None or missing.
        """
        proj, parameters, documents, history = arguments
        S, B, _ = proj.shape
        made: dict[str, Tensor | None] = {}
        # for each section, whether at least one of its inputs is wanted
        is_wanted = [
            any(name in wanted for name in output.names)
            for output in self.section_outputs
        ]
        if not any(is_wanted):
            return made
        for index, output in enumerate(self.section_outputs):
            if index < _CONVOLVED_COUNT:
                dtype = self.operand_dtype
            else:
                dtype = torch.float32
            for name in output.names:
                if is_wanted[index]:
                    x = proj.new_empty((B, S) + output.shape, dtype=dtype)
                else:
                    x = None
                made[name] = x
        if parameters.gate_rows is None:
            gate_rows = proj
        else:
            gate_rows = parameters.gate_rows
        convolves = any(is_wanted[:_CONVOLVED_COUNT])
        lead, edge_index = lead_in(history if convolves else None, parameters.weight)
        launch = _forward_launch(
            self,
            S,
            B,
            parameters.weight.shape[-1],
            proj.stride()[:2],
            gate_rows.stride()[:2],
            tuple(is_wanted),
            parameters.gate_rows is not None,
            parameters.bias is not None,
            documents is not None,
            lead is not None,
        )
        # For an output that is not wanted, the kernel gets a pointer to another tensor
        # of the same dtype and does not use the pointer. So all choices of outputs
        # share one compilation.
        outputs = list(made.values())
        convolved = outputs[:_CONVOLVED_COUNT]
        gates = _with_three_results(outputs[_CONVOLVED_COUNT:], None)
        stand_in = next((x for x in convolved if x is not None), proj)
        convolved = [stand_in if x is None else x for x in convolved]
        gates = [parameters.A_log if x is None else x for x in gates]
        launch(
            proj,
            gate_rows,
            parameters.weight,
            parameters.bias,
            parameters.A_log,
            parameters.dt_bias,
            None if documents is None else documents.position_T,
            lead,
            edge_index,
            *(convolved + gates),
        )
        return made

    def _compute_gradients(
        self,
        arguments: FrontArguments,
        grads: object,
        d_proj: Tensor,
        d_gate_rows: Tensor | None,
    ) -> tuple[Tensor | None, ...]:
        """Return the gradients of the parameters; write the gradients of rows to
        ``d_proj`` and ``d_gate_rows``.

        Each gradient in ``grads`` is ``[B, S, heads of the gradient(, width)]``. If
        ``grads`` has a ``factor``, the true gradient of head h is the given gradient
        times ``factor[h]``.
        """
        proj, parameters, documents, history = arguments
        S, B, _ = proj.shape
        # The kernel has no arguments for the strides of gradients, so these must be
        # contiguous.
        d_inputs = [
            getattr(grads, name).contiguous()
            for output in self.section_outputs
            for name in output.names
        ]
        d_convolved = d_inputs[:_CONVOLVED_COUNT]
        # For an absent gradient the kernel gets the pointer of A_log and does not use
        # it.
        d_gates = _with_three_results(d_inputs[_CONVOLVED_COUNT:], parameters.A_log)
        factor = getattr(grads, "factor", None)
        weight, bias, A_log, dt_bias = parameters[:4]
        has_gate_rows = d_gate_rows is not None
        if d_gate_rows is None:  # the projection rows have the gates' columns
            gate_rows = proj
            d_gate_rows = d_proj
        else:
            gate_rows = parameters.gate_rows
        assert gate_rows is not None
        lead, edge_index = lead_in(history, weight)
        if lead is None:
            d_lead = None
        else:
            d_lead = torch.empty_like(lead)
        plan = _backward_plan(
            self,
            S,
            B,
            weight.shape[-1],
            proj.stride()[:2]
            + gate_rows.stride()[:2]
            + d_proj.stride()[:2]
            + d_gate_rows.stride()[:2],
            tuple([x.shape[2] for x in d_inputs]),
            (proj.element_size(), d_convolved[2].element_size()),
            has_gate_rows,
            bias is not None,
            documents is not None,
            factor is not None,
            lead is not None,
        )
        # The front's backward writes one row of partial sums for each tile of each
        # batch row. The lead-in's backward writes one more row for each piece of each
        # batch row.
        rows_of_tiles = B * plan.tile_count
        rows_of_pieces = 0 if lead is None else B * len(lead)
        partial = torch.empty(
            rows_of_tiles + rows_of_pieces,
            plan.column_count,
            dtype=torch.float32,
            device=proj.device,
        )
        plan.launch(
            proj,
            gate_rows,
            weight,
            bias,
            A_log,
            dt_bias,
            None if documents is None else documents.position_T,
            lead,
            edge_index,
            *(d_convolved + d_gates),
            factor,
            d_proj,
            d_gate_rows,
            partial,
            d_lead,
        )
        if d_lead is not None:
            assert history is not None
            lead_in_backward(history, weight, d_lead, partial[rows_of_tiles:])
        # ``partial`` has the columns of weight, bias, A_log and dt_bias, in this order.
        d_parameters = [
            None if x is None else torch.empty_like(x) for x in parameters[:4]
        ]
        sum_rows(partial, *[x for x in d_parameters if x is not None])
        return tuple(d_parameters)


def gates_without_kernels(table: FrontTable) -> tuple[str, ...]:
    """The names of the gate sections whose function is not in :mod:`.gates`, so that it
    has no twin in `.gate_kernels`. A table with such a section runs in plain torch."""
    sections = []
    for gate in table.gate_sections:
        name = getattr(gate.function, "__name__", "")
        if gate.function is not getattr(plain_gates, name, None):
            sections.append(gate.section)
    return tuple(sections)


def _with_three_results[Item](results: list[Item], absent: Item) -> list[Item]:
    """The list ``results``, filled up with ``absent`` to three elements."""
    return results + [absent] * (_MOST_GATE_RESULTS - len(results))


@lru_cache(maxsize=LAUNCH_CACHE_SIZE)
def _forward_launch(
    front: TritonFront,
    S: int,
    B: int,
    W: int,
    strides: tuple[int, int],
    gate_strides: tuple[int, int],
    is_wanted: tuple[bool, ...],
    has_gate_rows: bool,
    has_bias: bool,
    packed: bool,
    has_history: bool,
) -> Launch:
    """The forward's launch for S tokens of B batch rows and a convolution of W taps.

    ``strides``: the strides of S and B in the projection rows; ``gate_strides``: the
    same in the rows with the gates' columns. ``is_wanted``: for each section, whether
    its inputs of the rule are computed. ``has_gate_rows``: the layout's gates have rows
    of their own. ``has_bias``: the convolution has a bias. ``packed``: the rows are of
    several documents. ``has_history``: there are rows before the first tokens.
    """
    tile = front.tile or front_forward_tile(S * B, _widest_head_columns(front))
    # Triton computes offsets inside a tile with 32 bits. The offsets in the rows and in
    # every output must fit.
    tile = tile_of_32_bit_offsets(
        within_grid(tile, S, B),
        S,
        W,
        [strides[0], gate_strides[0]] + _elements_per_token(front),
    )
    require_32_bits("the number of tokens of a tile's end", S + tile.tokens + W)
    tables = kernel_tables(front, has_gate_rows)
    programs = [section.program_count for section in tables.convolved + tables.gates]
    # the index of the first wanted section, and one past the last
    first = is_wanted.index(True)
    end = len(is_wanted) - is_wanted[::-1].index(True)
    # A grid counts programs without gaps.
    assert all(is_wanted[first:end]), "wanted sections must be adjacent"
    return Launch(
        front_forward_kernel,
        (sum(programs[first:end]), triton.cdiv(S, tile.tokens), B),
        S,
        tile.steps,
        sum(programs[:first]),
        strides[0],
        strides[1],
        gate_strides[0],
        gate_strides[1],
        L2NORM_EPS,
        **tables.constants(),
        num_warps=tile.warps,
        **_constants(front, tile, W, has_bias, packed, has_history),
    )


class _BackwardPlan(NamedTuple):
    """The backward's launch, and the shape of the partial sums that it writes."""

    launch: Launch
    # rows of partial sums for each batch row, one for each tile of tokens
    tile_count: int
    column_count: int  # columns of partial sums, for the gradients of all parameters


@lru_cache(maxsize=LAUNCH_CACHE_SIZE)
def _backward_plan(
    front: TritonFront,
    S: int,
    B: int,
    W: int,
    strides: tuple[int, ...],
    d_heads: tuple[int, ...],
    element_bytes: tuple[int, int],
    has_gate_rows: bool,
    has_bias: bool,
    packed: bool,
    has_factor: bool,
    has_history: bool,
) -> _BackwardPlan:
    """The backward's launch and the shape of its partial sums.

    ``strides``: the strides of S and B in the projection rows, the rows with the gates,
    and the gradients of both. ``d_heads``: for each input of the rule, the number of
    heads of its gradient, a multiple of the input's heads. ``element_bytes``: the bytes
    of an element of the rows, and of a convolved input's gradient. ``has_factor``:
    gradients get a factor per head. The others are as in :func:`_forward_launch`.
    """
    layout = front.layout
    heads = [output.shape[0] for output in front.section_outputs for _ in output.names]
    # how many heads of an input's gradient are summed for one head of the input
    summed_heads = []
    for of_gradient, of_input in zip(d_heads, heads, strict=True):
        assert of_gradient % of_input == 0, (d_heads, heads)
        summed_heads.append(of_gradient // of_input)
    tile = front.tile or front_backward_tile(
        S * B, _widest_head_columns(front), has_history
    )
    tile = within_grid(tile, S, B)
    gradient_widths = [
        summed * width
        for summed, width in zip(summed_heads, _elements_per_token(front), strict=True)
    ]
    # strides[::2]: from token to token, without the strides of B
    tile = tile_of_32_bit_offsets(tile, S, W, list(strides[::2]) + gradient_widths)
    require_32_bits("the number of tokens of a tile's end", S + tile.tokens + W)
    tables = kernel_tables(
        front, has_gate_rows, backward=True, summed_heads=summed_heads
    )
    row_bytes, gradient_bytes = element_bytes
    # bytes per token of a head: of the row's channels, and of the gradients that are
    # summed
    prefetched_bytes = [
        part.block_width * (row_bytes + part.summed_heads * gradient_bytes)
        for part in tables.convolved
    ]
    tile = within_shared_memory(tile, max(prefetched_bytes))
    # The tile has segments of ``steps`` tokens. In a shorter segment the kernel would
    # also write dx of the previous segment's tokens.
    assert tile.steps >= W - 1, "a segment must have at least W - 1 steps"
    tiles = triton.cdiv(S, tile.tokens)
    # the columns of weight and bias come before those of A_log and dt_bias
    rate_column = layout.conv_width * (W + has_bias)
    (gate_with_A_log,) = (gate for gate in front.table.gate_sections if gate.has_A_log)
    # A_log has an element per head, dt_bias one per column of the gate.
    gate_heads, gate_width = layout.shape_of(gate_with_A_log.section)
    columns = rate_column + gate_heads + gate_heads * gate_width
    programs = sum(section.program_count for section in tables.gates + tables.convolved)
    launch = Launch(
        front_backward_kernel,
        (programs, tiles, B),
        S,
        tile.steps,
        *strides,
        L2NORM_EPS,
        **tables.constants(),
        num_warps=tile.warps,
        **_constants(front, tile, W, has_bias, packed, has_history),
        H=layout.state_heads,
        RATE_COLUMN=rate_column,
        COLUMNS=columns,
        SCALED=has_factor,
    )
    return _BackwardPlan(launch, tiles, columns)


def _widest_head_columns(front: TritonFront) -> int:
    """The number of columns of the widest convolved head."""
    widths = []
    for part in front.table.convolved_sections:
        _, width = front.layout.shape_of(part.section)
        widths.append(width)
    return max(widths)


def _elements_per_token(front: TritonFront) -> list[int]:
    """For each input of the rule, its number of elements per token. This is the
    distance from token to token in a contiguous ``[B, S, ...]``."""
    return [
        torch.Size(output.shape).numel()
        for output in front.section_outputs
        for _ in output.names
    ]


class ConvolvedConstants(NamedTuple):
    """A section's tuple in the kernels' argument CONVOLVED; the kernels read it by the
    indices of :mod:`.kernels`."""

    first_program: int
    program_count: int  # one for each head
    first_channel: int
    head_dim: int
    block_width: int  # head_dim rounded up to a power of two
    has_unit_length: bool
    summed_heads: int  # heads of the gradient per head of the rule's input


class GateConstants(NamedTuple):
    """A gate's tuple in the kernels' argument GATES; the kernels read it by the indices
    of :mod:`.kernels`."""

    first_program: int
    program_count: int  # one for each head if the gate is per channel, else one
    first_column: int
    columns: int  # of one program
    block_width: int  # columns rounded up to a power of two
    per_channel: bool
    result_count: int  # 1 or 2
    has_A_log: bool
    low: float
    high: float
    summed_heads: int  # heads of the gradient per head of the rule's input
    in_gate_rows: bool  # whether the columns are in the gates' own rows


class KernelTables(NamedTuple):
    """A front's table as constants of the kernels."""

    convolved: tuple[ConvolvedConstants, ...]
    gates: tuple[GateConstants, ...]
    # by the kernels' argument names
    gate_functions: dict[str, object]

    def constants(self) -> dict[str, object]:
        """All constants by the kernels' argument names, as plain tuples for Triton."""
        convolved = tuple(tuple(part) for part in self.convolved)
        return {"CONVOLVED": convolved} | self.gate_constants()

    def gate_constants(self) -> dict[str, object]:
        """Only the constants of the gates."""
        gates = tuple(tuple(gate) for gate in self.gates)
        return {"GATES": gates} | self.gate_functions


def kernel_tables(
    front: Front,
    has_gate_rows: bool = False,
    *,
    backward: bool = False,
    summed_heads: Sequence[int] | None = None,
) -> KernelTables:
    """The table of ``front`` as constants of the forward kernel or, with ``backward``,
    of the backward kernel.

    ``has_gate_rows``: the layout's gates have rows of their own. ``summed_heads``: for
    each input of the rule, how many heads of its gradient are summed for one head;
    None: 1. A decode step uses only the gates' constants.

    The sections number their programs one after the other: convolved sections first in
    the forward, gates first in the backward.
    """
    layout = front.layout
    table = front.table
    if summed_heads is None:
        summed_heads = [1] * len(front.input_names)
    first_program = 0
    if not backward:  # the gates' programs come after the convolved heads'
        for part in table.convolved_sections:
            heads, _ = layout.shape_of(part.section)
            first_program += heads
    gates = []
    input_index = _CONVOLVED_COUNT  # of the gate's first input of the rule
    for gate in table.gate_sections:
        input_count = len(gate.rule_inputs)
        of_gate = summed_heads[input_index : input_index + input_count]
        assert len(set(of_gate)) == 1, "a gate's results share their number of heads"
        heads, width = layout.shape_of(gate.section)
        programs, columns = (heads, width) if gate.per_channel else (1, heads)
        first_column = layout.columns(gate.section).start
        in_gate_rows = has_gate_rows and first_column >= layout.main_width
        if in_gate_rows:
            first_column -= layout.main_width
        gates.append(
            GateConstants(
                first_program,
                programs,
                first_column,
                columns,
                block_dim(columns),
                gate.per_channel,
                input_count,
                gate.has_A_log,
                float(gate.low),
                float(gate.high),
                of_gate[0],
                in_gate_rows,
            )
        )
        first_program += programs
        input_index += input_count
    if not backward:
        first_program = 0
    convolved = []
    # not strict: ``summed_heads`` also has the gates' inputs, after the convolved ones
    for part, summed in zip(table.convolved_sections, summed_heads, strict=False):
        heads, head_dim = layout.shape_of(part.section)
        convolved.append(
            ConvolvedConstants(
                first_program,
                heads,
                front.conv_channels[part.section].start,
                head_dim,
                block_dim(head_dim),
                part.has_unit_length,
                summed,
            )
        )
        first_program += heads
    suffix = "_backward" if backward else ""
    functions = [
        getattr(gate_kernels, gate.function.__name__ + suffix)
        for gate in table.gate_sections
    ]
    arguments = ("FIRST_FUNCTION", "SECOND_FUNCTION", "THIRD_FUNCTION")
    by_argument = zip(arguments, _with_three_results(functions, None), strict=True)
    return KernelTables(tuple(convolved), tuple(gates), dict(by_argument))


def _constants(
    front: TritonFront,
    tile: FrontTile,
    W: int,
    has_bias: bool,
    packed: bool,
    has_history: bool,
) -> dict[str, object]:
    """The compile options of both kernels, and their constexpr arguments that are not
    in :class:`KernelTables`.

    ``tile``: how many tokens a program computes. The others are as in
    :func:`_forward_launch`. For packed rows, a batch-invariant front runs the code with
    masks in every tile, without fused multiply-adds; :class:`TritonFront` says why.
    """
    assert tile.steps % 4 == 0, "the loop is unrolled four times"
    always_masked = front.batch_invariant and packed
    layout = front.layout
    return {
        "FIRST_CONV_COLUMN": layout.conv_columns.start,
        "C": layout.conv_width,
        "W": W,
        "ROWS": tile.rows,
        "STAGES": tile.stages,
        "HAS_BIAS": has_bias,
        "PACKED": packed,
        "HAS_HISTORY": has_history,
        "ALWAYS_MASKED": always_masked,
        "maxnreg": tile.registers,
        "enable_fp_fusion": not always_masked,
    }
