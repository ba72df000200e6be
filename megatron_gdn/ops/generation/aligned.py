"""Prefill and decode in ``batch_invariant_mode``, with the chunks of training
(:mod:`..aligned`).

The memory of a sequence holds the state at the start of its current chunk of 64 tokens,
and a history ``[1 + W - 1 + 64, P]``:

    row 0             its first element is the number of tokens in the current chunk
    the next W - 1    the projection rows before the chunk
    the last 64       the projection rows of the chunk; after its last token any finite
                      values

A decode step writes one row to every history. Then it computes every current chunk
again from the state at the chunk's start, with calls of the same shapes as in training.
A state is overwritten only when its chunk is full. The rule's inputs are computed
again, not stored. A stored copy would move as many bytes as the front reads. On a CPU
the front of a single row would also round differently.

Legend: s new tokens, B batch rows, N sequences, P columns of a projection row, W conv
taps, H heads with a state, V columns of a state, T tokens of all current chunks
together.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ..aligned import front_on_grid, grid_of, readout_on_grid
from ..documents import Documents, one_document
from ..host_tables import to_device
from ..readout.base import SplitReadout
from ..rules.base import Inputs, map_inputs
from ..rules.chunk_table import CHUNK, ChunkTable
from .memory import Memory, write_slots

if TYPE_CHECKING:
    from ..stages import Stages


def prefill_on_grid(
    proj: Tensor,
    stages: Stages,
    history: Tensor,
    state: Tensor,
    documents: Documents | None,
    begins: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Mix the tokens ``proj`` [s, B, P]; return the output, the next histories and the
    next states.

    ``history [N, 1 + W - 1 + 64, P]`` and ``state [N, H, K, V]`` are the memory of N
    sequences before these tokens. ``documents``: the boundaries of the new tokens, if N
    sequences lie in one batch row. With ``begins`` the sequences are new. Otherwise the
    host reads the token counts in ``history``, and waits for the GPU to do so.
    """
    new_rows = proj.transpose(0, 1)
    past = stages.history_length
    device = proj.device
    count_row = history[:, :1]
    history = history[:, 1:].to(proj.dtype)
    if begins:
        old_counts = [0] * len(history)
    else:  # modulo, since an unused slot may hold any number
        old_counts = (count_row[:, 0, 0].long() % CHUNK).tolist()
    if documents is None:
        new_counts = (new_rows.shape[1],) * new_rows.shape[0]
    else:
        new_counts = documents.lengths
    # tokens of each sequence from the start of its current chunk
    counts = [old + new for old, new in zip(old_counts, new_counts, strict=True)]
    on_host = _PrefillIndices.build(old_counts, counts, past)
    indices = _PrefillIndices._make(to_device(x, device) for x in on_host)
    source_rows = torch.cat([history.flatten(0, 1), new_rows.flatten(0, 1)])
    rows = source_rows.index_select(0, indices.source_row)[None]
    grid = grid_of(rows, _documents(counts, device), stages.state_shape.heads)
    before = history[:, :past].index_select(0, _indices_of_nonempty(counts, device))
    inputs = front_on_grid(stages.front, stages.front_parameters, rows, grid, before)

    # The rule runs full chunks first, which give the next states, and then the tokens
    # after the last full chunk.
    o = None
    for tokens, counts_here, is_full in (
        (indices.full_chunk_token, [n // CHUNK * CHUNK for n in counts], True),
        (indices.tail_token, [n % CHUNK for n in counts], False),
    ):
        sequences = _indices_of_nonempty(counts_here, device)
        if not len(sequences):
            continue
        selected = map_inputs(
            inputs, lambda x, tokens=tokens: x.index_select(1, tokens)
        )
        forward = stages.rule.begin(selected, _documents(counts_here, device))
        result = forward.run(
            state.index_select(0, sequences), keep=False, final=is_full
        )
        if result.final_states is not None:
            state = state.index_copy(0, sequences, result.final_states.to(state.dtype))
        if o is None:
            o = result.o.new_empty((1, rows.shape[1]) + result.o.shape[2:])
        o.index_copy_(1, tokens, result.o)
    assert o is not None, "there are tokens"

    mixed = _read_out_tokens(stages, o, rows, grid, indices.new_token, proj)
    next_rows = source_rows.index_select(0, indices.next_source_row)
    next_rows.masked_fill_(indices.next_is_zero[:, None], 0)
    count_row[:, 0, 0] = to_device(
        torch.tensor(counts, dtype=torch.int64, device="cpu") % CHUNK, device
    )
    next_history = (
        count_row.to(next_rows.dtype),
        next_rows.unflatten(0, (len(counts), -1)),
    )
    return mixed, torch.cat(next_history, dim=1), state


@torch.no_grad()
def decode_on_grid(row: Tensor, stages: Stages, memory: Memory) -> Tensor:
    """Mix one token of each sequence, from ``row [1, N, P]`` to ``[1, N, H * V]``.

    Overwrites ``memory``, whose buffers must be contiguous. The host does not wait for
    the GPU, so it does not know which chunks are full. The rule computes the state
    after every chunk, but only states after full chunks are written.
    """
    past = stages.history_length
    number = torch.arange(row.shape[1], device=row.device)
    history, state = memory.gathered()
    if memory.slots is None:
        slots = number
    else:
        slots = memory.slots
    # the new token's place in its chunk; modulo, since an unused slot may hold any
    # number
    place = history[:, 0, 0].long() % CHUNK
    history[number, 1 + past + place] = row[0].to(history.dtype)
    rows = history[:, 1:].to(row.dtype)
    chunks = rows[:, past:]
    result = stages.rule.begin(_rule_inputs(stages, rows), None).run(
        state, keep=False, final=True
    )
    assert result.final_states is not None
    grid = grid_of(chunks, None, stages.state_shape.heads)
    mixed = _read_out_tokens(
        stages, result.o, chunks, grid, number * CHUNK + place, row
    )
    full = place == CHUNK - 1
    write_slots(
        memory.state, slots.where(full, -1), result.final_states.to(state.dtype)
    )
    # The rows of each history that change: row 0 with the count, the new row and, after
    # a full chunk, the W - 1 rows before the next chunk.
    changed = torch.cat(
        [history[:, :1], row.transpose(0, 1), history[:, 1 + CHUNK :]], 1
    )
    changed[:, 0, 0] = (place + 1) % CHUNK
    # the number of each of these rows in its history; -1: the row is not written
    before = torch.arange(1, 1 + past, device=slots.device).where(full[:, None], -1)
    row_number = torch.cat(
        [torch.zeros_like(place)[:, None], (1 + past + place)[:, None], before], 1
    )
    written = (slots >= 0)[:, None] & (row_number >= 0)
    # write_slots takes each row of each history as a slot
    row_slot = (slots[:, None] * history.shape[1] + row_number).where(written, -1)
    write_slots(
        memory.history.view(-1, row.shape[2]), row_slot.flatten(), changed.flatten(0, 1)
    )
    return mixed.masked_fill_((slots < 0)[:, None], 0)


def _rule_inputs(stages: Stages, rows: Tensor) -> Inputs:
    """The rule's inputs ``[N, 64, ...]`` of each sequence's chunk.

    ``rows [N, W - 1 + 64, P]`` are the rows before the chunk, then the chunk's rows.
    """
    front = stages.front
    past = stages.history_length
    if front.is_triton:
        # with documents, Triton's front computes every token by the same code
        documents = one_document(rows.shape[1], rows.device)
        inputs = front.forward(rows.transpose(0, 1), stages.front_parameters, documents)
        return map_inputs(inputs, lambda x: x[:, past:].contiguous())
    chunks = rows[:, past:]
    grid = grid_of(chunks, None, stages.state_shape.heads)
    return front_on_grid(front, stages.front_parameters, chunks, grid, rows[:, :past])


def _read_out_tokens(
    stages: Stages,
    o: Tensor,
    rows: Tensor,
    grid: ChunkTable,
    token_indices: Tensor,
    new_rows: Tensor,
) -> Tensor:
    """The readout ``[s, B, H * V]`` of the new tokens.

    ``o [., ., H, V]`` and ``rows [., ., P]`` are those of all tokens since the starts
    of the current chunks; ``grid`` is their grid. ``token_indices [B s]`` are the
    indices of the new tokens among all these tokens, counted across batch rows.
    ``new_rows [s, B, P]`` are the new tokens' projection rows. If the readout needs the
    grid, it computes all tokens.
    """
    readout = stages.readout
    gamma = stages.parameters[-1]
    s, B, _ = new_rows.shape
    # These readouts compute each token by itself, so they need no grid.
    if isinstance(readout, SplitReadout) or getattr(readout, "is_rowwise", False):
        new_o = o.flatten(0, 1).index_select(0, token_indices)
        return readout.forward(new_o.unflatten(0, (B, s)), new_rows, gamma)
    mixed = readout_on_grid(readout, o, rows, gamma, grid).flatten(0, 1)
    mixed = mixed.index_select(0, token_indices)
    return mixed.unflatten(0, (B, s)).transpose(0, 1).contiguous()


def _documents(lengths: Sequence[int], device: torch.device) -> Documents:
    return Documents(tuple(accumulate(lengths, initial=0)), device)


def _indices_of_nonempty(counts: Sequence[int], device: torch.device) -> Tensor:
    """The indices n with ``counts[n]`` not zero, int64 on ``device``."""
    index = [n for n, count in enumerate(counts) if count]
    return to_device(torch.tensor(index, dtype=torch.int64, device="cpu"), device)


class _PrefillIndices(NamedTuple):
    """Index tables of a prefill.

    The T tokens are the tokens of all N sequences, from the start of each sequence's
    current chunk on. The *source rows* are the rows of the N histories, and then the
    new rows; the tables choose among them.
    """

    source_row: Tensor  # int64 [T], the source row of each token
    new_token: Tensor  # int64, the indices of the new tokens among the T tokens
    full_chunk_token: Tensor  # int64, the indices of the tokens in full chunks
    tail_token: Tensor  # int64, the indices of the tokens after the last full chunk
    # int64 [N * (W - 1 + 64)], for each row of the next histories its source row
    next_source_row: Tensor
    # bool [N * (W - 1 + 64)], True for rows of the next histories that are set to zero
    next_is_zero: Tensor

    @classmethod
    def build(
        cls, old_counts: Sequence[int], counts: Sequence[int], past: int
    ) -> _PrefillIndices:
        """The tables on the host.

        Args:
            old_counts: the number of tokens in each sequence's current chunk so far.
            counts: the number of these tokens and the new tokens together.
            past: W - 1.
        """
        old, count = torch.tensor([old_counts, counts], dtype=torch.int64, device="cpu")
        size = past + CHUNK
        new_count = count - old
        # the source row of each sequence's first new token
        start = len(counts) * size + new_count.cumsum(0) - new_count

        def source_row_of(n: Tensor, token: Tensor) -> Tensor:
            """The source row of token number ``token`` of sequence n; tokens are
            counted from the start of the sequence's current chunk."""
            in_history = n * size + past + token
            in_new_rows = start[n] + token - old[n]
            return torch.where(token < old[n], in_history, in_new_rows)

        number = torch.arange(len(counts), device="cpu")
        n = number.repeat_interleave(count)  # the sequence of each of the T tokens
        token = torch.arange(len(n), device="cpu") - (count.cumsum(0) - count)[n]
        in_full_chunks = count // CHUNK * CHUNK
        is_full = token < in_full_chunks[n]
        # the token of each row of the next histories; a next history begins W - 1 tokens
        # before the chunk that is current after this prefill
        next_token = in_full_chunks[:, None] - past + torch.arange(size, device="cpu")
        next_is_zero = next_token >= count[:, None]
        next_token = torch.minimum(next_token, count[:, None] - 1)
        # A sequence without tokens may copy any source row, since the copy is set to
        # zero.
        last_source_row = len(counts) * size + int(new_count.sum()) - 1
        next_source_row = source_row_of(number[:, None], next_token)
        return cls(
            source_row=source_row_of(n, token),
            new_token=(token >= old[n]).nonzero()[:, 0],
            full_chunk_token=is_full.nonzero()[:, 0],
            tail_token=(~is_full).nonzero()[:, 0],
            next_source_row=next_source_row.clamp(0, last_source_row).flatten(),
            next_is_zero=next_is_zero.flatten(),
        )
