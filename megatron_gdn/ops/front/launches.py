"""A front with one Triton launch forward and one backward; :mod:`.plain` is the
twin."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import ClassVar

import torch
import triton
from torch import Tensor

from ..kernels.launch import MOST_PLANS, Launch
from ..kernels.reduce import sum_rows
from ..kernels.tiles import (
    SegmentTile,
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
from .kernels import (
    AT_BLOCK,
    AT_COUNT,
    AT_SUMMED,
    front_backward_kernel,
    front_forward_kernel,
)
from .table import Batch, Front, FrontTable

_EPS = 1e-6  # as in :func:`..elementwise.l2norm`
_MOST_GATES = 3


@dataclass(frozen=True, eq=False)
class TritonFront(Front):
    """The front in Triton. Rows and the conv weight must be contiguous; W is at least
    2.

    With ``batch_invariant``, packed rows take one code path without fused
    multiply-adds, since a compiler may fuse a product and a sum in one copy of a loop
    and not in another copy.
    """

    tile: SegmentTile | None = None  # None: :mod:`..kernels.tiles` chooses the tile

    triton: ClassVar[bool] = True

    @cached_property
    def outputs(self) -> tuple[tuple[tuple[str, ...], tuple[int, ...]], ...]:
        """Names and shape (``[heads]``, ``[heads, dim]``) of the rule inputs of each
        section."""
        shape_of = self.layout.shape_of
        table = self.table
        made: list[tuple[tuple[str, ...], tuple[int, ...]]] = [
            ((part.rule_input,), shape_of(part.section)) for part in table.convolved
        ]
        for gate in table.gates:
            heads, width = shape_of(gate.section)
            made.append(
                (gate.rule_input, (heads, width) if gate.channels else (heads,))
            )
        return tuple(made)

    def _make_inputs(
        self, batch: Batch, wanted: tuple[str, ...]
    ) -> dict[str, Tensor | None]:
        """Compute the rule's inputs that ``wanted`` names, in one launch."""
        proj, given, documents, history = batch
        S, B, _ = proj.shape
        made: dict[str, Tensor | None] = {}
        wanted_outputs = [
            any(name in wanted for name in names) for names, _ in self.outputs
        ]
        if not any(wanted_outputs):
            return made
        for index, (names, shape) in enumerate(self.outputs):
            if index < 3:
                dtype = self.dtype
            else:
                dtype = torch.float32
            for name in names:
                if wanted_outputs[index]:
                    x = proj.new_empty((B, S) + shape, dtype=dtype)
                else:
                    x = None
                made[name] = x
        if given.apart is None:
            gate_rows = proj
        else:
            gate_rows = given.apart
        lead, place = lead_in(
            history if any(wanted_outputs[:3]) else None, given.weight
        )
        launch = _forward_launch(
            self,
            S,
            B,
            given.weight.shape[-1],
            proj.stride()[:2],
            gate_rows.stride()[:2],
            tuple(wanted_outputs),
            given.apart is not None,
            given.bias is not None,
            documents is not None,
            lead is not None,
        )
        # For an output that is not wanted, the kernel gets a pointer to another tensor
        # of the same dtype and does not use the pointer. So all choices of outputs
        # share one compilation.
        outs = list(made.values())
        stand_in = next((x for x in outs[:3] if x is not None), proj)
        outs = [stand_in if x is None else x for x in outs[:3]] + [
            given.A_log if x is None else x for x in _padded(outs[3:], None)
        ]
        launch(
            proj,
            gate_rows,
            given.weight,
            given.bias,
            given.A_log,
            given.dt_bias,
            None if documents is None else documents.position_T,
            lead,
            place,
            *outs,
        )
        return made

    def _compute_gradients(
        self, batch: Batch, grads: object, d_proj: Tensor, d_apart: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        """Return gradients of the parameters; write those of rows to ``d_proj`` and
        ``d_apart``."""
        proj, given, documents, history = batch
        S, B, _ = proj.shape
        d_made = [
            getattr(grads, name).contiguous()
            for names, _ in self.outputs
            for name in names
        ]
        d_inputs = d_made[:3] + _padded(d_made[3:], given.A_log)
        factor = getattr(grads, "factor", None)
        weight, bias, A_log, dt_bias = given[:4]
        gate_rows, d_gate_rows = (
            (proj, d_proj) if d_apart is None else (given.apart, d_apart)
        )
        assert gate_rows is not None
        lead, place = lead_in(history, weight)
        if lead is None:
            d_lead = None
        else:
            d_lead = torch.empty_like(lead)
        launch, (tiles, columns) = _backward_plan(
            self,
            S,
            B,
            weight.shape[-1],
            proj.stride()[:2]
            + gate_rows.stride()[:2]
            + d_proj.stride()[:2]
            + d_gate_rows.stride()[:2],
            tuple([x.shape[2] for x in d_made]),
            (proj.element_size(), d_made[2].element_size()),
            d_apart is not None,
            bias is not None,
            documents is not None,
            factor is not None,
            lead is not None,
        )
        # The lead-in's backward adds a row of partial sums for each piece of each batch
        # row.
        rows = B * (tiles + (0 if lead is None else len(lead)))
        partial = torch.empty(rows, columns, dtype=torch.float32, device=proj.device)
        launch(
            proj,
            gate_rows,
            weight,
            bias,
            A_log,
            dt_bias,
            None if documents is None else documents.position_T,
            lead,
            place,
            *d_inputs,
            factor,
            d_proj,
            d_gate_rows,
            partial,
            d_lead,
        )
        if history is not None and d_lead is not None:
            lead_in_backward(history, weight, d_lead, partial[B * tiles :])
        made = [None if x is None else torch.empty_like(x) for x in given[:4]]
        sum_rows(partial, *[x for x in made if x is not None])
        return tuple(made)


def gates_without_kernels(table: FrontTable) -> tuple[str, ...]:
    """The sections whose gate is no function of :mod:`.gates` with a twin in
    `.gate_kernels`."""
    lacking = []
    for gate in table.gates:
        name = getattr(gate.function, "__name__", "")
        ours = gate.function is getattr(plain_gates, name, None)
        if not ours or not hasattr(gate_kernels, f"{name}_backward"):
            lacking.append(gate.section)
    return tuple(lacking)


def _padded[Item](per_gate: list[Item], absent: Item) -> list[Item]:
    """The list ``per_gate``, one element for each gate, filled up to three with
    ``absent``."""
    return per_gate + [absent] * (_MOST_GATES - len(per_gate))


@lru_cache(maxsize=MOST_PLANS)
def _forward_launch(
    front: TritonFront,
    S: int,
    B: int,
    W: int,
    strides: tuple[int, int],
    gate_strides: tuple[int, int],
    wanted_outputs: tuple[bool, ...],
    gates_apart: bool,
    has_bias: bool,
    packed: bool,
    has_history: bool,
) -> Launch:
    """The forward's launch; ``wanted_outputs``: for each section, whether its output is
    computed.

    ``gates_apart``: the layout's gates have rows of their own. ``gate_strides``:
    strides of S and B in these rows. ``has_bias``: the convolution has a bias.
    ``has_history``: history is given.
    """
    tile = front.tile or front_forward_tile(S * B, _widest_head(front))
    tile = tile_of_32_bit_offsets(
        within_grid(tile, S, B),
        S,
        W,
        [strides[0], gate_strides[0]] + _elements_per_token(front),
    )
    require_32_bits("the number of tokens of a tile's end", S + tile.tokens + W)
    convolved, gates, functions = kernel_tables(front, gates_apart)
    slots = [of[AT_COUNT] for of in convolved + gates]
    first = wanted_outputs.index(True)
    last = len(wanted_outputs) - wanted_outputs[::-1].index(True)
    assert all(wanted_outputs[first:last]), "wanted sections must be adjacent"
    return Launch(
        front_forward_kernel,
        (sum(slots[first:last]), triton.cdiv(S, tile.tokens), B),
        S,
        tile.steps,
        sum(slots[:first]),
        strides[0],
        strides[1],
        gate_strides[0],
        gate_strides[1],
        _EPS,
        CONVOLVED=convolved,
        GATES=gates,
        **functions,
        **_constants(front, tile, W, has_bias, packed, has_history),
    )


@lru_cache(maxsize=MOST_PLANS)
def _backward_plan(
    front: TritonFront,
    S: int,
    B: int,
    W: int,
    strides: tuple[int, ...],
    d_heads: tuple[int, ...],
    element_bytes: tuple[int, int],
    gates_apart: bool,
    has_bias: bool,
    packed: bool,
    has_factor: bool,
    has_history: bool,
) -> tuple[Launch, tuple[int, int]]:
    """The backward's launch, and the numbers of tiles and of columns of the partial
    sums.

    ``d_heads``: the number of heads of each gradient. ``element_bytes``: the bytes of
    an element of the rows, of a gradient. ``has_factor``: gradients get a factor per
    head.
    """
    layout = front.layout
    heads = [shape[0] for names, shape in front.outputs for _ in names]
    assert all(of % n == 0 for of, n in zip(d_heads, heads, strict=True)), (
        d_heads,
        heads,
    )
    groups = [of // n for of, n in zip(d_heads, heads, strict=True)]
    tile = front.tile or front_backward_tile(S * B, _widest_head(front))
    tile = within_grid(tile, S, B)
    widths = [
        group * width
        for group, width in zip(groups, _elements_per_token(front), strict=True)
    ]
    tile = tile_of_32_bit_offsets(tile, S, W, list(strides[::2]) + widths)
    require_32_bits("the number of tokens of a tile's end", S + tile.tokens + W)
    convolved, gates, functions = kernel_tables(front, gates_apart, "_backward", groups)
    copied = [
        of[AT_BLOCK] * (element_bytes[0] + of[AT_SUMMED] * element_bytes[1])
        for of in convolved
    ]
    tile = within_shared_memory(tile, max(copied))
    assert tile.steps >= W - 1, "a segment must have at least W - 1 steps"
    tiles = triton.cdiv(S, tile.tokens)
    rate_column = layout.conv_width * (W + has_bias)
    (rated,) = (gate for gate in front.table.gates if gate.rated)
    n, width = layout.shape_of(rated.section)
    columns = rate_column + n + n * width
    launch = Launch(
        front_backward_kernel,
        (sum(of[AT_COUNT] for of in gates + convolved), tiles, B),
        S,
        tile.steps,
        *strides,
        _EPS,
        CONVOLVED=convolved,
        GATES=gates,
        **functions,
        **_constants(front, tile, W, has_bias, packed, has_history),
        H=layout.state_heads,
        RATE_COLUMN=rate_column,
        COLUMNS=columns,
        SCALED=has_factor,
    )
    return launch, (tiles, columns)


def _widest_head(front: TritonFront) -> int:
    return max(front.layout.shape_of(part.section)[1] for part in front.table.convolved)


def _elements_per_token(front: TritonFront) -> list[int]:
    """The number of elements per token of every input of the rule."""
    made = [(names, torch.Size(shape).numel()) for names, shape in front.outputs]
    return [width for names, width in made for _ in names]


def kernel_tables(
    front: Front,
    gates_apart: bool = False,
    suffix: str = "",
    groups: Sequence[int] | None = None,
) -> tuple[tuple[tuple, ...], tuple[tuple, ...], dict[str, object]]:
    """The kernels' arguments CONVOLVED and GATES, and the gates' functions by argument
    name.

    ``suffix``: end of the functions' names, "" or "_backward". ``groups``: for each
    input, how many heads of its gradient are summed for one head. ``gates_apart``: the
    layout's gates have their own rows.
    """
    layout = front.layout
    convolved = []
    gates = []
    place = 3
    if groups is None:
        groups = [1] * len(front.names)
    # The gates' programs take the last slots in the forward and the first slots in the
    # backward.
    if suffix:
        slot = 0
    else:
        slot = sum(layout.shape_of(x.section)[0] for x in front.table.convolved)
    for gate in front.table.gates:
        heads, width = layout.shape_of(gate.section)
        programs, columns = (heads, width) if gate.channels else (1, heads)
        first = layout.columns(gate.section).start
        apart = gates_apart and first >= layout.main_width
        if apart:
            first -= layout.main_width
        gates.append(
            (
                slot,
                programs,
                first,
                columns,
                block_dim(columns),
                gate.channels,
                len(gate.rule_input),
                gate.rated,
                float(gate.low),
                float(gate.high),
                groups[place],
                apart,
            )
        )
        slot = slot + programs
        place = place + len(gate.rule_input)
    if not suffix:
        slot = 0
    for part, group in zip(front.table.convolved, groups, strict=False):
        heads, dim = layout.shape_of(part.section)
        channel = front.channels[part.section].start
        unit = part.unit_length
        convolved.append((slot, heads, channel, dim, block_dim(dim), unit, group))
        slot += heads
    functions = [
        getattr(gate_kernels, x.function.__name__ + suffix) for x in front.table.gates
    ]
    names = ("GATE", "SECOND_GATE", "THIRD_GATE")
    return (
        tuple(convolved),
        tuple(gates),
        dict(zip(names, _padded(functions, None), strict=True)),
    )


def _constants(
    front: TritonFront,
    tile: SegmentTile,
    W: int,
    has_bias: bool,
    packed: bool,
    has_history: bool,
) -> dict[str, object]:
    """Constexpr arguments and compile options of both kernels; ``tile``: how tokens are
    cut."""
    assert tile.steps % 4 == 0, "the loop is unrolled four times"
    always_masked = front.batch_invariant and packed
    layout = front.layout
    return {
        "FIRST": layout.conv_columns.start,
        "C": layout.conv_width,
        "W": W,
        "ROWS": tile.rows,
        "STAGES": tile.stages,
        "HAS_BIAS": has_bias,
        "PACKED": packed,
        "HAS_HISTORY": has_history,
        "ALWAYS_MASKED": always_masked,
        "num_warps": tile.warps,
        "maxnreg": tile.registers,
        "enable_fp_fusion": not always_masked,
    }
