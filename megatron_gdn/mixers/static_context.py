"""Stores mixers' histories and states in Megatron's StaticInferenceContext, whose batch
rows all have the same length.

Histories and states are in ``key_value_memory_dict``, with the batch in dimension 1
like keys and values. So Megatron's ``swap_key_value_dict`` reorders them too. s is the
number of tokens of a forward.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..ops.generation.memory import Memory, choose
from ..ops.generation.step import decode, prefill
from ..ops.stages import Stages

if TYPE_CHECKING:
    from megatron.core.inference.contexts import StaticInferenceContext

# The largest number of tokens that one forward decodes token by token, so that
# `roll_back` can undo each of these tokens.
MOST_DECODED = 16

# the attribute of a context with the `_RowProgress` of each layer and first batch row
_PROGRESS_ATTRIBUTE = "megatron_gdn_places"


@dataclass
class _RowProgress:
    """How far one layer has come in ``rows`` successive batch rows."""

    rows: int
    tokens: int  # tokens that the layer has run in each of these batch rows
    # the states of all batch rows; Megatron's reordering replaces this tensor
    states: Tensor
    # the memory of these rows before the last forward and after each of its tokens;
    # None if `roll_back` cannot undo this forward
    steps: Memory | None = None


def mix_static(
    rows: Tensor, stages: Stages, context: StaticInferenceContext, layer: int
) -> Tensor:
    """Run the next s tokens of B sequences: in_proj's output ``[s, B, P]`` becomes
    out_proj's input ``[s, B, H V]``.

    The first of the B batch rows is ``context.batch_size_offset``. If
    ``context.sequence_len_offset`` is 0, the sequences begin; else they continue. Up to
    :data:`MOST_DECODED` continuing tokens run one by one, more tokens run as one
    prefill. ``layer`` is the layer's number, by which the context stores states and
    progress.
    """
    s, B = rows.shape[:2]
    start = context.batch_size_offset
    offset = context.sequence_len_offset
    # keys: a layer and its first batch row
    progress_by_rows: dict[tuple[int, int], _RowProgress] = vars(context).setdefault(
        _PROGRESS_ATTRIBUTE, {}
    )
    progress = progress_by_rows.get((layer, start))
    _check_progress(context, layer, progress, s, B)
    memories = context.key_value_memory_dict
    if layer not in memories:  # for all batch rows, in dimension 1 as in keys
        new_memory = stages.memory_shape.zeros(
            context.max_batch_size, rows.dtype, rows.device
        )
        memories[layer] = new_memory.history[None], new_memory.state[None]
    histories, states = memories[layer]
    memory = Memory(histories[0, start : start + B], states[0, start : start + B])
    steps = None
    if offset == 0 or s > MOST_DECODED:
        mixed = prefill(rows, stages, memory, begins=offset == 0)
    else:
        # buffers for the memory after each token, for `roll_back`
        steps = memory.steps(s) if s > 1 else None
        mixed = decode(rows, stages, memory, steps)
    if offset == 0:  # forget the progress in ranges of rows that overlap this range
        for key, other in list(progress_by_rows.items()):
            other_layer, other_start = key
            overlap = other_start < start + B and start < other_start + other.rows
            if other_layer == layer and overlap:
                del progress_by_rows[key]
    progress_by_rows[layer, start] = _RowProgress(B, offset + s, states, steps)
    return mixed


# else torch would refuse to write states that are inference tensors
@torch.inference_mode()
def roll_back(context: StaticInferenceContext, accepted: int) -> None:
    """Keep only the first ``accepted`` tokens of the last forward, in every recurrent
    layer.

    This function also lowers the context's ``sequence_len_offset``, so attention layers
    overwrite the keys of the dropped tokens. If batch rows keep different numbers of
    tokens, use Megatron's ``DynamicInferenceContext`` with speculated tokens.

    Args:
        context: Megatron's ``StaticInferenceContext``, after a forward of 2 to
            :data:`MOST_DECODED` tokens and before the next forward.
        accepted: how many tokens of this forward to keep, from 0 to all.

    Raises:
        ValueError: the last forward cannot be rolled back, or ``accepted`` is out of
            range. The context is unchanged.
    """
    progress_by_rows: dict[tuple[int, int], _RowProgress] = getattr(
        context, _PROGRESS_ATTRIBUTE, {}
    )
    if not progress_by_rows or not all(
        map(_tokens_of_last_step, progress_by_rows.values())
    ):
        raise ValueError(
            "there is no step to roll back: the last forward must have had 2 to "
            f"{MOST_DECODED} tokens at a sequence_len_offset above 0, in every "
            "recurrent layer."
        )
    for (layer, _), progress in progress_by_rows.items():
        if context.key_value_memory_dict[layer][1] is not progress.states:
            raise ValueError(
                "the batch was reordered (swap_key_value_dict) since its last step; "
                "roll back before reordering."
            )
        most = _tokens_of_last_step(progress)
        if not 0 <= accepted <= most:
            raise ValueError(
                f"accepted={accepted} must be 0 to {most}, the tokens of the last step."
            )
    for (layer, start), progress in progress_by_rows.items():
        rows = slice(start, start + progress.rows)
        states = progress.states
        history, _ = context.key_value_memory_dict[layer]
        memory = Memory(history[0, rows], states[0, rows])
        assert progress.steps is not None
        accepted_N = states.new_full((progress.rows,), accepted, dtype=torch.int64)
        choose(memory, progress.steps, accepted_N)
        progress.tokens += accepted - _tokens_of_last_step(progress)
        context.sequence_len_offset = progress.tokens
        progress.steps = None


def _tokens_of_last_step(progress: _RowProgress) -> int:
    """The tokens of ``progress``'s last forward, or 0 if `roll_back` cannot undo this
    forward."""
    if progress.steps is None:
        return 0
    # `steps` also has the memory before the forward, which belongs to no token
    return progress.steps.history.shape[1] - 1


def _check_progress(
    context: StaticInferenceContext,
    layer: int,
    progress: _RowProgress | None,
    s: int,
    B: int,
) -> None:
    """Refuse s tokens of B rows that do not fit the context or do not continue
    ``progress``."""
    start = context.batch_size_offset
    offset = context.sequence_len_offset
    if start + B > context.max_batch_size or offset + s > context.max_sequence_length:
        raise ValueError(
            f"{s} tokens after {offset} of {B} rows from batch_size_offset={start} on "
            "do not fit the inference context, which was made for "
            f"max_batch_size={context.max_batch_size} and "
            f"max_sequence_length={context.max_sequence_length}."
        )
    if offset and (progress is None or (progress.rows, progress.tokens) != (B, offset)):
        if progress is None:
            has = "no state"
            after = ""
        else:
            has = f"the state of {progress.rows} rows"
            after = f", after {progress.tokens} tokens"
        raise ValueError(
            f"layer {layer} has {has} from batch_size_offset={start} on{after}, and "
            f"got {B} rows at sequence_len_offset={offset}. Begin at offset 0 and "
            "continue with the same batch; to drop tokens of the last step, use "
            "megatron_gdn.inference.roll_back(context, accepted)."
        )
