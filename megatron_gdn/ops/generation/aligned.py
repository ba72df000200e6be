"""Prefill and decode with the bits of training, see :mod:`megatron_gdn.ops.aligned`.

A sequence carries the state at the start of its current step of 64 tokens, the rows since then, and
the W - 1 rows before the step. Each call computes the step again from its start. So a token costs
as much as 64, and the history holds 63 whole projection rows more.

Legend: N sequences, P projection width, W conv taps, r tokens since the step began.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..aligned import STEP, front_of_step, rows_before, rule_of_step
from ..documents import Documents
from .carry import Carry

if TYPE_CHECKING:
    from ..parts import Parts


def advance(
    proj: Tensor,
    parts: Parts,
    carry: Carry,
    stands: Sequence[int],
    documents: Documents | None = None,
) -> tuple[Tensor, Carry]:
    """As :func:`.step.prefill`, for any number of tokens. Sequences run one after the other.

    Args:
        stands: how many tokens each of the N sequences has had.
    """
    pieces = proj.unbind(1) if documents is None else proj[:, 0].split(documents.lengths)
    mixed, histories, states = [], [], []
    for n, piece in enumerate(pieces):
        out, history, state = _one(
            piece, parts, carry.history[n].T, carry.state[n : n + 1], stands[n]
        )
        mixed.append(out)
        histories.append(history.T)
        states.append(state)
    together = torch.stack(mixed, 1) if documents is None else torch.cat(mixed)[:, None]
    return together, Carry(torch.stack(histories), torch.cat(states))


def _one(
    new: Tensor, parts: Parts, kept: Tensor, state: Tensor, stands: int
) -> tuple[Tensor, Tensor, Tensor]:
    past = rows_before(parts.of_front)
    r = stands % STEP
    rows = torch.cat([kept[len(kept) - r - past :], new])
    mixed, total = [], r + len(new)
    for start in range(0, total, STEP):
        end = min(start + STEP, total)
        if end <= r:
            continue  # no new token
        inputs = front_of_step(parts.front, parts.of_front, rows[start : past + end])
        o, after = rule_of_step(parts.rule, inputs, state)
        fresh = max(r - start, 0)
        of_step = rows[past + start + fresh : past + end]
        mixed.append(parts.read_out(o[:, fresh:], of_step[:, None])[:, 0])
        if end - start == STEP:
            state = after
    width = parts.state.heads * parts.state.columns
    out = torch.cat(mixed) if mixed else new.new_empty(0, width)
    return out, torch.cat([kept, new])[len(new) :], state
