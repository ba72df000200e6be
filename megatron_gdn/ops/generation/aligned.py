"""Prefill and decode in ``batch_invariant_mode``, with the chunks of training
(:mod:`..aligned`).

The memory of a sequence holds the state at the start of the current chunk of 64 tokens,
and a history. The first element of the history's row 0 is the number of the chunk's
tokens so far. The next W - 1 rows are the projection rows before the chunk; the last 64
rows are the chunk's rows. Rows after the chunk's last token may contain any finite
values.

A decode step writes one row to every history, and computes every current chunk again
from the state at the chunk's start, with calls of the same shapes as in training. A
state is overwritten only when its chunk is full. The rule's inputs are computed again,
not stored: a copy would move as many bytes as the front reads, and on a CPU the front
of a single row would round differently.

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

    ``history`` and ``state``: the memory of N sequences before these tokens. If
    ``begins``, the sequences are new; otherwise the host waits to read the token counts
    in ``history``.
    """
    new = proj.transpose(0, 1)
    past = stages.history_length
    device = proj.device
    count_row = history[:, :1]
    history = history[:, 1:].to(proj.dtype)
    if begins:
        old = [0] * len(history)
    else:
        old = (count_row[:, 0, 0].long() % CHUNK).tolist()
    if documents is None:
        lengths = (new.shape[1],) * new.shape[0]
    else:
        lengths = documents.lengths
    total_counts = [n + length for n, length in zip(old, lengths, strict=True)]
    tables = _PrefillIndices.build(old, total_counts, past)
    source, fresh, full, tail, kept, empty = (to_device(x, device) for x in tables)
    known = torch.cat([history.flatten(0, 1), new.flatten(0, 1)])
    rows = known.index_select(0, source)[None]
    grid = grid_of(rows, _documents(total_counts, device), stages.state.heads)
    before = history[:, :past].index_select(
        0, _indices_of_nonempty(total_counts, device)
    )
    inputs = front_on_grid(stages.front, stages.front_parameters, rows, grid, before)

    # The rule runs full chunks first, which give the next states, then the remaining
    # tokens.
    o = None
    whole = [n // CHUNK * CHUNK for n in total_counts]
    for tokens, counts in ((full, whole), (tail, [n % CHUNK for n in total_counts])):
        index = _indices_of_nonempty(counts, device)
        if not len(index):
            continue
        selected = map_inputs(
            inputs, lambda x, tokens=tokens: x.index_select(1, tokens)
        )
        begun = stages.rule.begin(selected, _documents(counts, device))
        result = begun.run(
            state.index_select(0, index), keep=False, final=tokens is full
        )
        if result.final is not None:
            state = state.index_copy(0, index, result.final.to(state.dtype))
        if o is None:
            o = result.o.new_empty((1, rows.shape[1]) + result.o.shape[2:])
        o.index_copy_(1, tokens, result.o)
    assert o is not None, "there are tokens"

    mixed = _read_out_tokens(stages, o, rows, grid, fresh, proj)
    next_rows = known.index_select(0, kept).masked_fill_(empty[:, None], 0)
    count_row[:, 0, 0] = to_device(
        torch.tensor(total_counts, device="cpu") % CHUNK, device
    )
    in_parts = (
        count_row.to(next_rows.dtype),
        next_rows.unflatten(0, (len(total_counts), -1)),
    )
    return mixed, torch.cat(in_parts, dim=1), state


@torch.no_grad()
def decode_on_grid(row: Tensor, stages: Stages, memory: Memory) -> Tensor:
    """Mix one token of each sequence, from ``row [1, N, P]`` to ``[1, N, H * V]``.

    Overwrites ``memory``, whose buffers must be contiguous. The host does not wait for
    the GPU. The rule computes the next state of every chunk, but only full chunks write
    their states.
    """
    past = stages.history_length
    number = torch.arange(row.shape[1], device=row.device)
    history, state = memory.gathered()
    if memory.slots is None:
        slots = number
    else:
        slots = memory.slots
    # modulo, since an unused slot may contain any number
    place = history[:, 0, 0].long() % CHUNK
    history[number, 1 + past + place] = row[0].to(history.dtype)
    rows = history[:, 1:].to(row.dtype)
    chunks = rows[:, past:]
    result = stages.rule.begin(_rule_inputs(stages, rows), None).run(
        state, keep=False, final=True
    )
    assert result.final is not None
    grid = grid_of(chunks, None, stages.state.heads)
    mixed = _read_out_tokens(
        stages, result.o, chunks, grid, number * CHUNK + place, row
    )
    full = place == CHUNK - 1
    write_slots(memory.state, slots.where(full, -1), result.final.to(state.dtype))
    # Rows to write: the count, the new row and, after a full chunk, the rows before the
    # next one.
    changed = torch.cat(
        [history[:, :1], row.transpose(0, 1), history[:, 1 + CHUNK :]], 1
    )
    changed[:, 0, 0] = (place + 1) % CHUNK
    before = torch.arange(1, 1 + past, device=slots.device).where(full[:, None], -1)
    to = torch.cat(
        [torch.zeros_like(place)[:, None], (1 + past + place)[:, None], before], 1
    )
    to = (slots[:, None] * history.shape[1] + to).where(
        (slots >= 0)[:, None] & (to >= 0), -1
    )
    write_slots(
        memory.history.view(-1, row.shape[2]), to.flatten(), changed.flatten(0, 1)
    )
    return mixed.masked_fill_((slots < 0)[:, None], 0)


def _rule_inputs(stages: Stages, rows: Tensor) -> Inputs:
    """The rule's inputs ``[N, 64, ...]``; ``rows [N, W - 1 + 64, P]``: history, then
    the chunk."""
    front = stages.front
    past = stages.history_length
    if getattr(front, "triton", False):
        path = one_document(rows.shape[1], rows.device)
        inputs = front.forward(rows.transpose(0, 1), stages.front_parameters, path)
        return map_inputs(inputs, lambda x: x[:, past:].contiguous())
    chunks = rows[:, past:]
    grid = grid_of(chunks, None, stages.state.heads)
    return front_on_grid(front, stages.front_parameters, chunks, grid, rows[:, :past])


def _read_out_tokens(
    stages: Stages,
    o: Tensor,
    rows: Tensor,
    grid: ChunkTable,
    token_indices: Tensor,
    new_rows: Tensor,
) -> Tensor:
    """The readout ``[s, B, H * V]`` of ``o``'s tokens ``token_indices``, counted across
    batch rows.

    ``rows`` has the projection rows of all tokens, ``new_rows [s, B, P]`` only of those
    tokens.
    """
    readout = stages.readout
    gamma = stages.parameters[-1]
    if isinstance(readout, SplitReadout) or getattr(readout, "by_row", False):
        o = (
            o.flatten(0, 1)
            .index_select(0, token_indices)
            .unflatten(0, new_rows.shape[1::-1])
        )
        return readout.forward(o, new_rows, gamma)
    mixed = readout_on_grid(readout, o, rows, gamma, grid).flatten(0, 1)
    mixed = mixed.index_select(0, token_indices)
    return mixed.unflatten(0, new_rows.shape[1::-1]).transpose(0, 1).contiguous()


def _documents(lengths: Sequence[int], device: torch.device) -> Documents:
    return Documents(tuple(accumulate(lengths, initial=0)), device)


def _indices_of_nonempty(counts: Sequence[int], device: torch.device) -> Tensor:
    """The indices n (int64) of the sequences whose number of tokens ``counts[n]`` is
    not zero."""
    index = [n for n, count in enumerate(counts) if count]
    return to_device(torch.tensor(index, dtype=torch.int64, device="cpu"), device)


class _PrefillIndices(NamedTuple):
    """Indices of a prefill. "Known rows" are the N histories' rows, followed by the new
    rows."""

    source: Tensor  # int64 [T], for each of the T tokens the index of its known row
    fresh: Tensor  # int64, indices of the new tokens among the T tokens
    full: Tensor  # int64, indices of the tokens in full chunks among the T tokens
    tail: Tensor  # int64, indices of the T tokens that are after the last full chunk
    # int64 [N * (W - 1 + 64)], indices of known rows to copy to the next histories
    kept: Tensor
    empty: Tensor  # bool, True for rows of the next histories that must be set to zero

    @classmethod
    def build(
        cls, old_counts: Sequence[int], total_counts: Sequence[int], past: int
    ) -> _PrefillIndices:
        """``old_counts[n]``: old tokens in sequence n's current chunk;
        ``total_counts[n]``: old and new tokens together; ``past``: W - 1.
        """
        old, count = torch.tensor(
            [old_counts, total_counts], dtype=torch.int64, device="cpu"
        )
        size = past + CHUNK
        new_count = count - old
        # The known row of each sequence's first new token.
        start = len(total_counts) * size + new_count.cumsum(0) - new_count

        def known(n: Tensor, token: Tensor) -> Tensor:
            """The known row's index; ``token`` counts from the start of sequence n's
            chunk."""
            return torch.where(
                token < old[n], n * size + past + token, start[n] + token - old[n]
            )

        number = torch.arange(len(total_counts), device="cpu")
        n = number.repeat_interleave(count)
        token = torch.arange(len(n), device="cpu") - (count.cumsum(0) - count)[n]
        whole = count // CHUNK * CHUNK
        in_full = token < whole[n]
        next_token = whole[:, None] - past + torch.arange(size, device="cpu")
        empty = next_token >= count[:, None]
        last = torch.minimum(next_token, count[:, None] - 1)
        # A sequence without tokens may copy any known row, since ``empty`` zeroes the
        # copy.
        kept = known(number[:, None], last).clamp(
            0, len(total_counts) * size + int(new_count.sum()) - 1
        )
        return cls(
            known(n, token),
            (token >= old[n]).nonzero()[:, 0],
            in_full.nonzero()[:, 0],
            (~in_full).nonzero()[:, 0],
            kept.flatten(),
            empty.flatten(),
        )
