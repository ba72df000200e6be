"""The Triton kernels of a front's forward and backward; each computes all sections of a
row.

Element (t, b, column) of the rows is at ``t * stride_s + b * stride_b + column``.
Arithmetic is fp32, with one rounding at the store. The backward computes activations
again from the rows. :mod:`.launches` passes the front's table as two constant tuples:

    CONVOLVED  for each of three sections: first slot, heads, first channel, dim, block,
               unit length or not, gradients summed per head
    GATES      for each gate: first slot, programs, first column, columns of a program,
               block, per channel or not, number of results, rate or not, low, high,
               gradients summed, whether its columns are in rows of their own

Each gate's function is a separate constant, because Triton's cache key contains the
source of a function only if the function itself is a constant. In names of tiles T is
tokens, D is columns. A *slot* is a program's number in its token tile; a program
computes a head or columns of a gate.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .conv_backward import walk_head_backward
from .conv_forward import meets_a_boundary, walk_head

# Places in a section's tuple of CONVOLVED and in a gate's tuple of GATES; the first
# five are equal.
AT_SLOT, AT_COUNT, AT_COLUMN, AT_WIDTH, AT_BLOCK = map(tl.constexpr, range(5))
AT_UNIT, AT_SUMMED = map(tl.constexpr, (5, 6))  # of CONVOLVED
AT_CHANNELS, AT_RESULTS, AT_RATED, AT_LOW, AT_HIGH, AT_GATE_SUMMED, AT_APART = map(
    tl.constexpr, range(5, 12)
)
# elements (tokens times columns) of a gate's tile, at most 8 per thread
_SPAN = tl.constexpr(1024)


@triton.jit
def _convolve_slot(
    rows_ptr,
    weight_ptr,
    bias_ptr,
    position_ptr,
    lead_ptr,
    place_ptr,
    out_ptr,
    slot,
    b,
    start,
    S,
    steps,
    stride_s,
    lead_stride,
    eps,
    ROWS: tl.constexpr,
    STAGES: tl.constexpr,
    W: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PACKED: tl.constexpr,
    HAS_HISTORY: tl.constexpr,
    ALWAYS_MASKED: tl.constexpr,
    TABLE: tl.constexpr,
    SECTION_INDEX: tl.constexpr,
):
    """If ``slot`` belongs to a head of section SECTION_INDEX of TABLE, convolve this
    head.

    ``slot``: this program's number within the tile. TABLE: CONVOLVED, with one tuple
    per section. ``b``, ``start``: batch row and first token of the tile. ALWAYS_MASKED:
    run the code with masks in every tile, not only in a tile that meets an end of a
    document or of the sequence.
    """
    FIRST: tl.constexpr = TABLE[SECTION_INDEX][AT_SLOT]
    HEADS: tl.constexpr = TABLE[SECTION_INDEX][AT_COUNT]
    CHANNEL: tl.constexpr = TABLE[SECTION_INDEX][AT_COLUMN]
    D: tl.constexpr = TABLE[SECTION_INDEX][AT_WIDTH]
    BLOCK: tl.constexpr = TABLE[SECTION_INDEX][AT_BLOCK]
    UNIT: tl.constexpr = TABLE[SECTION_INDEX][AT_UNIT]
    if (slot >= FIRST) & (slot < FIRST + HEADS):
        head = slot - FIRST
        out_ptr += b * S * (HEADS * D) + head * D
        column = CHANNEL + head * D
        if ALWAYS_MASKED or meets_a_boundary(
            position_ptr, start, S, ROWS * steps, W, PACKED
        ):
            walk_head(
                rows_ptr,
                weight_ptr,
                bias_ptr,
                position_ptr,
                lead_ptr,
                place_ptr,
                out_ptr,
                column,
                start,
                S,
                steps,
                stride_s,
                lead_stride,
                HEADS * D,
                eps,
                D,
                ROWS,
                STAGES,
                BLOCK,
                W,
                HAS_BIAS,
                PACKED,
                HAS_HISTORY,
                True,
                UNIT,
            )
        else:
            walk_head(
                rows_ptr,
                weight_ptr,
                bias_ptr,
                position_ptr,
                lead_ptr,
                place_ptr,
                out_ptr,
                column,
                start,
                S,
                steps,
                stride_s,
                lead_stride,
                HEADS * D,
                eps,
                D,
                ROWS,
                STAGES,
                BLOCK,
                W,
                HAS_BIAS,
                PACKED,
                False,
                False,
                UNIT,
            )


@triton.jit
def _gate_slot(
    rows_ptr,
    A_log_ptr,
    dt_bias_ptr,
    first_ptr,
    second_ptr,
    slot,
    b,
    start,
    S,
    tokens,
    stride_s,
    FUNCTION: tl.constexpr,
    TABLE: tl.constexpr,
    GATE_INDEX: tl.constexpr,
):
    """Write FUNCTION's results for one tile of tokens, if ``slot`` is one of the slots
    of gate GATE_INDEX. TABLE is the tuple GATES of the module's docstring.

    ``first_ptr``, ``second_ptr``: receive the first and, if there is one, the second
    result. ``A_log_ptr``, ``dt_bias_ptr``: parameters A_log and dt_bias, read if the
    gate has a rate.
    """
    FIRST: tl.constexpr = TABLE[GATE_INDEX][AT_SLOT]
    PROGRAMS: tl.constexpr = TABLE[GATE_INDEX][AT_COUNT]
    COLUMN: tl.constexpr = TABLE[GATE_INDEX][AT_COLUMN]
    D: tl.constexpr = TABLE[GATE_INDEX][AT_WIDTH]
    BLOCK: tl.constexpr = TABLE[GATE_INDEX][AT_BLOCK]
    CHANNELS: tl.constexpr = TABLE[GATE_INDEX][AT_CHANNELS]
    MAKES: tl.constexpr = TABLE[GATE_INDEX][AT_RESULTS]
    RATED: tl.constexpr = TABLE[GATE_INDEX][AT_RATED]
    LOW: tl.constexpr = TABLE[GATE_INDEX][AT_LOW]
    HIGH: tl.constexpr = TABLE[GATE_INDEX][AT_HIGH]
    SPAN: tl.constexpr = _SPAN // BLOCK if BLOCK < _SPAN else 1
    if (slot >= FIRST) & (slot < FIRST + PROGRAMS):
        program = slot - FIRST
        end = min(start + tokens, S) - start
        d_D = tl.arange(0, BLOCK)
        real_D = d_D < D
        A_log_1D = 0.0
        bias_1D = 0.0
        if RATED:
            head_D = program + 0 * d_D if CHANNELS else d_D
            A_log_1D = tl.load(A_log_ptr + head_D, mask=real_D, other=0.0).to(
                tl.float32
            )[None, :]
            bias_D = tl.load(dt_bias_ptr + program * D + d_D, mask=real_D, other=0.0)
            bias_1D = bias_D.to(tl.float32)[None, :]
        base = tl.cast(start, tl.int64)
        rows_ptr += base * stride_s + (COLUMN + program * D)
        out = (b * S + base) * (PROGRAMS * D) + program * D
        for span in tl.range(0, end, SPAN):
            t_T = span + tl.arange(0, SPAN)
            real_TD = (t_T < end)[:, None] & real_D[None, :]
            x_TD = tl.load(
                rows_ptr + t_T[:, None] * stride_s + d_D[None, :], real_TD, 0.0
            )
            x_TD = x_TD.to(tl.float32)
            if RATED:
                x_TD += bias_1D
            y_TD, other_TD = FUNCTION(x_TD, A_log_1D, LOW, HIGH)
            out_TD = out + t_T[:, None] * (PROGRAMS * D) + d_D[None, :]
            tl.store(first_ptr + out_TD, y_TD, mask=real_TD)
            if MAKES == 2:
                tl.store(second_ptr + out_TD, other_TD, mask=real_TD)


@triton.jit(do_not_specialize=["S", "steps", "first_slot"])
def front_forward_kernel(
    rows_ptr,
    gates_ptr,
    weight_ptr,
    bias_ptr,
    A_log_ptr,
    dt_bias_ptr,
    position_ptr,
    lead_ptr,
    place_ptr,
    x_ptr,
    y_ptr,
    z_ptr,
    g_ptr,
    h_ptr,
    i_ptr,
    S,
    steps,
    first_slot,
    stride_s,
    stride_b,
    gates_stride_s,
    gates_stride_b,
    eps,
    CONVOLVED: tl.constexpr,
    GATES: tl.constexpr,
    GATE: tl.constexpr,
    SECOND_GATE: tl.constexpr,
    THIRD_GATE: tl.constexpr,
    FIRST: tl.constexpr,
    C: tl.constexpr,
    W: tl.constexpr,
    ROWS: tl.constexpr,
    STAGES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PACKED: tl.constexpr,
    HAS_HISTORY: tl.constexpr,
    ALWAYS_MASKED: tl.constexpr,
):
    """The front's forward. Grid: (slots of heads, then of gates; token tiles; B).

    Writes the convolved sections to ``x_ptr``, ``y_ptr``, ``z_ptr`` and the gates to
    ``g_ptr``, ``h_ptr``, ``i_ptr``; a table's only gate may write a second result, to
    ``h_ptr``. ``gates_ptr``: rows with the columns of the gates that are not in
    ``rows_ptr``. ``*stride_s``, ``*stride_b``: elements from a token or batch row to the
    next. GATE, SECOND_GATE, THIRD_GATE: the gates' functions. FIRST: first convolved
    column. ``first_slot``: the slot of program 0. Programs of neighbouring heads run at
    the same time, so together they read whole rows.
    """
    slot = tl.program_id(0) + first_slot
    tokens = ROWS * steps
    start = tl.program_id(1) * tokens
    b = tl.cast(tl.program_id(2), tl.int64)
    own_ptr = rows_ptr + b * stride_b
    rows_ptr = own_ptr + FIRST
    gates_ptr += b * gates_stride_b
    lead_stride = tl.num_programs(2) * C
    if HAS_HISTORY:
        lead_ptr += b * C
    gates = (g_ptr, h_ptr, i_ptr)
    for n in tl.static_range(len(GATES)):
        _gate_slot(
            gates_ptr if GATES[n][AT_APART] else own_ptr,
            A_log_ptr,
            dt_bias_ptr,
            gates[n],
            h_ptr,
            slot,
            b,
            start,
            S,
            tokens,
            gates_stride_s if GATES[n][AT_APART] else stride_s,
            (GATE, SECOND_GATE, THIRD_GATE)[n],
            GATES,
            n,
        )
    outs = (x_ptr, y_ptr, z_ptr)
    for n in tl.static_range(3):
        _convolve_slot(
            rows_ptr,
            weight_ptr,
            bias_ptr,
            position_ptr,
            lead_ptr,
            place_ptr,
            outs[n],
            slot,
            b,
            start,
            S,
            steps,
            stride_s,
            lead_stride,
            eps,
            ROWS,
            STAGES,
            W,
            HAS_BIAS,
            PACKED,
            HAS_HISTORY,
            ALWAYS_MASKED,
            CONVOLVED,
            n,
        )


@triton.jit
def _convolve_slot_backward(
    rows_ptr,
    weight_ptr,
    bias_ptr,
    position_ptr,
    lead_ptr,
    place_ptr,
    grad_ptr,
    factor_ptr,
    d_rows_ptr,
    partial_ptr,
    d_lead_ptr,
    slot,
    b,
    start,
    S,
    steps,
    stride_s,
    d_stride_s,
    lead_stride,
    eps,
    H: tl.constexpr,
    C: tl.constexpr,
    W: tl.constexpr,
    ROWS: tl.constexpr,
    STAGES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PACKED: tl.constexpr,
    HAS_HISTORY: tl.constexpr,
    ALWAYS_MASKED: tl.constexpr,
    SCALED: tl.constexpr,
    TABLE: tl.constexpr,
    SECTION_INDEX: tl.constexpr,
):
    """Backward of :func:`_convolve_slot`; if SCALED, ``factor_ptr [H]`` multiplies
    gradients."""
    FIRST: tl.constexpr = TABLE[SECTION_INDEX][AT_SLOT]
    HEADS: tl.constexpr = TABLE[SECTION_INDEX][AT_COUNT]
    CHANNEL: tl.constexpr = TABLE[SECTION_INDEX][AT_COLUMN]
    D: tl.constexpr = TABLE[SECTION_INDEX][AT_WIDTH]
    BLOCK: tl.constexpr = TABLE[SECTION_INDEX][AT_BLOCK]
    UNIT: tl.constexpr = TABLE[SECTION_INDEX][AT_UNIT]
    GROUP: tl.constexpr = TABLE[SECTION_INDEX][AT_SUMMED]
    if (slot >= FIRST) & (slot < FIRST + HEADS):
        head = slot - FIRST
        column = CHANNEL + head * D
        grad_ptr += (b * S * HEADS + head) * (GROUP * D)
        factor = tl.load(factor_ptr + head * (H // HEADS)) if SCALED else 1.0
        if ALWAYS_MASKED or meets_a_boundary(
            position_ptr, start, S, ROWS * steps, W, PACKED
        ):
            walk_head_backward(
                rows_ptr,
                weight_ptr,
                bias_ptr,
                position_ptr,
                lead_ptr,
                place_ptr,
                grad_ptr,
                d_rows_ptr,
                partial_ptr,
                d_lead_ptr,
                column,
                start,
                S,
                steps,
                stride_s,
                d_stride_s,
                lead_stride,
                HEADS * GROUP * D,
                factor,
                eps,
                D,
                C,
                GROUP,
                W,
                ROWS,
                STAGES,
                BLOCK,
                HAS_BIAS,
                PACKED,
                HAS_HISTORY,
                True,
                UNIT,
                SCALED,
            )
        else:
            walk_head_backward(
                rows_ptr,
                weight_ptr,
                bias_ptr,
                position_ptr,
                lead_ptr,
                place_ptr,
                grad_ptr,
                d_rows_ptr,
                partial_ptr,
                d_lead_ptr,
                column,
                start,
                S,
                steps,
                stride_s,
                d_stride_s,
                lead_stride,
                HEADS * GROUP * D,
                factor,
                eps,
                D,
                C,
                GROUP,
                W,
                ROWS,
                STAGES,
                BLOCK,
                HAS_BIAS,
                PACKED,
                False,
                False,
                UNIT,
                SCALED,
            )


@triton.jit
def _gate_slot_backward(
    rows_ptr,
    A_log_ptr,
    dt_bias_ptr,
    d_first_ptr,
    d_second_ptr,
    factor_ptr,
    d_rows_ptr,
    partial_ptr,
    slot,
    b,
    start,
    S,
    tokens,
    stride_s,
    d_stride_s,
    H: tl.constexpr,
    SCALED: tl.constexpr,
    RATE_COLUMN: tl.constexpr,
    FUNCTION: tl.constexpr,
    TABLE: tl.constexpr,
    GATE_INDEX: tl.constexpr,
):
    """Backward of :func:`_gate_slot`; ``d_first_ptr``, ``d_second_ptr``: the results'
    gradients.

    RATE_COLUMN: the column of ``partial_ptr`` where the sums for A_log and dt_bias
    begin.
    """
    FIRST: tl.constexpr = TABLE[GATE_INDEX][AT_SLOT]
    PROGRAMS: tl.constexpr = TABLE[GATE_INDEX][AT_COUNT]
    COLUMN: tl.constexpr = TABLE[GATE_INDEX][AT_COLUMN]
    D: tl.constexpr = TABLE[GATE_INDEX][AT_WIDTH]
    BLOCK: tl.constexpr = TABLE[GATE_INDEX][AT_BLOCK]
    CHANNELS: tl.constexpr = TABLE[GATE_INDEX][AT_CHANNELS]
    MAKES: tl.constexpr = TABLE[GATE_INDEX][AT_RESULTS]
    RATED: tl.constexpr = TABLE[GATE_INDEX][AT_RATED]
    LOW: tl.constexpr = TABLE[GATE_INDEX][AT_LOW]
    HIGH: tl.constexpr = TABLE[GATE_INDEX][AT_HIGH]
    GROUP: tl.constexpr = TABLE[GATE_INDEX][AT_GATE_SUMMED]
    HEADS: tl.constexpr = PROGRAMS if CHANNELS else D
    SPAN: tl.constexpr = _SPAN // 2 // BLOCK if BLOCK < _SPAN // 2 else 1
    # GROUP gradients are summed, which are D elements apart if the gate is per channel,
    # else 1.
    MEMBER: tl.constexpr = D if CHANNELS else 1
    APART: tl.constexpr = 1 if CHANNELS else GROUP
    if (slot >= FIRST) & (slot < FIRST + PROGRAMS):
        program = slot - FIRST
        end = min(start + tokens, S) - start
        d_D = tl.arange(0, BLOCK)
        real_D = d_D < D
        head_D = program + 0 * d_D if CHANNELS else d_D
        A_log_1D = 0.0
        bias_1D = 0.0
        if RATED:
            A_log_1D = tl.load(A_log_ptr + head_D, mask=real_D, other=0.0).to(
                tl.float32
            )[None, :]
            bias_D = tl.load(dt_bias_ptr + program * D + d_D, mask=real_D, other=0.0)
            bias_1D = bias_D.to(tl.float32)[None, :]
        factor_1D = 1.0
        if SCALED:
            factor_1D = tl.load(factor_ptr + head_D * (H // HEADS), real_D, 0.0)[
                None, :
            ]
        base = tl.cast(start, tl.int64)
        rows_ptr += base * stride_s + (COLUMN + program * D)
        d_rows_ptr += base * d_stride_s + (COLUMN + program * D)
        grad = ((b * S + base) * (PROGRAMS * D) + program * D) * GROUP
        d_A_TD = tl.zeros((SPAN, BLOCK), tl.float32)
        d_bias_TD = tl.zeros((SPAN, BLOCK), tl.float32)
        for span in tl.range(0, end, SPAN):
            t_T = span + tl.arange(0, SPAN)
            real_TD = (t_T < end)[:, None] & real_D[None, :]
            x_TD = tl.load(
                rows_ptr + t_T[:, None] * stride_s + d_D[None, :], real_TD, 0.0
            )
            x_TD = x_TD.to(tl.float32)
            if RATED:
                x_TD += bias_1D
            at_TD = grad + t_T[:, None] * (PROGRAMS * D * GROUP) + d_D[None, :] * APART
            d_y_TD = tl.zeros((SPAN, BLOCK), tl.float32)
            d_other_TD = d_y_TD
            for member in tl.static_range(GROUP):
                d_y_TD += tl.load(d_first_ptr + at_TD + member * MEMBER, real_TD, 0.0)
                if MAKES == 2:
                    d_other_TD += tl.load(
                        d_second_ptr + at_TD + member * MEMBER, real_TD, 0.0
                    )
            if SCALED:
                # Rules with gradients in fp16 have gates of one output.
                tl.static_assert(MAKES == 1)
                d_y_TD = d_y_TD * factor_1D
            d_x_TD, d_rate_TD = FUNCTION(x_TD, A_log_1D, d_y_TD, d_other_TD, LOW, HIGH)
            if RATED:
                d_A_TD += tl.where(real_TD, d_rate_TD, 0.0)
                d_bias_TD += tl.where(real_TD, d_x_TD, 0.0)
            out_TD = d_rows_ptr + t_T[:, None] * d_stride_s + d_D[None, :]
            tl.store(out_TD, d_x_TD.to(d_rows_ptr.dtype.element_ty), mask=real_TD)
        if RATED:
            d_A_D = tl.sum(d_A_TD, axis=0)
            partial_ptr += RATE_COLUMN
            if CHANNELS:
                tl.store(partial_ptr + program, tl.sum(d_A_D, axis=0))
            else:
                tl.store(partial_ptr + d_D, d_A_D, mask=real_D)
            of_bias_ptr = partial_ptr + HEADS + program * D
            tl.store(of_bias_ptr + d_D, tl.sum(d_bias_TD, axis=0), mask=real_D)


@triton.jit(do_not_specialize=["S", "steps"])
def front_backward_kernel(
    rows_ptr,
    gates_ptr,
    weight_ptr,
    bias_ptr,
    A_log_ptr,
    dt_bias_ptr,
    position_ptr,
    lead_ptr,
    place_ptr,
    dx_ptr,
    dy_ptr,
    dz_ptr,
    dg_ptr,
    dh_ptr,
    di_ptr,
    factor_ptr,
    d_rows_ptr,
    d_gates_ptr,
    partial_ptr,
    d_lead_ptr,
    S,
    steps,
    stride_s,
    stride_b,
    gates_stride_s,
    gates_stride_b,
    d_stride_s,
    d_stride_b,
    d_gates_stride_s,
    d_gates_stride_b,
    eps,
    CONVOLVED: tl.constexpr,
    GATES: tl.constexpr,
    GATE: tl.constexpr,
    SECOND_GATE: tl.constexpr,
    THIRD_GATE: tl.constexpr,
    FIRST: tl.constexpr,
    C: tl.constexpr,
    W: tl.constexpr,
    ROWS: tl.constexpr,
    STAGES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PACKED: tl.constexpr,
    HAS_HISTORY: tl.constexpr,
    ALWAYS_MASKED: tl.constexpr,
    H: tl.constexpr,
    RATE_COLUMN: tl.constexpr,
    COLUMNS: tl.constexpr,
    SCALED: tl.constexpr,
):
    """The front's backward. Grid: (slots of gates, then of heads; token tiles; B).

    Reads the gradients of the convolved sections (``dx_ptr``, ``dy_ptr``, ``dz_ptr``)
    and of the gates (``dg_ptr``, ``dh_ptr``, ``di_ptr``). Writes the gradients of the
    rows to ``d_rows_ptr``, of ``gates_ptr`` to ``d_gates_ptr``. Strides are as in
    the forward. Each tile has a row of COLUMNS partial sums in ``partial_ptr`` for the
    gradients of conv weight [C, W], conv bias [C] and, from column RATE_COLUMN on,
    A_log and dt_bias. Each program writes some columns of its tile's row; a second
    launch adds the rows of all tiles in a fixed order.
    """
    slot = tl.program_id(0)
    tile = tl.program_id(1)
    tokens = ROWS * steps
    start = tile * tokens
    b = tl.cast(tl.program_id(2), tl.int64)
    own_ptr = rows_ptr + b * stride_b
    d_own_ptr = d_rows_ptr + b * d_stride_b
    rows_ptr = own_ptr + FIRST
    d_rows_ptr = d_own_ptr + FIRST
    gates_ptr += b * gates_stride_b
    d_gates_ptr += b * d_gates_stride_b
    partial_ptr += (b * tl.num_programs(1) + tile) * COLUMNS
    lead_stride = tl.num_programs(2) * C
    if HAS_HISTORY:
        lead_ptr += b * C
        d_lead_ptr += b * C
    gates = (dg_ptr, dh_ptr, di_ptr)
    for n in tl.static_range(len(GATES)):
        _gate_slot_backward(
            gates_ptr if GATES[n][AT_APART] else own_ptr,
            A_log_ptr,
            dt_bias_ptr,
            gates[n],
            dh_ptr,
            factor_ptr,
            d_gates_ptr if GATES[n][AT_APART] else d_own_ptr,
            partial_ptr,
            slot,
            b,
            start,
            S,
            tokens,
            gates_stride_s if GATES[n][AT_APART] else stride_s,
            d_gates_stride_s if GATES[n][AT_APART] else d_stride_s,
            H,
            SCALED,
            RATE_COLUMN,
            (GATE, SECOND_GATE, THIRD_GATE)[n],
            GATES,
            n,
        )
    grads = (dx_ptr, dy_ptr, dz_ptr)
    for n in tl.static_range(3):
        _convolve_slot_backward(
            rows_ptr,
            weight_ptr,
            bias_ptr,
            position_ptr,
            lead_ptr,
            place_ptr,
            grads[n],
            factor_ptr,
            d_rows_ptr,
            partial_ptr,
            d_lead_ptr,
            slot,
            b,
            start,
            S,
            steps,
            stride_s,
            d_stride_s,
            lead_stride,
            eps,
            H,
            C,
            W,
            ROWS,
            STAGES,
            HAS_BIAS,
            PACKED,
            HAS_HISTORY,
            ALWAYS_MASKED,
            SCALED,
            CONVOLVED,
            n,
        )
