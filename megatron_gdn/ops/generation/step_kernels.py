"""Decode one token of each of N sequences in two Triton launches.

    conv_step_kernel   row, history           -> q, k, v, and the shifted history
    state_step_kernel  q, k, v, gates, state  -> o, and the next state

:mod:`.step` has the twin in plain torch. If sequences have slots, every program loads
the number of its sequence's slot from GPU memory. A program overwrites only elements
that no other program reads. The front's table names the gates' functions, which
:mod:`..front.gate_kernels` defines. If a gate has one value per head, every row of the
head's state uses this value.

Legend: as in :mod:`.step`; M slots, G heads of q and k; D in a tile's name: channels of
a head.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..elementwise import L2NORM_EPS
from ..front.kernels import (
    COLUMN_INDEX,
    HAS_A_LOG_INDEX,
    LOWER_BOUND_INDEX,
    PER_CHANNEL_INDEX,
    PROGRAM_COUNT_INDEX,
    UPPER_BOUND_INDEX,
    WIDTH_INDEX,
)
from ..front.launches import kernel_tables
from ..front.table import Front, FrontParameterList
from ..kernels.elementwise import sigmoid
from ..kernels.launch import LAUNCH_CACHE_SIZE, Launch
from ..kernels.tiles import MOST_PROGRAMS, block_dim, require_32_bits

# history, state and slots: a :class:`.memory.Memory`
type MemoryTensors = tuple[Tensor, Tensor, Tensor | None]

# columns of a state per program; few, so that one sequence has many programs
_COLUMNS_OF_PROGRAM = 32


def decode_token_in_slots(
    row: Tensor,
    front: Front,
    parameters: FrontParameterList,
    memory: MemoryTensors,
    after: MemoryTensors | None,
) -> Tensor:
    """Run front and rule for one token of each sequence; return o ``[N, 1, H, V]`` in
    fp32.

    Args:
        row: the tokens' projection rows ``[1, N, P]``; a row's columns are adjacent in
            memory.
        parameters: the list of :class:`..front.table.Front`; the shared input, if there
            is one, is Mamba2's parameter D.
        memory: the memory before this token; overwritten. Each history is a contiguous
            ``[C, W - 1]`` or ``[C, W]``; each state ``[H, K, V]`` is contiguous, or a
            view of a contiguous ``[H, V, K]``.
        after: more buffers, to which the new memory is written too; or None.
    """
    weight, bias, A_log, dt_bias, *skip = parameters
    D = skip[0] if skip else None
    N = row.shape[1]
    history, state, slots = memory
    after_history = None
    after_state = None
    after_strides = None
    if after is not None:
        after_history, after_state, _ = after
        after_strides = (after_history.stride(0), after_state.stride(0))
    assert row.stride(2) == 1 and history.stride()[1:] == (history.shape[2], 1)
    conv, step = _step_launches(
        front,
        N,
        row.stride(1),
        weight.shape[-1],
        history.shape[2],
        bias is not None,
        0 if D is None else D.numel(),
        state.stride(-1) != 1,
        slots is not None,
        (history.stride(0), state.stride(0)),
        after_strides,
    )
    convolved = torch.empty(
        N, front.layout.conv_width, dtype=torch.float32, device=row.device
    )
    o = convolved.new_empty(
        N, 1, front.table.state_shape.heads, front.table.state_shape.columns
    )
    conv(row, weight, bias, history, after_history, slots, convolved)
    step(row, convolved, A_log, dt_bias, D, state, after_state, slots, o)
    return o


@lru_cache(maxsize=LAUNCH_CACHE_SIZE)
def _step_launches(
    front: Front,
    N: int,
    row_stride: int,
    taps: int,
    history_rows: int,
    has_bias: bool,
    D_size: int,
    transposed: bool,
    has_slots: bool,
    strides: tuple[int, int],
    after_strides: tuple[int, int] | None,
) -> tuple[Launch, Launch]:
    """The launches of :func:`conv_step_kernel` and :func:`state_step_kernel`, for one
    token of N sequences.

    Args:
        row_stride: elements from row to row.
        taps: W.
        history_rows: inputs per channel in a history.
        D_size: elements of the parameter D; 0 without D.
        transposed: whether a state is [V, K] in memory.
        has_slots: whether the kernels load slot numbers.
        strides: elements from slot to slot, of the histories and of the states.
        after_strides: the same for the second buffers; None if there are none.
    """
    table = front.table
    layout = front.layout
    H, K, V, _ = front.table.state_shape
    _require_sequences_within_grid(N)
    require_32_bits(
        "the number of elements of a state", H * block_dim(K) * block_dim(V)
    )
    require_32_bits(
        "the number of inputs of a history", layout.conv_width * (history_rows + taps)
    )
    starts = [front.conv_channels[name].start for name in table.qkv_sections]

    G, _ = layout.shape_of(table.qkv_sections[0])
    shape = {
        "G": G,
        "H": H,
        "K": K,
        "V": V,
        "C": layout.conv_width,
        "Q_AT": starts[0],
        "K_AT": starts[1],
        "V_AT": starts[2],
        "STEPS": table.steps,
        "BLOCK_K": block_dim(K),
        "HAS_SLOTS": has_slots,
        "HAS_AFTER": after_strides is not None,
    }
    after_strides = after_strides or (0, 0)
    conv = Launch(
        conv_step_kernel,
        (G + table.steps * (G + H), N),
        row_stride,
        strides[0],
        after_strides[0],
        layout.conv_columns.start,
        L2NORM_EPS,
        W=taps,
        HISTORY_ROWS=history_rows,
        BLOCK_V=block_dim(V),
        HAS_BIAS=has_bias,
        UNIT_LENGTH=table.normalises_qk,
        num_warps=1,
        **shape,
    )
    block_v = min(_COLUMNS_OF_PROGRAM, block_dim(V))
    step = Launch(
        state_step_kernel,
        (triton.cdiv(V, block_v), H, N),
        row_stride,
        strides[1],
        after_strides[1],
        table.scale,
        **kernel_tables(front).gate_constants(),
        BLOCK_V=block_v,
        D_PER_HEAD=D_size // H,
        ERASES=table.erases,
        TRANSPOSED=transposed,
        num_warps=4,
        **shape,
    )
    return conv, step


@triton.jit
def conv_step_kernel(
    row_ptr,
    weight_ptr,
    bias_ptr,
    history_ptr,
    after_ptr,
    slot_ptr,
    out_ptr,
    stride_n,
    history_stride,
    after_stride,
    first,
    eps,
    G: tl.constexpr,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    Q_AT: tl.constexpr,
    K_AT: tl.constexpr,
    V_AT: tl.constexpr,
    STEPS: tl.constexpr,
    W: tl.constexpr,
    HISTORY_ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    UNIT_LENGTH: tl.constexpr,
    HAS_SLOTS: tl.constexpr,
    HAS_AFTER: tl.constexpr,
):
    """Convolve one head of one sequence; grid (G + STEPS (G + H), N).

    The heads are G heads of q, then STEPS G heads of k, then STEPS H heads of v: k and
    v have their own heads for each of the STEPS updates. ``row_ptr``: rows,
    ``stride_n`` elements apart. ``history_ptr``: HISTORY_ROWS inputs per channel, which
    the kernel shifts by one input. If HAS_AFTER, the shifted history is also written to
    ``after_ptr``. ``*_stride``: elements from slot to slot. ``slot_ptr``: slot numbers
    if HAS_SLOTS, else sequence n is in slot n. UNIT_LENGTH: q and k get unit length.
    Q_AT, K_AT, V_AT: the first channels of q, k, v. BLOCK_*: K, V rounded up to powers
    of two. ``first``: the first convolved column of a row. ``out_ptr``: the result
    [N, C], fp32.
    """
    head = tl.program_id(0)
    n = tl.program_id(1).to(tl.int64)
    slot = n
    if HAS_SLOTS:
        slot = tl.load(slot_ptr + n).to(tl.int64)
    row_ptr += n * stride_n + first
    history_ptr += slot * history_stride
    out_ptr += n * C
    if HAS_AFTER:
        after_ptr += slot * after_stride
    if head < (1 + STEPS) * G:
        column = head * K + Q_AT
        if head >= G:
            column = (head - G) * K + K_AT
        conv_head_step(
            row_ptr,
            weight_ptr,
            bias_ptr,
            history_ptr,
            after_ptr,
            out_ptr,
            column,
            slot >= 0,
            eps,
            K,
            BLOCK_K,
            W,
            HISTORY_ROWS,
            HAS_BIAS,
            UNIT_LENGTH,
            HAS_AFTER,
        )
    else:
        conv_head_step(
            row_ptr,
            weight_ptr,
            bias_ptr,
            history_ptr,
            after_ptr,
            out_ptr,
            (head - (1 + STEPS) * G) * V + V_AT,
            slot >= 0,
            eps,
            V,
            BLOCK_V,
            W,
            HISTORY_ROWS,
            HAS_BIAS,
            False,
            HAS_AFTER,
        )


@triton.jit
def conv_head_step(
    row_ptr,
    weight_ptr,
    bias_ptr,
    history_ptr,
    after_ptr,
    out_ptr,
    column,
    has_slot,
    eps,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    W: tl.constexpr,
    HISTORY_ROWS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    UNIT_LENGTH: tl.constexpr,
    HAS_AFTER: tl.constexpr,
):
    """Convolve the D channels of one head of one row, and shift the HISTORY_ROWS inputs
    of the head's history by one input.

    ``row_ptr``, ``history_ptr``, ``after_ptr`` and ``out_ptr`` point at channel 0 of
    the sequence. If HAS_AFTER, the shifted history is also written to ``after_ptr``; if
    UNIT_LENGTH, the result gets unit length. ``column`` is the head's first channel.
    The program is one warp, so all its lanes load an input before a lane overwrites it.
    If ``has_slot`` is False, the sequence has no slot, and the program neither loads
    nor stores.
    """
    d_D = tl.arange(0, BLOCK_D)
    real_D = (d_D < D) & has_slot
    x_raw = tl.load(row_ptr + column + d_D, mask=real_D)
    taps_ptr = weight_ptr + (column + d_D) * W
    past_ptr = history_ptr + (column + d_D) * HISTORY_ROWS
    pre_D = x_raw.to(tl.float32) * tl.load(taps_ptr + W - 1, mask=real_D).to(tl.float32)
    for place in tl.static_range(HISTORY_ROWS):
        past_raw = tl.load(past_ptr + place, mask=real_D)
        if place >= HISTORY_ROWS - (W - 1):
            tap_ptr = taps_ptr + (place - (HISTORY_ROWS - (W - 1)))
            tap_D = tl.load(tap_ptr, mask=real_D).to(tl.float32)
            pre_D += past_raw.to(tl.float32) * tap_D
        if place > 0:
            tl.store(past_ptr + place - 1, past_raw, mask=real_D)
            if HAS_AFTER:
                tl.store(
                    after_ptr + (column + d_D) * HISTORY_ROWS + place - 1,
                    past_raw,
                    mask=real_D,
                )
    tl.store(past_ptr + HISTORY_ROWS - 1, x_raw, mask=real_D)
    if HAS_AFTER:
        tl.store(
            after_ptr + (column + d_D) * HISTORY_ROWS + HISTORY_ROWS - 1,
            x_raw,
            mask=real_D,
        )
    if HAS_BIAS:
        pre_D += tl.load(bias_ptr + column + d_D, mask=real_D).to(tl.float32)
    act_D = pre_D * sigmoid(pre_D)
    if UNIT_LENGTH:
        act_D = tl.where(real_D, act_D, 0.0)
        act_D = act_D * tl.rsqrt(tl.sum(act_D * act_D, axis=0) + eps)
    tl.store(out_ptr + column + d_D, act_D, mask=real_D)


@triton.jit
def state_step_kernel(
    row_ptr,
    convolved_ptr,
    A_log_ptr,
    dt_bias_ptr,
    D_ptr,
    state_ptr,
    after_ptr,
    slot_ptr,
    o_ptr,
    stride_n,
    state_stride,
    after_stride,
    scale,
    FIRST_FUNCTION: tl.constexpr,
    SECOND_FUNCTION: tl.constexpr,
    THIRD_FUNCTION: tl.constexpr,
    GATES: tl.constexpr,
    G: tl.constexpr,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    Q_AT: tl.constexpr,
    K_AT: tl.constexpr,
    V_AT: tl.constexpr,
    STEPS: tl.constexpr,
    D_PER_HEAD: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    ERASES: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    HAS_SLOTS: tl.constexpr,
    HAS_AFTER: tl.constexpr,
):
    """Compute BLOCK_V columns of a head's next state and of its o; grid
    (ceil(V / BLOCK_V), H, N).

    The state decays, then gets STEPS updates, then is read. ``row_ptr``: the projection
    rows, ``stride_n`` elements apart. ``A_log_ptr``, ``dt_bias_ptr``: the parameters of
    the decay gate. ``convolved_ptr``: q, k, v [N, C] from `conv_step_kernel`.
    ``state_ptr``: the states, overwritten, ``state_stride`` elements from slot to slot.
    TRANSPOSED: a state is [V, K] in memory. ``o_ptr``: the output [N, H, V]. ``D_ptr``:
    the parameter D, D_PER_HEAD elements per head (0, 1 or V). ERASES: S^T k is
    subtracted from v, as in the delta rule. The first gate is the decay, the second the
    write strength. If there is a third gate, it is the write strength of each column,
    and the second only scales the subtracted S^T k. Without a second gate, the decay's
    second result is the write strength.

    If HAS_AFTER, the next state is also written to ``after_ptr``. A sequence whose slot
    is below zero gets o = 0. The other arguments are as in `conv_step_kernel`.
    """
    h, n = tl.program_id(1), tl.program_id(2).to(tl.int64)
    slot = n
    if HAS_SLOTS:
        slot = tl.load(slot_ptr + n).to(tl.int64)
    k_K = tl.arange(0, BLOCK_K)
    v_V = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    real_K = k_K < K
    real_V = v_V < V
    there_K = real_K & (slot >= 0)
    real_KV = there_K[:, None] & real_V[None, :]
    if TRANSPOSED:
        place_KV = h * (K * V) + v_V[None, :] * K + k_K[:, None]
    else:
        place_KV = h * (K * V) + k_K[:, None] * V + v_V[None, :]
    at_KV = state_ptr + slot * state_stride + place_KV
    convolved_ptr += n * C
    group = h // (H // G)
    q_K = tl.load(convolved_ptr + group * K + Q_AT + k_K, mask=there_K, other=0.0)
    there_V = real_V & (slot >= 0)
    row_ptr += n * stride_n
    g_K, other_K = _compute_gate(
        row_ptr, A_log_ptr, dt_bias_ptr, h, k_K, real_K, FIRST_FUNCTION, GATES, 0, H, K
    )
    S_KV = tl.load(at_KV, mask=real_KV, other=0.0).to(tl.float32) * tl.exp(g_K)[:, None]
    value_V = tl.zeros((BLOCK_V,), tl.float32)
    for step in tl.static_range(STEPS):
        key_at = K_AT + (step * G + group) * K
        key_K = tl.load(convolved_ptr + key_at + k_K, mask=there_K, other=0.0)
        value_at = V_AT + (step * H + h) * V
        value_V = tl.load(convolved_ptr + value_at + v_V, mask=there_V)
        write_K = other_K
        if SECOND_FUNCTION is not None:
            write_K, _ = _compute_gate(
                row_ptr,
                A_log_ptr,
                dt_bias_ptr,
                step * H + h,
                k_K,
                real_K,
                SECOND_FUNCTION,
                GATES,
                1,
                STEPS * H,
                K,
            )
        x_V = value_V
        if THIRD_FUNCTION is not None:
            write_V, _ = _compute_gate(
                row_ptr,
                A_log_ptr,
                dt_bias_ptr,
                step * H + h,
                v_V,
                real_V,
                THIRD_FUNCTION,
                GATES,
                2,
                STEPS * H,
                V,
            )
            x_V = write_V * value_V - tl.sum(S_KV * (write_K * key_K)[:, None], axis=0)
            S_KV += key_K[:, None] * x_V[None, :]
        else:
            if ERASES:
                x_V = value_V - tl.sum(S_KV * key_K[:, None], axis=0)
            S_KV += (write_K * key_K)[:, None] * x_V[None, :]
    tl.store(at_KV, S_KV.to(state_ptr.dtype.element_ty), mask=real_KV)
    if HAS_AFTER:
        kept_KV = S_KV.to(after_ptr.dtype.element_ty)
        tl.store(after_ptr + slot * after_stride + place_KV, kept_KV, mask=real_KV)
    o_V = tl.sum(S_KV * (q_K * scale)[:, None], axis=0)
    if D_PER_HEAD > 0:
        D_V = tl.load(D_ptr + h * D_PER_HEAD + v_V % D_PER_HEAD, mask=real_V)
        o_V += D_V.to(tl.float32) * value_V
    o_V = tl.where(slot >= 0, o_V, 0.0)
    tl.store(o_ptr + (n * H + h) * V + v_V, o_V, mask=real_V)


@triton.jit
def _compute_gate(
    row_ptr,
    A_log_ptr,
    dt_bias_ptr,
    h,
    k_K,
    real_K,
    FUNCTION: tl.constexpr,
    GATES: tl.constexpr,
    GATE_INDEX: tl.constexpr,
    H: tl.constexpr,
    K: tl.constexpr,
):
    """Both results of FUNCTION, the function of gate number GATE_INDEX, for channels
    ``k_K`` of head h, as fp32 vectors. The second one means something only for functions
    with two results.

    ``row_ptr`` points at the sequence's projection row. ``h`` is a head's number. H is
    the number of heads of the state, or of all its updates together. ``real_K`` is the
    mask k_K < K. K is the number of a state's rows, or of its columns for the third
    gate. GATES has the columns and settings of all gates, as ``GATES`` in
    :mod:`..front.kernels`.
    """
    COLUMN: tl.constexpr = GATES[GATE_INDEX][COLUMN_INDEX]
    CHANNELS: tl.constexpr = GATES[GATE_INDEX][PER_CHANNEL_INDEX]
    HEADS: tl.constexpr = (
        GATES[GATE_INDEX][PROGRAM_COUNT_INDEX]
        if CHANNELS
        else GATES[GATE_INDEX][WIDTH_INDEX]
    )
    h = h // (H // HEADS)  # several heads of the state may share one head of the gate
    # A gate per head has one value for all channels. ``0 * k_K`` makes it a vector too.
    column_K = h * K + k_K if CHANNELS else h + 0 * k_K
    x_K = tl.load(row_ptr + COLUMN + column_K, mask=real_K, other=0.0).to(tl.float32)
    A_log_K = 0.0
    if GATES[GATE_INDEX][HAS_A_LOG_INDEX]:
        A_log_K = tl.load(A_log_ptr + h + 0 * k_K).to(tl.float32)
        x_K += tl.load(dt_bias_ptr + column_K, mask=real_K, other=0.0).to(tl.float32)
    return FUNCTION(
        x_K,
        A_log_K,
        GATES[GATE_INDEX][LOWER_BOUND_INDEX],
        GATES[GATE_INDEX][UPPER_BOUND_INDEX],
    )


def write_slots_on_gpu(buffer: Tensor, slots: Tensor, values: Tensor) -> None:
    """``buffer[slots] = values`` without the slots below zero.

    ``buffer [M, ...]``, ``slots [N]`` integers, ``values [N, ...]`` contiguous. The
    values of one slot must be contiguous in ``buffer``.
    """
    launch = _write_slots_launch(len(values), values[0].numel(), buffer.stride(0))
    launch(buffer, slots, values)


@lru_cache(maxsize=LAUNCH_CACHE_SIZE)
def _write_slots_launch(N: int, size: int, stride: int) -> Launch:
    """The launch of :func:`write_slots_kernel` for N sequences.

    ``size``: elements of a slot. ``stride``: elements from slot to slot.
    """
    _require_sequences_within_grid(N)
    require_32_bits("the number of elements of a slot", size + 4096)
    grid = triton.cdiv(size, 4096), N
    return Launch(write_slots_kernel, grid, stride, size, BLOCK=4096, num_warps=8)


def _require_sequences_within_grid(N: int) -> None:
    """Raise a ValueError if ``N`` sequences are more than a CUDA grid can count."""
    if N > MOST_PROGRAMS:
        raise ValueError(
            f"a call decodes {N} sequences, but the Triton kernels take at most "
            f"{MOST_PROGRAMS}. Decode them in several calls."
        )


@triton.jit
def write_slots_kernel(
    buffer_ptr, slot_ptr, values_ptr, stride, size, BLOCK: tl.constexpr
):
    """Copy BLOCK of the ``size`` values of sequence n to its slot; grid
    (ceil(size / BLOCK), N).

    ``values_ptr``: [N, size]. ``buffer_ptr``: the slots, ``stride`` elements apart.
    ``slot_ptr`` [N]: the slots' numbers; values of a slot below zero are not copied.
    """
    n = tl.program_id(1).to(tl.int64)
    slot = tl.load(slot_ptr + n).to(tl.int64)
    d_D = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    real_D = (d_D < size) & (slot >= 0)
    x_D = tl.load(values_ptr + n * size + d_D, mask=real_D)
    tl.store(buffer_ptr + slot * stride + d_D, x_D, mask=real_D)
