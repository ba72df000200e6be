"""The Triton kernels of a front's forward and backward; each computes all sections of a
row.

Element (t, b, column) of the rows is at ``t * stride_s + b * stride_b + column``.
Arithmetic is fp32, with one rounding at the store. The backward computes activations
again from the rows. A program computes, for one tile of tokens, one head of a convolved
section or some columns of a gate. :mod:`.launches` passes the front's table as two
constants, tuples of tuples:

    CONVOLVED  for each of the three sections, a `.launches.ConvolvedConstants`
    GATES      for each gate section, a `.launches.GateConstants`

Each gate's function is a separate constant, because Triton's cache key contains the
source of a function only if the function itself is a constant.

Legend: in names of tensors T is tokens, D is columns. ``program`` numbers the programs
of one tile of tokens. BLOCK is D rounded up to a power of two, ``real_*`` the mask of
the elements that exist.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .conv_backward import walk_head_backward
from .conv_forward import meets_a_boundary, walk_head

# The indices of the fields that both kinds of constants have.
FIRST_PROGRAM_INDEX = tl.constexpr(0)
PROGRAM_COUNT_INDEX = tl.constexpr(1)
COLUMN_INDEX = tl.constexpr(2)
WIDTH_INDEX = tl.constexpr(3)
BLOCK_WIDTH_INDEX = tl.constexpr(4)
# The indices of further fields of `.launches.ConvolvedConstants`.
UNIT_LENGTH_INDEX = tl.constexpr(5)
SUMMED_HEADS_INDEX = tl.constexpr(6)
# The indices of further fields of `.launches.GateConstants`.
PER_CHANNEL_INDEX = tl.constexpr(5)
RESULT_COUNT_INDEX = tl.constexpr(6)
HAS_A_LOG_INDEX = tl.constexpr(7)
LOWER_BOUND_INDEX = tl.constexpr(8)
UPPER_BOUND_INDEX = tl.constexpr(9)
GATE_SUMMED_HEADS_INDEX = tl.constexpr(10)
IN_GATE_ROWS_INDEX = tl.constexpr(11)
# elements (tokens times columns) of a gate's tile, at most 8 per thread
_GATE_TILE_ELEMENTS = tl.constexpr(1024)


@triton.jit
def _convolve_section(
    rows_ptr,
    weight_ptr,
    bias_ptr,
    position_ptr,
    lead_ptr,
    place_ptr,
    out_ptr,
    program,
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
    CONVOLVED: tl.constexpr,
    SECTION_INDEX: tl.constexpr,
):
    """Convolve one head of section SECTION_INDEX, if ``program`` is one of this
    section's programs.

    ``rows_ptr`` points at channel 0 of batch row ``b``, ``lead_ptr`` at row 0 of the
    lead-in of ``b``. ``start``: the tile's first token. ``out_ptr``: the section's
    output [B, S, HEADS, D]. ALWAYS_MASKED: run the code with masks in every tile, not
    only near the ends of documents and of the sequence. The other arguments are as in
    :func:`front_forward_kernel`.

    Most tiles are far from such ends and run a faster copy of the code, without masks.
    Edge tokens are near the start of a document or sequence, so the faster copy reads
    no lead-in.
    """
    FIRST_PROGRAM: tl.constexpr = CONVOLVED[SECTION_INDEX][FIRST_PROGRAM_INDEX]
    HEADS: tl.constexpr = CONVOLVED[SECTION_INDEX][PROGRAM_COUNT_INDEX]
    CHANNEL: tl.constexpr = CONVOLVED[SECTION_INDEX][COLUMN_INDEX]
    D: tl.constexpr = CONVOLVED[SECTION_INDEX][WIDTH_INDEX]
    BLOCK: tl.constexpr = CONVOLVED[SECTION_INDEX][BLOCK_WIDTH_INDEX]
    UNIT_LENGTH: tl.constexpr = CONVOLVED[SECTION_INDEX][UNIT_LENGTH_INDEX]
    if (program >= FIRST_PROGRAM) & (program < FIRST_PROGRAM + HEADS):
        head = program - FIRST_PROGRAM
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
                UNIT_LENGTH,
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
                UNIT_LENGTH,
            )


@triton.jit
def _compute_gate_section(
    rows_ptr,
    A_log_ptr,
    dt_bias_ptr,
    first_ptr,
    second_ptr,
    program,
    b,
    start,
    S,
    tokens,
    stride_s,
    FUNCTION: tl.constexpr,
    GATES: tl.constexpr,
    GATE_INDEX: tl.constexpr,
):
    """Write FUNCTION's results for one tile of tokens, if ``program`` is one of the
    programs of gate GATE_INDEX.

    ``rows_ptr`` points at batch row ``b`` of the rows with the gate's columns.
    ``first_ptr``, ``second_ptr``: receive the first and, if there is one, the second
    result, fp32 [B, S, PROGRAMS D] each. ``A_log_ptr``, ``dt_bias_ptr``: the
    parameters, read if HAS_A_LOG. ``start``, ``tokens``: first token and number of
    tokens of the tile. FUNCTION: one of :mod:`.gate_kernels`.

    If PER_CHANNEL, a program computes the D channels of one head. If not, one program
    computes the D heads of the gate.
    """
    FIRST_PROGRAM: tl.constexpr = GATES[GATE_INDEX][FIRST_PROGRAM_INDEX]
    PROGRAMS: tl.constexpr = GATES[GATE_INDEX][PROGRAM_COUNT_INDEX]
    COLUMN: tl.constexpr = GATES[GATE_INDEX][COLUMN_INDEX]
    D: tl.constexpr = GATES[GATE_INDEX][WIDTH_INDEX]
    BLOCK: tl.constexpr = GATES[GATE_INDEX][BLOCK_WIDTH_INDEX]
    PER_CHANNEL: tl.constexpr = GATES[GATE_INDEX][PER_CHANNEL_INDEX]
    RESULT_COUNT: tl.constexpr = GATES[GATE_INDEX][RESULT_COUNT_INDEX]
    HAS_A_LOG: tl.constexpr = GATES[GATE_INDEX][HAS_A_LOG_INDEX]
    LOW: tl.constexpr = GATES[GATE_INDEX][LOWER_BOUND_INDEX]
    HIGH: tl.constexpr = GATES[GATE_INDEX][UPPER_BOUND_INDEX]
    TILE_TOKENS: tl.constexpr = (
        _GATE_TILE_ELEMENTS // BLOCK if BLOCK < _GATE_TILE_ELEMENTS else 1
    )
    if (program >= FIRST_PROGRAM) & (program < FIRST_PROGRAM + PROGRAMS):
        head = program - FIRST_PROGRAM  # 0 if the gate has a value per head
        end = min(start + tokens, S) - start  # tokens of the tile within the sequence
        d_D = tl.arange(0, BLOCK)
        real_D = d_D < D
        A_log_1D = 0.0
        dt_bias_1D = 0.0
        if HAS_A_LOG:
            # a vector in both cases: all channels of a head share its A_log
            head_D = head + 0 * d_D if PER_CHANNEL else d_D
            A_log_1D = tl.load(A_log_ptr + head_D, mask=real_D).to(tl.float32)[None, :]
            dt_bias_D = tl.load(dt_bias_ptr + head * D + d_D, mask=real_D)
            dt_bias_1D = dt_bias_D.to(tl.float32)[None, :]
        base = tl.cast(start, tl.int64)
        rows_ptr += base * stride_s + (COLUMN + head * D)
        out = (b * S + base) * (PROGRAMS * D) + head * D
        for first_token in tl.range(0, end, TILE_TOKENS):
            t_T = first_token + tl.arange(0, TILE_TOKENS)
            real_TD = (t_T < end)[:, None] & real_D[None, :]
            x_TD = tl.load(rows_ptr + t_T[:, None] * stride_s + d_D[None, :], real_TD)
            x_TD = x_TD.to(tl.float32)
            if HAS_A_LOG:
                x_TD += dt_bias_1D
            first_TD, second_TD = FUNCTION(x_TD, A_log_1D, LOW, HIGH)
            out_TD = out + t_T[:, None] * (PROGRAMS * D) + d_D[None, :]
            tl.store(first_ptr + out_TD, first_TD, mask=real_TD)
            if RESULT_COUNT == 2:
                tl.store(second_ptr + out_TD, second_TD, mask=real_TD)


# one variant for all lengths: Triton would compile others for multiples of 16
@triton.jit(do_not_specialize=["S", "steps", "first_program"])
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
    conv0_ptr,
    conv1_ptr,
    conv2_ptr,
    gate0_ptr,
    gate1_ptr,
    gate2_ptr,
    S,
    steps,
    first_program,
    stride_s,
    stride_b,
    gates_stride_s,
    gates_stride_b,
    eps,
    CONVOLVED: tl.constexpr,
    GATES: tl.constexpr,
    FIRST_FUNCTION: tl.constexpr,
    SECOND_FUNCTION: tl.constexpr,
    THIRD_FUNCTION: tl.constexpr,
    FIRST_CONV_COLUMN: tl.constexpr,
    C: tl.constexpr,
    W: tl.constexpr,
    ROWS: tl.constexpr,
    STAGES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PACKED: tl.constexpr,
    HAS_HISTORY: tl.constexpr,
    ALWAYS_MASKED: tl.constexpr,
):
    """The front's forward. Grid: (programs of a tile of tokens; tiles; B).

    A tile has ROWS segments of ``steps`` tokens, of the S tokens of a batch row. The
    programs of a tile are those of the convolved heads, then those of the gates. A
    launch may compute only some sections. Then program 0 of the grid is number
    ``first_program`` of the tile. Programs of neighbouring heads run at the same time,
    so together they read whole rows.

    Writes the convolved sections to ``conv0_ptr``, ``conv1_ptr``, ``conv2_ptr`` and the
    gates to ``gate0_ptr``, ``gate1_ptr``, ``gate2_ptr``. If a table has only one gate,
    this gate may have a second result, which goes to ``gate1_ptr``.

    ``rows_ptr``: the projection rows; ``gates_ptr``: rows with the gates' columns that
    the projection rows lack. ``weight_ptr`` [C, 1, W], ``bias_ptr`` [C], ``A_log_ptr``,
    ``dt_bias_ptr``: the front's parameters. ``position_ptr``: each token's position in
    its document, read if PACKED. ``lead_ptr``: the lead-in of :mod:`.history`, read if
    HAS_HISTORY; ``place_ptr``: each token's row in the lead-in, or -1. ``*stride_s``,
    ``*stride_b``: elements from a token or batch row to the next. ``eps``: added to a
    head's sum of squares before its root is taken. ``*_FUNCTION``: the gates'
    functions. FIRST_CONV_COLUMN: the first column of a row that the convolution reads.
    STAGES: stages of loads that are prefetched. ALWAYS_MASKED: every tile runs the same
    code, for batch invariance.
    """
    program = tl.program_id(0) + first_program
    tokens = ROWS * steps
    start = tl.program_id(1) * tokens
    b = tl.cast(tl.program_id(2), tl.int64)
    row_ptr = rows_ptr + b * stride_b
    rows_ptr = row_ptr + FIRST_CONV_COLUMN
    gates_ptr += b * gates_stride_b
    lead_stride = tl.num_programs(2) * C  # the lead-in is [N, W - 1, B, C]
    if HAS_HISTORY:
        lead_ptr += b * C
    gates = (gate0_ptr, gate1_ptr, gate2_ptr)
    for n in tl.static_range(len(GATES)):
        _compute_gate_section(
            gates_ptr if GATES[n][IN_GATE_ROWS_INDEX] else row_ptr,
            A_log_ptr,
            dt_bias_ptr,
            gates[n],
            gate1_ptr,
            program,
            b,
            start,
            S,
            tokens,
            gates_stride_s if GATES[n][IN_GATE_ROWS_INDEX] else stride_s,
            (FIRST_FUNCTION, SECOND_FUNCTION, THIRD_FUNCTION)[n],
            GATES,
            n,
        )
    outs = (conv0_ptr, conv1_ptr, conv2_ptr)
    for n in tl.static_range(3):
        _convolve_section(
            rows_ptr,
            weight_ptr,
            bias_ptr,
            position_ptr,
            lead_ptr,
            place_ptr,
            outs[n],
            program,
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
def _convolve_section_backward(
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
    program,
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
    CONVOLVED: tl.constexpr,
    SECTION_INDEX: tl.constexpr,
):
    """Backward of :func:`_convolve_section`.

    ``grad_ptr``: the output's gradient. It has GROUP heads for each head of the output,
    and the kernel sums these GROUP heads. If SCALED, the true gradient of state head h
    is the given gradient times entry h of ``factor_ptr [H]``: a rule in fp16 scales
    gradients so that they fit into fp16. State heads that share a head of this section
    have equal factors.

    ``d_rows_ptr`` and ``d_lead_ptr`` point at the gradients of the elements at which
    ``rows_ptr`` and ``lead_ptr`` point. ``partial_ptr`` points at the tile's row of
    partial sums.
    """
    FIRST_PROGRAM: tl.constexpr = CONVOLVED[SECTION_INDEX][FIRST_PROGRAM_INDEX]
    HEADS: tl.constexpr = CONVOLVED[SECTION_INDEX][PROGRAM_COUNT_INDEX]
    CHANNEL: tl.constexpr = CONVOLVED[SECTION_INDEX][COLUMN_INDEX]
    D: tl.constexpr = CONVOLVED[SECTION_INDEX][WIDTH_INDEX]
    BLOCK: tl.constexpr = CONVOLVED[SECTION_INDEX][BLOCK_WIDTH_INDEX]
    UNIT_LENGTH: tl.constexpr = CONVOLVED[SECTION_INDEX][UNIT_LENGTH_INDEX]
    GROUP: tl.constexpr = CONVOLVED[SECTION_INDEX][SUMMED_HEADS_INDEX]
    if (program >= FIRST_PROGRAM) & (program < FIRST_PROGRAM + HEADS):
        head = program - FIRST_PROGRAM
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
                UNIT_LENGTH,
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
                UNIT_LENGTH,
                SCALED,
            )


@triton.jit
def _compute_gate_section_backward(
    rows_ptr,
    A_log_ptr,
    dt_bias_ptr,
    d_first_ptr,
    d_second_ptr,
    factor_ptr,
    d_rows_ptr,
    partial_ptr,
    program,
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
    GATES: tl.constexpr,
    GATE_INDEX: tl.constexpr,
):
    """Backward of :func:`_compute_gate_section`.

    ``d_first_ptr``, ``d_second_ptr``: the gradients of the first and of the second
    result. Each value has GROUP gradients, which are summed. RATE_COLUMN: the column of
    ``partial_ptr`` where the sums for A_log and dt_bias begin. The other arguments are
    as in :func:`_convolve_section_backward`.
    """
    FIRST_PROGRAM: tl.constexpr = GATES[GATE_INDEX][FIRST_PROGRAM_INDEX]
    PROGRAMS: tl.constexpr = GATES[GATE_INDEX][PROGRAM_COUNT_INDEX]
    COLUMN: tl.constexpr = GATES[GATE_INDEX][COLUMN_INDEX]
    D: tl.constexpr = GATES[GATE_INDEX][WIDTH_INDEX]
    BLOCK: tl.constexpr = GATES[GATE_INDEX][BLOCK_WIDTH_INDEX]
    PER_CHANNEL: tl.constexpr = GATES[GATE_INDEX][PER_CHANNEL_INDEX]
    RESULT_COUNT: tl.constexpr = GATES[GATE_INDEX][RESULT_COUNT_INDEX]
    HAS_A_LOG: tl.constexpr = GATES[GATE_INDEX][HAS_A_LOG_INDEX]
    LOW: tl.constexpr = GATES[GATE_INDEX][LOWER_BOUND_INDEX]
    HIGH: tl.constexpr = GATES[GATE_INDEX][UPPER_BOUND_INDEX]
    GROUP: tl.constexpr = GATES[GATE_INDEX][GATE_SUMMED_HEADS_INDEX]
    HEADS: tl.constexpr = PROGRAMS if PER_CHANNEL else D
    # half of the forward's tile, since the backward keeps more values per element
    TILE_TOKENS: tl.constexpr = (
        _GATE_TILE_ELEMENTS // 2 // BLOCK if BLOCK < _GATE_TILE_ELEMENTS // 2 else 1
    )
    # The GROUP gradients of a value are COPY_DISTANCE elements apart. The first
    # gradients of two neighbouring columns are COLUMN_DISTANCE elements apart.
    COPY_DISTANCE: tl.constexpr = D if PER_CHANNEL else 1
    COLUMN_DISTANCE: tl.constexpr = 1 if PER_CHANNEL else GROUP
    if (program >= FIRST_PROGRAM) & (program < FIRST_PROGRAM + PROGRAMS):
        head = program - FIRST_PROGRAM  # 0 if the gate has a value per head
        end = min(start + tokens, S) - start  # tokens of the tile within the sequence
        d_D = tl.arange(0, BLOCK)
        real_D = d_D < D
        # a vector in both cases: all channels of a head share A_log and factor
        head_D = head + 0 * d_D if PER_CHANNEL else d_D
        A_log_1D = 0.0
        dt_bias_1D = 0.0
        if HAS_A_LOG:
            A_log_1D = tl.load(A_log_ptr + head_D, mask=real_D).to(tl.float32)[None, :]
            dt_bias_D = tl.load(dt_bias_ptr + head * D + d_D, mask=real_D)
            dt_bias_1D = dt_bias_D.to(tl.float32)[None, :]
        factor_1D = 1.0
        if SCALED:
            factor_1D = tl.load(factor_ptr + head_D * (H // HEADS), real_D)[None, :]
        base = tl.cast(start, tl.int64)
        rows_ptr += base * stride_s + (COLUMN + head * D)
        d_rows_ptr += base * d_stride_s + (COLUMN + head * D)
        grad = ((b * S + base) * (PROGRAMS * D) + head * D) * GROUP
        d_A_log_TD = tl.zeros((TILE_TOKENS, BLOCK), tl.float32)
        d_dt_bias_TD = tl.zeros((TILE_TOKENS, BLOCK), tl.float32)
        for first_token in tl.range(0, end, TILE_TOKENS):
            t_T = first_token + tl.arange(0, TILE_TOKENS)
            real_TD = (t_T < end)[:, None] & real_D[None, :]
            x_TD = tl.load(rows_ptr + t_T[:, None] * stride_s + d_D[None, :], real_TD)
            x_TD = x_TD.to(tl.float32)
            if HAS_A_LOG:
                x_TD += dt_bias_1D
            at_TD = (
                grad
                + t_T[:, None] * (PROGRAMS * D * GROUP)
                + d_D[None, :] * COLUMN_DISTANCE
            )
            d_first_TD = tl.zeros((TILE_TOKENS, BLOCK), tl.float32)
            d_second_TD = d_first_TD
            for member in tl.static_range(GROUP):
                d_first_TD += tl.load(
                    d_first_ptr + at_TD + member * COPY_DISTANCE, real_TD
                )
                if RESULT_COUNT == 2:
                    d_second_TD += tl.load(
                        d_second_ptr + at_TD + member * COPY_DISTANCE, real_TD
                    )
            if SCALED:
                # Only a rule in fp16 scales gradients, and its gates have one result.
                tl.static_assert(RESULT_COUNT == 1)
                d_first_TD = d_first_TD * factor_1D
            d_x_TD, d_A_log_term_TD = FUNCTION(
                x_TD, A_log_1D, d_first_TD, d_second_TD, LOW, HIGH
            )
            if HAS_A_LOG:
                d_A_log_TD += tl.where(real_TD, d_A_log_term_TD, 0.0)
                d_dt_bias_TD += tl.where(real_TD, d_x_TD, 0.0)
            out_TD = d_rows_ptr + t_T[:, None] * d_stride_s + d_D[None, :]
            tl.store(out_TD, d_x_TD.to(d_rows_ptr.dtype.element_ty), mask=real_TD)
        if HAS_A_LOG:
            d_A_log_D = tl.sum(d_A_log_TD, axis=0)
            partial_ptr += RATE_COLUMN
            if PER_CHANNEL:
                tl.store(partial_ptr + head, tl.sum(d_A_log_D, axis=0))
            else:
                tl.store(partial_ptr + d_D, d_A_log_D, mask=real_D)
            d_dt_bias_ptr = partial_ptr + HEADS + head * D
            tl.store(d_dt_bias_ptr + d_D, tl.sum(d_dt_bias_TD, axis=0), mask=real_D)


# one variant for all lengths
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
    d_conv0_ptr,
    d_conv1_ptr,
    d_conv2_ptr,
    d_gate0_ptr,
    d_gate1_ptr,
    d_gate2_ptr,
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
    FIRST_FUNCTION: tl.constexpr,
    SECOND_FUNCTION: tl.constexpr,
    THIRD_FUNCTION: tl.constexpr,
    FIRST_CONV_COLUMN: tl.constexpr,
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
    """The front's backward. Grid: (programs of a tile of tokens; tiles; B).

    The programs of a tile are those of the gates, then those of the convolved heads.

    Reads the gradients of the convolved sections (``d_conv0_ptr``, ``d_conv1_ptr``,
    ``d_conv2_ptr``) and of the gates (``d_gate0_ptr``, ``d_gate1_ptr``,
    ``d_gate2_ptr``). Writes the gradients of the rows to ``d_rows_ptr``, of
    ``gates_ptr`` to ``d_gates_ptr``, of the lead-in to ``d_lead_ptr``. The other
    arguments are as in the forward and in :func:`_convolve_section_backward`.

    Each tile has a row of COLUMNS partial sums in ``partial_ptr``. The sums are for the
    gradients of the conv weight [C, W] and conv bias [C] and, from column RATE_COLUMN
    on, of A_log and dt_bias. Each program writes some columns of its tile's row; a
    second launch adds the rows of all tiles in a fixed order.
    """
    program = tl.program_id(0)
    tile = tl.program_id(1)
    tokens = ROWS * steps
    start = tile * tokens
    b = tl.cast(tl.program_id(2), tl.int64)
    row_ptr = rows_ptr + b * stride_b
    d_row_ptr = d_rows_ptr + b * d_stride_b
    rows_ptr = row_ptr + FIRST_CONV_COLUMN
    d_rows_ptr = d_row_ptr + FIRST_CONV_COLUMN
    gates_ptr += b * gates_stride_b
    d_gates_ptr += b * d_gates_stride_b
    partial_ptr += (b * tl.num_programs(1) + tile) * COLUMNS
    lead_stride = tl.num_programs(2) * C  # the lead-in is [N, W - 1, B, C]
    if HAS_HISTORY:
        lead_ptr += b * C
        d_lead_ptr += b * C
    gates = (d_gate0_ptr, d_gate1_ptr, d_gate2_ptr)
    for n in tl.static_range(len(GATES)):
        _compute_gate_section_backward(
            gates_ptr if GATES[n][IN_GATE_ROWS_INDEX] else row_ptr,
            A_log_ptr,
            dt_bias_ptr,
            gates[n],
            d_gate1_ptr,
            factor_ptr,
            d_gates_ptr if GATES[n][IN_GATE_ROWS_INDEX] else d_row_ptr,
            partial_ptr,
            program,
            b,
            start,
            S,
            tokens,
            gates_stride_s if GATES[n][IN_GATE_ROWS_INDEX] else stride_s,
            d_gates_stride_s if GATES[n][IN_GATE_ROWS_INDEX] else d_stride_s,
            H,
            SCALED,
            RATE_COLUMN,
            (FIRST_FUNCTION, SECOND_FUNCTION, THIRD_FUNCTION)[n],
            GATES,
            n,
        )
    grads = (d_conv0_ptr, d_conv1_ptr, d_conv2_ptr)
    for n in tl.static_range(3):
        _convolve_section_backward(
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
            program,
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
