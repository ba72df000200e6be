"""Generation with a recurrent mixer: each call reads and overwrites a
:class:`.memory.Memory`.

    prefill   computes many tokens of a sequence, in chunks; dense or packed
    decode    computes one or a few tokens of every sequence, one after the other

Prefill and decode run the same :class:`.stages.Stages` as training. The tokens of a
sequence may be split over any number of calls, at any token; the results are the same
as with one call. No call has a backward. Of all calls, only a prefill on the grid makes
the host wait for the GPU.

If the front runs in Triton, a decoded token takes two kernel launches
(:mod:`.step_kernels`) and one launch of the readout. Without Triton, plain torch gives
the same results up to rounding.

Legend: s tokens, B batch rows, P projection width, N sequences (B, or the packed
documents), C conv channels, W conv taps, H heads with a state, K rows of a state, V
columns.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..documents import Documents
from ..elementwise import l2norm, silu
from ..front.history import history_of, last_rows
from ..front.table import Front
from ..rules.steps import spread_steps
from ..rules.token_rule import recurrence
from ..stages import Stages
from .aligned import decode_on_grid, prefill_on_grid
from .memory import Memory


@torch.no_grad()
def prefill(
    proj: Tensor,
    stages: Stages,
    memory: Memory,
    documents: Documents | None = None,
    *,
    begins: bool = False,
) -> Tensor:
    """Mix the next s tokens (any number) of N sequences; return ``[s, B, H * V]``.

    Args:
        proj: projection rows ``[s, B, P]``; dimensions s and B may have any strides.
        memory: the memory of the N sequences before these tokens; overwritten.
        documents: the boundaries, if N sequences lie end to end in one batch row (B
            must be 1). The memory of a sequence without new tokens stays as it was.
        begins: whether the sequences begin with these tokens; if so, the old memory is
            ignored.

    Raises:
        ValueError: packed rows with B > 1, boundaries that do not cover the rows, or
            memory of wrong sizes or dtypes.
    """
    s, B, _ = proj.shape
    if documents is not None:
        if B != 1:
            raise ValueError(
                "packed sequences need a batch of 1, got projection rows "
                f"{tuple(proj.shape)}; lay them end to end and extend the boundaries."
            )
        Documents.from_cu_seqlens(documents, s)  # raises unless they cover s tokens
    if documents is None:
        N = B
    else:
        N = len(documents.lengths)
    stages.memory_shape.check(memory, N, proj.dtype)
    if begins:
        history, state = (
            x.new_zeros((N,) + x.shape[1:]) for x in (memory.history, memory.state)
        )
    else:
        history, state = memory.gathered()
    if s == 0 or B == 0:
        mixed = proj.new_empty(
            s, B, stages.state_shape.heads * stages.state_shape.columns
        )
    elif stages.on_grid:
        mixed, history, state = prefill_on_grid(
            proj, stages, history, state, documents, begins
        )
    else:
        mixed, state = _prefill_in_chunks(
            proj, stages, history, state, documents, begins
        )
        rows = proj[..., stages.front.layout.conv_columns]
        history = last_rows(rows.to(history.dtype), history, documents)
    memory.write(history, state)
    return mixed


def _prefill_in_chunks(
    proj: Tensor,
    stages: Stages,
    history: Tensor,
    state: Tensor,
    documents: Documents | None,
    begins: bool,
) -> tuple[Tensor, Tensor]:
    """:func:`prefill` for a mixer that is not on the grid: the output ``[s, B, H * V]``
    and the next states ``[N, H, K, V]``.

    ``history [N, C, W - 1 or W]`` and ``state [N, H, K, V]`` are those before the
    tokens ``proj [s, B, P]``. With ``begins`` both are zero, so front and rule get
    neither.
    """
    past = None  # the rows before each sequence, for the front
    if stages.history_length and not begins:
        newest = history[..., history.shape[-1] - stages.history_length :].to(
            proj.dtype
        )
        past = history_of(newest, documents, len(proj))
    inputs = stages.front.forward(
        proj, stages.front_parameters, documents, history=past
    )
    # The rule takes only the states of documents with tokens. The state of a document
    # without tokens does not change.
    filled = None
    if documents is not None:
        filled = documents.filled_indices
    initial = None
    if not begins:
        initial = state
        if filled is not None:
            initial = state.index_select(0, filled)
    output = stages.rule.begin(inputs, documents).run(initial, keep=False, final=True)
    final = output.final_states
    assert final is not None
    if filled is not None:
        final = state.index_copy(0, filled, final.to(state.dtype))
    return stages.readout.forward(output.o, proj, stages.parameters[-1]), final


@torch.no_grad()
def decode(
    proj: Tensor, stages: Stages, memory: Memory, steps: Memory | None = None
) -> Tensor:
    """Mix the next s tokens of every sequence, one at a time; return ``[s, N, H * V]``.

    The bits of an output row do not depend on the number of tokens in a call. A CUDA
    graph can capture the call, except for a mixer on the grid; each replay reads the
    current rows and slots.

    Args:
        proj: projection rows ``[s, N, P]``.
        memory: the memory of the N sequences before these tokens; overwritten. If a
            sequence's slot is below zero, the rule's output is zero and no memory is
            written.
        steps: buffers for the memory after each token; their last s entries are
            written. They are ``[M, s, ...]`` with the slots and strides of ``memory``,
            or ``[N, s + 1, ...]`` from `Memory.steps`.

    Raises:
        ValueError: s is 0, or the memory has a wrong number of sequences, wrong sizes
            or dtypes.
    """
    s, N, _ = proj.shape
    if s == 0:
        raise ValueError(
            "decode got no token; give the projection rows [s, N, P] of at least one."
        )
    shape = stages.memory_shape
    front = stages.front
    shape.check(memory, N, proj.dtype)
    gamma = stages.parameters[-1]
    on_grid = shape.rows_first
    decode_token = _decode_token_in_torch
    if front.is_triton and not on_grid:
        from .step_kernels import decode_token_in_slots

        decode_token = decode_token_in_slots
    mixed = []
    for token, row in enumerate(proj.split(1)):
        after = None  # buffers for the memory after this token
        if steps is not None:
            after = steps.after(token - s, memory.slots)
        if on_grid:
            mixed.append(decode_on_grid(row, stages, memory))
            if after is not None:
                history, state = memory.gathered()
                after.write(history, state)
        else:
            o = decode_token(row, front, stages.front_parameters, memory, after)
            mixed.append(stages.readout.forward(o, row, gamma))
    if s == 1:
        return mixed[0]
    return torch.cat(mixed)


def _decode_token_in_torch(
    row: Tensor,
    front: Front,
    parameters: Sequence[Tensor | None],
    memory: Memory,
    after: Memory | None,
) -> Tensor:
    """The twin of :func:`.step_kernels.decode_token_in_slots` in plain torch.

    Returns o ``[N, 1, H, V]`` for ``row [1, N, P]``. Overwrites ``memory``; writes the
    new memory also to ``after``, unless it is None. ``parameters`` are the
    convolution's weight and bias, A_log and dt_bias, for Mamba2 also D.
    """
    table = front.table
    layout = front.layout
    wide = torch.promote_types(row.dtype, torch.float32)
    wide_parameters = [None if x is None else x.to(wide) for x in parameters]
    # skip: Mamba2's parameter D, or nothing
    weight, bias, A_log, dt_bias, *skip = wide_parameters
    assert weight is not None and A_log is not None and dt_bias is not None
    history, state = memory.gathered()
    newest = row[0, :, layout.conv_columns, None].to(history.dtype)
    window = torch.cat([history, newest], dim=-1)
    pre = (window[..., -weight.shape[-1] :].to(wide) * weight.flatten(1)).sum(-1)
    convolved = silu(pre if bias is None else pre + bias)[:, None]
    q, k, v = [
        convolved[..., front.conv_channels[name]].unflatten(-1, layout.shape_of(name))
        for name in table.qkv_sections
    ]
    if table.normalises_qk:
        q, k = l2norm(q), l2norm(k)
    # in the order of the table's gates
    g, *erase, write = front.gates_of(row, A_log, dt_bias).values()
    if table.steps > 1:  # several updates per token: a row for each of them
        one_token = table.inputs_class(q=q, k=k, v=v, g=g, beta=write)
        q, k, v, g, write = spread_steps(one_token, table.steps)
    # the three forms of the update in the docstring of FrontTable
    if erase:  # a gate scales the key that erases
        o, state = recurrence(
            table.scale * q, k, write * v, g, None, state, erased=erase[0] * k
        )
    elif table.erases:  # the delta rule
        o, state = recurrence(table.scale * q, k, v, g, write, state)
        o = o[:, -1:]  # the last of a token's rows is read
    else:  # nothing is erased
        o, state = recurrence(table.scale * q, k, write[..., None] * v, g, None, state)
    if skip:
        assert skip[0] is not None
        o = o + skip[0].view(len(A_log), -1) * v
    if memory.slots is not None:
        o = o.masked_fill((memory.slots < 0)[:, None, None, None], 0)
    memory.write(window[..., 1:], state)
    if after is not None:
        after.write(*memory.gathered())
    return o
