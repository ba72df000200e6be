"""Prefill and decode on the grid of training, see :mod:`megatron_gdn.ops.aligned`.

A sequence carries the state at the start of its chunk of 64 tokens. Its history holds whole
projection rows: the W - 1 before the chunk, those of the chunk so far, then zeros. Decode computes
the chunk from that state. So a token costs one chunk, in calls of the shapes of training, for all
sequences together.

Legend: N sequences, s tokens, P projection width, W conv taps, H heads with a state, V columns of a
state, T tokens since the chunks of all sequences began.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ..aligned import front_on_grid, grid_of, readout_on_grid
from ..documents import Documents
from ..host_tables import to_device
from ..readout.base import Apart
from ..rules.base import on_tokens
from ..rules.chunk_table import CHUNK, ChunkTable
from .carry import Carry

if TYPE_CHECKING:
    from ..parts import Parts


def prefill_on_grid(
    proj: Tensor,
    parts: Parts,
    carry: Carry,
    stands: Sequence[int],
    documents: Documents | None = None,
) -> tuple[Tensor, Carry]:
    """As :func:`.step.prefill`, for any number of tokens.

    Args:
        stands: how many tokens each of the N sequences has had.
    """
    new, past, device = proj.transpose(0, 1), parts.past, proj.device
    lengths = (new.shape[1],) * new.shape[0] if documents is None else documents.lengths
    held = [n % CHUNK + more for n, more in zip(stands, lengths, strict=True)]
    tables = _Tables.of([n % CHUNK for n in stands], held, past)
    source, fresh, full, tail, kept, empty = (to_device(x, device) for x in tables)
    known = torch.cat([carry.history.mT.flatten(0, 1), new.flatten(0, 1)])
    rows = known.index_select(0, source)[None]
    grid = grid_of(rows, _documents(held, device), parts.state.heads)
    before = carry.history[..., :past].mT
    inputs = front_on_grid(parts.front, parts.of_front, rows, grid, before)

    # First the full chunks, which move the state, then what is left of each sequence.
    o, state = None, carry.state
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

    mixed = _read_out(parts, o, rows, grid, fresh, new.shape[:2])
    history = known.index_select(0, kept).masked_fill_(empty[:, None], 0)
    history = history.unflatten(0, (len(held), -1)).mT.contiguous()
    return mixed.transpose(0, 1).contiguous(), Carry(history, state)


def decode_on_grid(
    row: Tensor, parts: Parts, carry: Carry, place: Tensor, ends: Sequence[int] | None = None
) -> tuple[Tensor, Carry]:
    """One token of each of N sequences. The host does not wait for the device.

    Args:
        row: ``[1, N, P]``.
        place: int64 ``[N]``, how many tokens of its chunk each sequence has had, 0 to 63.
        ends: the sequences whose place is 63; None if the device alone knows. Their states follow
            in a call of their own, so that a step that ends no chunk computes no state.

    Returns:
        ``[1, N, H * V]``, and the carry after the token.
    """
    N, past = row.shape[1], parts.past
    number = torch.arange(N, device=row.device)
    rows = carry.history.mT.clone(memory_format=torch.contiguous_format)
    rows[number, past + place] = row[0]
    before, rows_of_chunk = rows[:, :past], rows[:, past:]
    grid = grid_of(rows_of_chunk, None, parts.state.heads)
    inputs = front_on_grid(parts.front, parts.of_front, rows_of_chunk, grid, before)
    later = torch.arange(CHUNK, device=row.device) > place[:, None]
    inputs = on_tokens(
        inputs, lambda x: x.masked_fill(later.view(N, CHUNK, *(1,) * (x.dim() - 2)), 0)
    )
    made = parts.rule.begin(inputs, None).run(carry.state, keep=False, final=ends is None)
    full = (place == CHUNK - 1)[:, None, None]
    if made.final is not None:
        state = torch.where(full[..., None], made.final.to(carry.state.dtype), carry.state)
    else:
        state = _after(parts, inputs, carry.state, ends or ())
    wanted = number * CHUNK + place
    mixed = _read_out(parts, made.o, rows_of_chunk, grid, wanted, (N, 1))
    next_chunk = torch.zeros_like(rows)
    next_chunk[:, :past] = rows[:, CHUNK:]
    history = torch.where(full, next_chunk, rows).mT.contiguous()
    return mixed.transpose(0, 1).contiguous(), Carry(history, state)


def _after(parts: Parts, inputs: Any, state: Tensor, ends: Sequence[int]) -> Tensor:
    """The states ``[N, H, K, V]`` with those of ``ends`` moved to the end of their chunks."""
    if not ends:
        return state
    index = to_device(torch.tensor(ends, device="cpu"), state.device)
    some = on_tokens(inputs, lambda x: x.index_select(0, index))
    begun = parts.rule.begin(some, None)
    final = begun.run(state.index_select(0, index), keep=False, final=True).final
    assert final is not None
    return state.index_copy(0, index, final.to(state.dtype))


def _read_out(
    parts: Parts, o: Tensor, rows: Tensor, grid: ChunkTable, wanted: Tensor, shape: Sequence[int]
) -> Tensor:
    """``[*shape, H * V]``: the wanted tokens of ``o`` ``[B, S, H, V]`` and ``rows``."""
    readout, gamma = parts.readout, parts.parameters[-1]
    if not (isinstance(readout, Apart) or getattr(readout, "by_row", False)):
        mixed = readout_on_grid(readout, o, rows, gamma, grid)
        return mixed.flatten(0, 1).index_select(0, wanted).view(*shape, -1)
    of_wanted = (x.flatten(0, 1).index_select(0, wanted).unflatten(0, shape) for x in (o, rows))
    o, rows = of_wanted
    return readout.forward(o, rows.transpose(0, 1), gamma).transpose(0, 1)


def _documents(lengths: Sequence[int], device: torch.device) -> Documents:
    return Documents((0, *accumulate(lengths)), device)


class _Tables(NamedTuple):
    """Where rows lie. "Known" are the histories of N sequences, then their new rows.

    Attributes:
        source: int64 ``[T]``, the known row of every token of the chunks.
        fresh: int64, the tokens that are new.
        full, tail: int64, the tokens of full chunks, and the others.
        kept: int64 ``[N * (W - 1 + 64)]``, the known rows of the next histories.
        empty: bool, which of these are zero.
    """

    source: Tensor
    fresh: Tensor
    full: Tensor
    tail: Tensor
    kept: Tensor
    empty: Tensor

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
        return cls(
            known(n, token), (token >= old[n]).nonzero()[:, 0], in_full.nonzero()[:, 0],
            (~in_full).nonzero()[:, 0], known(number[:, None], last).flatten(), empty.flatten(),
        )  # fmt: skip
