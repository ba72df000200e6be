"""Megatron's dynamic batching: requests come and go, and their states lie in a context's buffers.

A ``DynamicInferenceContext`` lays the tokens of a step end to end: first those of requests that
decode, s = 1 + num_speculative_tokens each, then the prompts, or chunks of them, then padding. Its
buffers hold for each slot a window, the last W inputs of the convolution ``[C, W]``, and states. A
slot number of -1 marks a request that only pads the step. The window of an aligned mixer is one
row, whose first element counts the request's tokens in its chunk of 64, and then the history of a
:class:`Carry`, ``[W + 64, P]``.

Legend: N requests, M slots, t tokens, P projection width, C conv channels, W conv taps, H heads
with a state, K rows of a state, V columns.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...ops.documents import Documents
from ...ops.generation.aligned import newest_of_chunks
from ...ops.generation.carry import Carry
from ...ops.generation.step import decode, last_rows, prefill
from ...ops.parts import Parts
from ...ops.rules.chunk_table import CHUNK


class SlotBuffers(NamedTuple):
    """One layer's part of a context's buffers."""

    conv: Tensor  # [M, C, W], oldest first; [M, W + 64, P] of an aligned mixer
    states: Tensor  # [M, H, K, V]
    transposed: bool  # states are [M, H, V, K]

    def carry(self, slots: Tensor, history: Tensor) -> Carry:
        """The carry of the requests in these slots, with this history."""
        states = self.states.index_select(0, slots)
        return Carry(history, states.mT.contiguous() if self.transposed else states)

    def states_of(self, states: Tensor) -> Tensor:
        """A carry's states in the layout and dtype of these buffers."""
        states = states.to(self.states.dtype)
        return states.mT.contiguous() if self.transposed else states

    def check(self, parts: Parts, dtype: torch.dtype) -> None:
        """Refuse, with a ValueError, other shapes, or a dtype that would round the content."""
        shape = parts.shape
        H, K, V = shape.state
        states = (H, V, K) if self.transposed else (H, K, V)
        wide = torch.promote_types(dtype, torch.float32)
        wanted = {"conv": (shape.window(shape.past + 1), dtype), "states": (states, wide)}
        for name, (of_request, least) in wanted.items():
            buffer = getattr(self, name)
            if tuple(buffer.shape[-len(of_request) :]) != of_request:
                raise ValueError(
                    f"the context holds {name} of {tuple(buffer.shape)}, and this layer's are "
                    f"{of_request} per request. A dynamic context has room for recurrent layers of "
                    f"one kind and size; generate with this model through a "
                    f"StaticInferenceContext."
                )
            if torch.promote_types(buffer.dtype, least) != buffer.dtype:
                raise ValueError(
                    f"the context holds {name} in {buffer.dtype}, which would round them at every "
                    f"token; they must be {least}. Build the context with "
                    f"MambaInferenceStateConfig.from_model(model, conv_states_dtype={dtype}, "
                    f"ssm_states_dtype={wide}); in a launch: "
                    f"--mamba-inference-conv-states-dtype {_flag(dtype)} "
                    f"--mamba-inference-ssm-states-dtype {_flag(wide)}."
                )


def _flag(dtype: torch.dtype) -> str:
    """As Megatron's arguments call it: bf16, fp16, fp32."""
    return f"{'bf' if dtype is torch.bfloat16 else 'fp'}{dtype.itemsize * 8}"


@torch.no_grad()
def decode_requests(
    rows: Tensor,
    parts: Parts,
    buffers: SlotBuffers,
    slots: Tensor | None,
    intermediate: SlotBuffers | None = None,
) -> Tensor:
    """The next tokens of N requests, ``[N, s, P]`` to ``[N, s, H V]``, zero for padding.

    It does not wait for the device.

    Args:
        slots: integers ``[N]`` on the device, -1 for padding; None: request n is in slot n.
        intermediate: ``[M, s, C, W]`` and ``[M, s, ...]``, which receive the windows and states
            after each token; the context later chooses among them.

    Raises:
        ValueError: see :meth:`SlotBuffers.check`; several tokens without ``intermediate``.
    """
    buffers.check(parts, rows.dtype)
    N, s, _ = rows.shape
    if s > 1 and intermediate is None:
        raise ValueError(
            f"{s} tokens at once need buffers for the states after each, so that tokens which are "
            f"not accepted can be taken back; set num_speculative_tokens={s - 1} in the "
            f"InferenceConfig."
        )
    if slots is None:
        slots = torch.arange(N, device=rows.device)
    read, proj = slots.clamp(min=0).long(), rows.transpose(0, 1)
    if parts.aligned:
        made = []
        for token, row in enumerate(proj.split(1)):
            made.append(_step_on_grid(row, parts, buffers, slots))
            if intermediate is not None:
                _write(intermediate.conv[:, token], slots, buffers.conv.index_select(0, read))
                _write(intermediate.states[:, token], slots, buffers.states.index_select(0, read))
        mixed = torch.cat(made)
    else:
        windows = buffers.conv.index_select(0, read)
        mixed, after = decode(proj, parts, buffers.carry(read, windows[..., 1:].to(rows.dtype)))
        convolved = proj[..., parts.front.layout.conv_columns].to(windows.dtype)
        for token, carry in enumerate(after):
            windows = last_rows(convolved[token : token + 1], windows, None)
            if intermediate is not None:
                _write(intermediate.conv[:, token], slots, windows)
                _write(intermediate.states[:, token], slots, buffers.states_of(carry.state))
        _write(buffers.conv, slots, windows)
        _write(buffers.states, slots, buffers.states_of(after[-1].state))
    return torch.where((slots >= 0)[:, None, None], mixed.transpose(0, 1), 0)


def _step_on_grid(row: Tensor, parts: Parts, buffers: SlotBuffers, slots: Tensor) -> Tensor:
    """As :func:`...ops.generation.aligned.decode_on_grid`, for requests in slots.

    Only the device knows slots, of which some are -1, and places: windows and states are copied,
    and all states are computed.
    """
    past, read = parts.past, slots.clamp(min=0).long()
    number = torch.arange(len(slots), device=slots.device)
    windows = buffers.conv.index_select(0, read)
    place = windows[:, 0, 0].long() % CHUNK  # also in a slot that was never used
    windows[number, 1 + past + place] = row[0].to(windows.dtype)
    carry = buffers.carry(read, windows[:, 1:].to(row.dtype))
    mixed, after = newest_of_chunks(row, parts, *carry, number * CHUNK + place, None)
    assert after is not None, "all are wanted"
    full = place == CHUNK - 1
    _write(buffers.states, slots.where(full, -1), buffers.states_of(after))
    # The rows that change: the count, the new one, and at a chunk's end those before the next.
    rows = torch.cat([windows[:, :1], row.transpose(0, 1), windows[:, 1 + CHUNK :]], 1)
    rows[:, 0, 0] = (place + 1) % CHUNK
    before = torch.arange(1, 1 + past, device=slots.device).where(full[:, None], -1)
    to = torch.cat([torch.zeros_like(place)[:, None], (1 + past + place)[:, None], before], 1)
    real = (slots >= 0)[:, None] & (to >= 0)
    to = (read[:, None] * windows.shape[1] + to).where(real, -1)
    _write(buffers.conv.view(-1, windows.shape[2]), to.flatten(), rows.flatten(0, 1))
    return mixed


@torch.no_grad()
def prefill_requests(rows: Tensor, parts: Parts, buffers: SlotBuffers, metadata: Any) -> Tensor:
    """Run prompts, or chunks that continue them, each from the carry in its slot.

    Sequences end to end and then padding, ``[t, 1, P]``, give ``[t, 1, H V]``, zero in the padding.
    ``metadata`` is Megatron's ``MambaMetadata`` of the step.

    Raises:
        ValueError: see :meth:`SlotBuffers.check`.
        NotImplementedError: while a CUDA graph is captured.
    """
    buffers.check(parts, rows.dtype)
    if rows.is_cuda and torch.cuda.is_current_stream_capturing():
        raise NotImplementedError(
            "prompts are cut by lengths that the host knows, which a CUDA graph would freeze; set "
            "use_cuda_graphs_for_non_decode_steps=False in the InferenceConfig."
        )
    offsets = tuple(metadata.cu_seqlens_list)  # of the requests that are not padding
    mixed = rows.new_zeros(*rows.shape[:2], parts.state.heads * parts.state.columns)
    if len(offsets) < 2:
        return mixed
    documents = Documents(offsets, rows.device)
    slots = metadata.batch_indices_prefill[: len(offsets) - 1].long()
    windows, real = buffers.conv.index_select(0, slots), rows[: offsets[-1]]
    history, place = windows[..., 1:], None
    if parts.aligned:  # it cuts on the host, so this waits for the device
        history, place = windows[:, 1:], windows[:, 0, 0].long().tolist()
    carry = buffers.carry(slots, history.to(rows.dtype))
    mixed[: offsets[-1]], carry = prefill(real, parts, carry, documents, stands=place)
    if place is None:
        convolved = real[..., parts.front.layout.conv_columns].to(windows.dtype)
        windows = last_rows(convolved, windows, documents)
    else:
        had = [n + more for n, more in zip(place, documents.lengths, strict=True)]
        windows[:, 0, 0] = torch.tensor(had, device=slots.device) % CHUNK
        windows[:, 1:] = carry.history
    buffers.conv.index_copy_(0, slots, windows)
    buffers.states.index_copy_(0, slots, buffers.states_of(carry.state))
    return mixed


def _write(buffer: Tensor, slots: Tensor, values: Tensor) -> None:
    """``buffer[slots] = values`` except where a slot is -1."""
    if buffer.is_cuda:  # without a host read of slots
        from megatron.core.inference.contexts.attention_context.triton import tensor_ops

        tensor_ops.tensor_masked_update(buffer, slots, values)
        return
    real = slots >= 0
    buffer[slots[real].long()] = values[real]


def refuse(context: Any, name: str) -> None:
    """Refuse a dynamic context that has no room for what a mixer of this class carries."""
    if not getattr(context, "is_hybrid_model", False):
        raise ValueError(
            f"this {type(context).__name__} has no buffers for recurrent states; give its "
            f"InferenceConfig a mamba_inference_state_config."
        )
    if getattr(context, "mamba_slot_allocator", None) is not None:
        raise NotImplementedError(
            f"{name} does not store states at the ends of cached prefixes; set "
            f"prefix_caching_mamba_gb=None."
        )
