"""Carries in Megatron's StaticInferenceContext: one batch whose rows all have the same length.

They are in ``key_value_memory_dict``, beside the keys and values of attention layers. Both have the
batch in dimension 1, so Megatron's ``swap_key_value_dict`` reorders both.

Legend: s tokens, B batch rows, M most rows, P projection width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...ops.generation.aligned import decode_on_grid
from ...ops.generation.carry import Carry
from ...ops.generation.step import decode, prefill
from ...ops.parts import Parts

# The most tokens of one forward that the recurrence runs and that can be rolled back.
MOST_DECODED = 16

_PLACES = "megatron_gdn_places"


@dataclass
class _Place:
    """How many tokens some rows of the batch have had in one layer, and their last steps."""

    rows: int
    tokens: int
    memory: Tensor  # the states that the steps belong to
    before: Carry | None = None
    after: Sequence[Carry] = ()


def mix_static(rows: Tensor, parts: Parts, context: Any, layer: int) -> Tensor:
    """Mix the next s tokens of the batch rows that the context points at, ``[s, B, P]``.

    At ``sequence_len_offset`` 0 the rows begin, else they continue. The recurrence then runs up to
    :data:`MOST_DECODED` tokens; more tokens run as a chunk of prefill.

    Raises:
        ValueError: more tokens or rows than the context was made for; an offset or a batch that
            does not match this layer's state.
    """
    s, B = rows.shape[:2]
    start, offset = context.batch_size_offset, context.sequence_len_offset
    places: dict[tuple[int, int], _Place] = vars(context).setdefault(_PLACES, {})
    place = places.get((layer, start))
    _check(context, layer, place, s, B)
    memory = _memory(context, layer, parts, rows)
    mine = Carry(*(tensor[0, start : start + B] for tensor in memory))
    before, after = None, ()
    if offset == 0:
        mixed, carry = prefill(rows, parts)
    elif s > MOST_DECODED:
        mixed, carry = prefill(rows, parts, mine, stands=[offset] * B)
    elif s == 1 and parts.aligned:
        mixed, carry = decode_on_grid(rows, parts, mine, [offset] * B), mine
    else:
        before = Carry(*(tensor.clone() for tensor in mine)) if s > 1 else None
        mixed, after = decode(rows, parts, mine, stands=[offset] * B)
        carry = after[-1]
    for kept, fresh in zip(mine, carry, strict=True):
        if kept is not fresh:
            kept.copy_(fresh)
    if offset == 0:  # forget the other places that overlap these rows
        for key, other in list(places.items()):
            if key[0] == layer and key[1] < start + B and start < key[1] + other.rows:
                del places[key]
    places[layer, start] = _Place(B, offset + s, memory.state, before, after if s > 1 else ())
    return mixed


@torch.inference_mode()  # the states may be inference tensors
def roll_back(context: Any, accepted: int) -> None:
    """Keep only the first ``accepted`` tokens of the last forward, in every recurrent layer.

    The context's ``sequence_len_offset`` goes back too, so attention layers overwrite the keys of
    the other tokens. Rows that keep different numbers of tokens need Megatron's
    ``DynamicInferenceContext`` with speculated tokens.

    Args:
        context: Megatron's ``StaticInferenceContext``, after a forward of 2 to :data:`MOST_DECODED`
            tokens and before the next.
        accepted: 0 to the number of those tokens.

    Raises:
        ValueError: no such forward, or a number out of range. Nothing is changed then.
    """
    places: dict[tuple[int, int], _Place] = getattr(context, _PLACES, {})
    if not places or not all(place.after for place in places.values()):
        raise ValueError(
            f"there is no step to roll back: the last forward must have had 2 to {MOST_DECODED} "
            f"tokens at a sequence_len_offset above 0, in every recurrent layer."
        )
    for (layer, _), place in places.items():
        if context.key_value_memory_dict[layer][1] is not place.memory:
            raise ValueError(
                "the batch was reordered (swap_key_value_dict) since its last step; roll back "
                "before reordering."
            )
        if not 0 <= accepted <= len(place.after):
            raise ValueError(
                f"accepted={accepted} must be 0 to {len(place.after)}, the tokens of the last step."
            )
    for (layer, start), place in places.items():
        assert place.before is not None  # it has steps
        kept = (place.before, *place.after)[accepted]
        for tensor, fresh in zip(context.key_value_memory_dict[layer], kept, strict=True):
            tensor[0, start : start + place.rows].copy_(fresh)
        place.tokens += accepted - len(place.after)
        context.sequence_len_offset = place.tokens
        place.before, place.after = None, ()


def _check(context: Any, layer: int, place: _Place | None, s: int, B: int) -> None:
    start, offset = context.batch_size_offset, context.sequence_len_offset
    if start + B > context.max_batch_size:
        raise ValueError(
            f"{B} rows from batch_size_offset={start} on, but the inference context was made for "
            f"max_batch_size={context.max_batch_size}."
        )
    if offset + s > context.max_sequence_length:
        raise ValueError(
            f"{s} more tokens after {offset} are more than the inference context announced: "
            f"max_sequence_length={context.max_sequence_length}."
        )
    if offset == 0:
        return
    if place is None:
        raise ValueError(
            f"layer {layer} has no state of the rows from batch_size_offset={start} on, but "
            f"sequence_len_offset={offset} says that they had {offset} tokens. Begin at offset 0."
        )
    if place.rows != B:
        raise ValueError(
            f"layer {layer} carries {place.rows} rows from batch_size_offset={start} on, got {B}; "
            f"go on with the batch that was prefilled."
        )
    if place.tokens != offset:
        raise ValueError(
            f"layer {layer} stands after {place.tokens} tokens, sequence_len_offset says {offset}. "
            f"A recurrent state cannot be moved by setting the offset; to drop tokens of the last "
            f"step use megatron_gdn.inference.roll_back(context, accepted)."
        )


def _memory(context: Any, layer: int, parts: Parts, rows: Tensor) -> Carry:
    """History and state of all rows, with a dimension of 1 before them."""
    shape, most, memories = parts.shape, context.max_batch_size, context.key_value_memory_dict
    if layer not in memories:
        zeros = shape.zeros(most, rows.dtype, rows.device)
        memories[layer] = Carry(*(x[None] for x in zeros))
    memory = Carry(*memories[layer])
    shape.check(Carry(*(x[0] for x in memory)), most, rows.dtype)
    return memory
