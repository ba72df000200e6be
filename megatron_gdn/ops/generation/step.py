"""A recurrent mixer that continues from a carry: projection rows in, mixed rows and carry out.

    prefill   many tokens of a sequence, in chunks, from a carry or from nothing; dense or packed
    decode    one or a few tokens of every sequence, by the recurrence, with the carry after each

Both run the :class:`..parts.Parts` of training and can continue a sequence at any token: any cut
of a sequence gives the result of one call. Neither has a backward, or lets the host wait.

Legend: s tokens, B batch rows, P projection width, N sequences (B, or the packed documents), C conv
channels, W conv taps, H heads with a state, V columns of a state.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..documents import Documents
from ..front.history import History, HistoryTable
from ..host_tables import cached_by_stream, to_device
from ..parts import Parts
from ..rules.base import on_tokens
from .aligned import decode_on_grid, prefill_on_grid
from .carry import Carry


@torch.no_grad()
def prefill(
    proj: Tensor,
    parts: Parts,
    carry: Carry | None = None,
    documents: Documents | None = None,
    *,
    stands: Sequence[int] | None = None,
) -> tuple[Tensor, Carry]:
    """Mix the next tokens of N sequences, any number of tokens.

    Args:
        proj: ``[s, B, P]`` in the front's layout, any strides of s and B.
        carry: where the sequences continue; None: they begin.
        documents: boundaries when N sequences lie end to end in one batch row (B must be 1), empty
            ones included; their carry stays as it was.
        stands: how many tokens each sequence has had; an aligned mixer needs it with a carry.

    Returns:
        ``[s, B, H * V]``, and the carry after the last token of each.

    Raises:
        ValueError: packed rows with B > 1, boundaries that do not cover them, another carry.
    """
    s, B, _ = proj.shape
    if documents is not None:
        if B != 1:
            raise ValueError(
                f"packed sequences need a batch of 1, got projection rows {tuple(proj.shape)}; lay "
                f"them end to end and extend the boundaries."
            )
        Documents.from_cu_seqlens(documents, s)
    sequences = B if documents is None else len(documents.lengths)
    goes_on = carry is not None
    if carry is None:
        carry = parts.shape.zeros(sequences, proj.dtype, proj.device)
    parts.shape.check(carry, sequences, proj.dtype)
    if s == 0 or B == 0:
        return proj.new_empty(s, B, parts.state.heads * parts.state.columns), carry

    if parts.aligned:
        stands = _stands(stands, sequences) if goes_on else [0] * sequences
        return prefill_on_grid(proj, parts, carry, stands, documents)
    past = None
    if goes_on and parts.past:
        past = _history_of(carry.history, documents, s)
    inputs = parts.front.forward(proj, parts.of_front, documents, history=past)
    filled = None
    if documents is not None and 0 in documents.lengths:
        # A rule gets the states of non-empty documents only; an empty document keeps its state.
        filled = _filled(documents.lengths, proj.device)
    initial = None
    if goes_on:
        initial = carry.state if filled is None else carry.state.index_select(0, filled)
    output = parts.rule.begin(inputs, documents).run(initial, keep=False, final=True)
    assert output.final is not None
    final = output.final.to(carry.state.dtype)
    if filled is not None:
        final = carry.state.index_copy(0, filled, final)
    history = last_rows(proj[..., parts.front.layout.conv_columns], carry.history, documents)
    return parts.read_out(output.o, proj), Carry(history, final)


@torch.no_grad()
def decode(
    proj: Tensor, parts: Parts, carry: Carry, *, stands: Sequence[int] | None = None
) -> tuple[Tensor, list[Carry]]:
    """Mix one or a few tokens of every sequence, one after the other.

    A token's bits do not depend on how many tokens are given at once.

    Args:
        proj: ``[s, N, P]``.
        carry: where the N sequences continue.
        stands: as in :func:`prefill`.

    Returns:
        ``[s, N, H * V]``, and the carry after each of the s tokens. Continue from the last one, or
        from an earlier one if later tokens are not accepted (see :func:`.carry.choose`).

    Raises:
        ValueError: a carry of other sequences, sizes or dtypes; no token.
    """
    s, N, _ = proj.shape
    if s == 0:
        raise ValueError("decode got no token; give the projection rows [s, N, P] of at least one.")
    parts.shape.check(carry, N, proj.dtype)
    mixed, after = [], []
    had = _stands(stands, N) if parts.aligned else ()
    for token, row in enumerate(proj.split(1)):
        if parts.aligned:
            carry = Carry(*(x.clone(memory_format=torch.contiguous_format) for x in carry))
            made = decode_on_grid(row, parts, carry, [tokens + token for tokens in had])
        else:
            made, carry = _one_token(row, parts, carry)
        mixed.append(made)
        after.append(carry)
    return mixed[0] if s == 1 else torch.cat(mixed), after


def _stands(stands: Sequence[int] | None, sequences: int) -> Sequence[int]:
    if stands is None or len(stands) != sequences:
        raise ValueError(
            f"an aligned mixer computes in chunks counted from the start of a sequence: give "
            f"stands=, how many tokens each of the {sequences} sequences has had, got {stands}."
        )
    return stands


def _one_token(row: Tensor, parts: Parts, carry: Carry) -> tuple[Tensor, Carry]:
    """``[1, N, P]``: the front reads the history as W - 1 rows before the token's row."""
    steps = parts.steps
    front = steps.for_step(row.dtype)
    past, columns = parts.past, front.layout.conv_columns
    rows = row.new_zeros(past + 1, *row.shape[1:])
    rows[:past, :, columns] = carry.history.permute(2, 0, 1)
    rows[past:] = row
    inputs = front.forward(rows, parts.of_front, None)
    inputs = on_tokens(inputs, lambda x: x[:, past:].contiguous())
    output = steps.step_rule.begin(inputs, None).run(carry.state, keep=False, final=True)
    assert output.final is not None
    history = rows[1:, :, columns].permute(1, 2, 0).contiguous()
    return parts.read_out(output.o, row), Carry(history, output.final)


def _history_of(history_NCW: Tensor, documents: Documents | None, tokens: int) -> History:
    """Of every sequence its W - 1 rows in the carry, oldest first."""
    packed, device = documents is not None, history_NCW.device
    rows = history_NCW.permute(2, 0, 1)
    if packed:
        rows = history_NCW.transpose(1, 2).flatten(0, 1)[:, None]
    lengths = Documents.lengths_of(documents, tokens)
    return History(rows, _history_table(lengths, history_NCW.shape[2], device))


@cached_by_stream(32)
def _history_table(lengths: tuple[int, ...], past: int, device: torch.device) -> HistoryTable:
    counts = torch.tensor(lengths, dtype=torch.int64, device="cpu")
    oldest = torch.arange(len(lengths), device="cpu") * past
    before = oldest[:, None] + torch.arange(past - 1, -1, -1, device="cpu")
    nothing, first = counts[:0], counts.cumsum(0) - counts
    return HistoryTable.build(first, counts, before, nothing, sum(lengths), device)


@cached_by_stream(32)
def _filled(lengths: tuple[int, ...], device: torch.device) -> Tensor:
    """int64, which documents have tokens."""
    index = [n for n, length in enumerate(lengths) if length]
    return to_device(torch.tensor(index, dtype=torch.int64, device="cpu"), device)


@cached_by_stream(32)
def _last_index(
    lengths: tuple[int, ...], past: int, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """For each of the N * past rows: its new token, its old row, and whether to take the token."""
    length = torch.tensor(lengths, dtype=torch.int64, device="cpu")[:, None]
    start = length.cumsum(0) - length
    place = length - past + torch.arange(past, device="cpu")  # within the sequence; < 0: older
    token = (start + place.clamp(min=0)).clamp(max=max(sum(lengths) - 1, 0))
    old = torch.arange(len(lengths), device="cpu")[:, None] * past + (place + past).clamp(
        max=past - 1
    )
    token, old, fresh = (to_device(x.flatten(), device) for x in (token, old, place >= 0))
    return token, old, fresh


def last_rows(rows_sBC: Tensor, before_NCp: Tensor, documents: Documents | None) -> Tensor:
    """The last p convolved rows of every sequence, ``[N, C, p]``, of new ones and p before them."""
    N, _, past = before_NCp.shape
    if documents is None:
        # Copy only the new rows that stay.
        tail = rows_sBC[max(rows_sBC.shape[0] - past, 0) :].permute(1, 2, 0)
        return torch.cat([before_NCp, tail], dim=2)[..., tail.shape[2] :].contiguous()
    token, old, fresh = _last_index(documents.lengths, past, rows_sBC.device)
    before = before_NCp.transpose(1, 2).flatten(0, 1).index_select(0, old)
    last = torch.where(fresh[:, None], rows_sBC[:, 0].index_select(0, token), before)
    return last.unflatten(0, (N, past)).transpose(1, 2).contiguous()
