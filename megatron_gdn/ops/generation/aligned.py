"""Prefill and decode on the grid of training, see :mod:`megatron_gdn.ops.aligned`.

A sequence remembers the state at the start of its chunk of 64 tokens. Its history holds whole
projection rows: the W - 1 before the chunk and those of the chunk so far. Rows behind the last
token change no bit of a token, if they are finite. The host knows how many tokens a sequence has
had. In slots only the device knows: there one more row before a history counts the tokens of the
chunk.

A decode step writes one row to every history and computes the chunks again from their states, in
calls of the shapes of training, for all sequences together. It writes a state only where a chunk
ends. (A front reads as many bytes as a copy of the rule's inputs
would, and on a CPU a call of one row would round elsewhere. So the rule's inputs are not kept.)

Legend: N sequences, s tokens, P projection width, W conv taps, H heads with a state, K
rows of a state, V columns, T tokens since the chunks of all sequences began.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ..aligned import front_on_grid, grid_of, readout_on_grid
from ..documents import Documents
from ..host_tables import cached_by_stream, to_device
from ..readout.base import Apart
from ..rules.base import on_tokens
from ..rules.chunk_table import CHUNK, ChunkTable
from .memory import Memory, write_slots

if TYPE_CHECKING:
    from ..parts import Parts


def prefill_on_grid(
    proj: Tensor,
    parts: Parts,
    history: Tensor,
    state: Tensor,
    stands: Sequence[int] | None,
    documents: Documents | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The rows for out_proj, and the next histories and states, for any number of tokens.

    It cuts on the host, which waits for the device if only that knows where sequences stand.
    """
    new, past, device = proj.transpose(0, 1), parts.past, proj.device
    counted, history = history[:, : -past - CHUNK], history[:, -past - CHUNK :].to(proj.dtype)
    if stands is None and counted.shape[1]:
        stands = counted[:, 0, 0].long().tolist()
    stands = _known(stands, len(history))
    lengths = (new.shape[1],) * new.shape[0] if documents is None else documents.lengths
    held = [n % CHUNK + more for n, more in zip(stands, lengths, strict=True)]
    tables = _Tables.of([n % CHUNK for n in stands], held, past)
    source, fresh, full, tail, kept, empty = (to_device(x, device) for x in tables)
    known = torch.cat([history.flatten(0, 1), new.flatten(0, 1)])
    rows = known.index_select(0, source)[None]
    grid = grid_of(rows, _documents(held, device), parts.state.heads)
    filled = to_device(
        torch.tensor([n for n, count in enumerate(held) if count], device="cpu"), device
    )
    before = history[:, :past].index_select(0, filled)
    inputs = front_on_grid(parts.front, parts.of_front, rows, grid, before)

    # First the full chunks, which move the state, then the last tokens of each sequence.
    o = None
    whole = [n // CHUNK * CHUNK for n in held]
    for tokens, counts in ((full, whole), (tail, [n % CHUNK for n in held])):
        filled = [n for n, count in enumerate(counts) if count]
        if not filled:
            continue
        index = to_device(torch.tensor(filled, device="cpu"), device)
        some = on_tokens(inputs, lambda x, tokens=tokens: x.index_select(1, tokens))
        begun = parts.rule.begin(some, _documents(counts, device))
        made = begun.run(state.index_select(0, index), keep=False, final=tokens is full)
        if made.final is not None:
            state = state.index_copy(0, index, made.final.to(state.dtype))
        o = made.o.new_empty(1, rows.shape[1], *made.o.shape[2:]) if o is None else o
        o.index_copy_(1, tokens, made.o)
    assert o is not None, "there are tokens"

    mixed = _read_out(parts, o, rows, grid, fresh, proj)
    next_rows = known.index_select(0, kept).masked_fill_(empty[:, None], 0)
    history = next_rows.unflatten(0, (len(held), -1))
    if counted.shape[1]:
        counted[:, 0, 0] = to_device(torch.tensor(held, device="cpu") % CHUNK, device)
        history = torch.cat([counted.to(history.dtype), history], dim=1)
    return mixed, history, state


def _known(stands: Sequence[int] | None, sequences: int) -> Sequence[int]:
    if stands is None or len(stands) != sequences:
        raise ValueError(
            f"batch_invariant_mode computes in chunks counted from the start of a sequence: give "
            f"stands=, how many tokens each of the {sequences} sequences has had, got {stands}."
        )
    return stands


@torch.no_grad()
def decode_on_grid(
    row: Tensor, parts: Parts, memory: Memory, stands: Sequence[int] | None
) -> Tensor:
    """``[1, N, H * V]`` of one token ``[1, N, P]`` of each sequence. The host does not wait.

    ``memory`` is contiguous and written. ``stands`` says how many tokens each sequence has had.
    """
    if memory.slots is not None:
        return _decode_in_slots(row, parts, memory, memory.slots)
    history, states, _ = memory
    stands = _known(stands, row.shape[1])
    step = _Step.of(tuple(n % CHUNK for n in stands), parts.past, row.device)
    history.view(-1, row.shape[2]).index_copy_(0, step.row, row[0])
    mixed, after = newest_of_chunks(row, parts, history, states, step.token, step.ended)
    if after is not None:
        last = history[:, CHUNK:].index_select(0, step.ended)
        history[:, : parts.past].index_copy_(0, step.ended, last)
        states.index_copy_(0, step.ended, after)
    return mixed


def _decode_in_slots(row: Tensor, parts: Parts, memory: Memory, slots: Tensor) -> Tensor:
    """Where only the device knows slots, of which some are below zero, and places.

    Histories and states are copied, and all states are computed.
    """
    past = parts.past
    number = torch.arange(len(slots), device=slots.device)
    history, state = memory.gathered()
    place = history[:, 0, 0].long() % CHUNK  # also in a slot that was never used
    history[number, 1 + past + place] = row[0].to(history.dtype)
    rows = history[:, 1:].to(row.dtype)
    mixed, after = newest_of_chunks(row, parts, rows, state, number * CHUNK + place, None)
    assert after is not None, "all are wanted"
    full = place == CHUNK - 1
    write_slots(memory.state, slots.where(full, -1), after)
    # Rows that change: the count, the new row, and at a chunk's end the rows before the next one.
    changed = torch.cat([history[:, :1], row.transpose(0, 1), history[:, 1 + CHUNK :]], 1)
    changed[:, 0, 0] = (place + 1) % CHUNK
    before = torch.arange(1, 1 + past, device=slots.device).where(full[:, None], -1)
    to = torch.cat([torch.zeros_like(place)[:, None], (1 + past + place)[:, None], before], 1)
    to = (slots[:, None] * history.shape[1] + to).where((slots >= 0)[:, None] & (to >= 0), -1)
    write_slots(memory.history.view(-1, row.shape[2]), to.flatten(), changed.flatten(0, 1))
    return mixed.masked_fill_((slots < 0)[:, None], 0)


def newest_of_chunks(
    row: Tensor, parts: Parts, rows: Tensor, state: Tensor, token: Tensor, ended: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """The newest token of N chunks ``[1, N, H * V]``, and states after chunks, None if E is 0.

    Args:
        row: ``[1, N, P]``, of the newest tokens; ``rows`` has them in their places too.
        rows: ``[N, W - 1 + 64, P]``.
        state: ``[N, H, K, V]``, at the chunks' starts.
        token: int64 ``[N]``, the places of the newest tokens among the N * 64 of the chunks.
        ended: int64 ``[E]``, the chunks whose states are wanted; None: all N.
    """
    inputs, rule = _inputs(parts, rows), parts.rule
    final = ended is None or (len(ended) > 0 and getattr(rule, "leaves_states", False))
    # If the rule leaves no states here, a second call computes those of the chunks that ended.
    made = rule.begin(inputs, None).run(state, keep=False, final=final)
    after = made.final
    if ended is not None and len(ended):
        if after is None:
            begun = rule.begin(on_tokens(inputs, lambda x: x.index_select(0, ended)), None)
            after = begun.run(state.index_select(0, ended), keep=False, final=True).final
        else:
            after = after.index_select(0, ended)
    chunks = rows[:, parts.past :]
    grid = grid_of(chunks, None, parts.state.heads)
    mixed = _read_out(parts, made.o, chunks, grid, token, row)
    return mixed, None if after is None else after.to(state.dtype)


def _inputs(parts: Parts, rows: Tensor) -> Any:
    """The rule's inputs ``[N, 64, ...]`` of chunks behind W - 1 rows each."""
    front, past = parts.front, parts.past
    chunks = rows[:, past:]
    if getattr(front, "triton", False):
        documents = _behind_rows(past, rows.device)
        return front.forward(chunks.transpose(0, 1), parts.of_front, documents)
    grid = grid_of(chunks, None, parts.state.heads)
    return front_on_grid(front, parts.of_front, chunks, grid, rows[:, :past])


@cached_by_stream(32)
def _behind_rows(past: int, device: torch.device) -> Documents:
    """Boundaries of chunks whose W - 1 rows before lie before them in memory, as in a history.

    Kernels read them there, because the first token's position is W - 1.
    """
    documents = Documents((0, CHUNK), device)
    position = torch.arange(past, past + CHUNK, dtype=torch.int32, device="cpu")
    vars(documents)["position_T"] = to_device(position, device)  # a cached property
    return documents


def _read_out(
    parts: Parts, o: Tensor, rows: Tensor, grid: ChunkTable, wanted: Tensor, new: Tensor
) -> Tensor:
    """``[s, B, H * V]``: the wanted tokens of ``o`` ``[N, S, H, V]``, whose rows are ``new``."""
    readout, gamma = parts.readout, parts.parameters[-1]
    if isinstance(readout, Apart) or getattr(readout, "by_row", False):
        o = o.flatten(0, 1).index_select(0, wanted).unflatten(0, new.shape[1::-1])
        return readout.forward(o, new, gamma)
    mixed = readout_on_grid(readout, o, rows, gamma, grid).flatten(0, 1).index_select(0, wanted)
    return mixed.unflatten(0, new.shape[1::-1]).transpose(0, 1).contiguous()


class _Step(NamedTuple):
    """Where the tokens of a decode step lie; int64."""

    row: Tensor  # [N], the new rows among those of all histories
    token: Tensor  # [N], the new tokens among those of the N chunks
    ended: Tensor  # [E], the sequences whose chunks end

    @staticmethod
    @cached_by_stream(32)  # all layers take the same
    def of(places: tuple[int, ...], past: int, device: torch.device) -> _Step:
        place, number = torch.tensor(places, device="cpu"), torch.arange(len(places), device="cpu")
        ended = (place == CHUNK - 1).nonzero()[:, 0]
        tables = [number * (past + CHUNK) + past + place, number * CHUNK + place, ended]
        in_one = to_device(torch.cat(tables), device)  # one copy
        return _Step(*in_one.split([len(x) for x in tables]))


def _documents(lengths: Sequence[int], device: torch.device) -> Documents:
    return Documents((0, *accumulate(lengths)), device)


class _Tables(NamedTuple):
    """Where rows lie. "Known" are the histories of N sequences, then their new rows."""

    source: Tensor  # int64 [T], the known row of every token of the chunks
    fresh: Tensor  # int64, the tokens that are new
    full: Tensor  # int64, the tokens of full chunks
    tail: Tensor  # int64, the others
    kept: Tensor  # int64 [N * (W - 1 + 64)], the known rows of the next histories
    empty: Tensor  # bool, which rows of ``kept`` are zero

    @classmethod
    def of(cls, places: Sequence[int], held: Sequence[int], past: int) -> _Tables:
        """From the tokens of each sequence's chunks, old ones and all of them."""
        old, count = torch.tensor([places, held], dtype=torch.int64, device="cpu")
        size, more = past + CHUNK, count - old
        start = len(held) * size + more.cumsum(0) - more  # of the new rows

        def known(n: Tensor, token: Tensor) -> Tensor:
            return torch.where(token < old[n], n * size + past + token, start[n] + token - old[n])

        number = torch.arange(len(held), device="cpu")
        n = number.repeat_interleave(count)
        token = torch.arange(len(n), device="cpu") - (count.cumsum(0) - count)[n]
        whole = count // CHUNK * CHUNK
        in_full = token < whole[n]
        next_token = whole[:, None] - past + torch.arange(size, device="cpu")
        empty = next_token >= count[:, None]
        last = torch.minimum(next_token, count[:, None] - 1)
        # For a sequence without tokens any row will do, since ``empty`` zeroes it.
        kept = known(number[:, None], last).clamp(0, len(held) * size + int(more.sum()) - 1)
        return cls(
            known(n, token), (token >= old[n]).nonzero()[:, 0], in_full.nonzero()[:, 0],
            (~in_full).nonzero()[:, 0], kept.flatten(), empty.flatten(),
        )  # fmt: skip
