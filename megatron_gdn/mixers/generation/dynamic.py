"""Megatron's dynamic batching: requests come and go, and their states lie in a context's buffers.

A ``DynamicInferenceContext`` lays the tokens of a step end to end: s = 1 + num_speculative_tokens
of each request that decodes, then prompts or chunks of them, then padding. Its buffers hold in each
slot the last W inputs of the convolution, and states. Slot -1 marks a request that is padding.

Legend: N requests, M slots, s and t tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...ops.documents import Documents
from ...ops.generation.memory import Memory
from ...ops.generation.step import decode, prefill
from ...ops.parts import Parts


def check_buffers(memory: Memory, parts: Parts, dtype: torch.dtype, transposed: bool) -> None:
    """Refuse, with a ValueError, other shapes, or a dtype that would round the content."""
    shape = parts.shape
    wide, (H, K, V) = torch.promote_types(dtype, torch.float32), shape.state
    window, states = shape.window(shape.past + 1), (H, V, K) if transposed else (H, K, V)
    in_context = memory.state.mT if transposed else memory.state
    for name, buffer, of_request, least in (
        ("conv", memory.history, window, dtype), ("states", in_context, states, wide)
    ):  # fmt: skip
        if tuple(buffer.shape[1:]) != of_request:
            raise ValueError(
                f"the context holds {name} of {tuple(buffer.shape)}, and this layer's are "
                f"{of_request} per request. A dynamic context has room for recurrent layers of "
                f"one kind and size; generate with this model through a StaticInferenceContext."
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
    """The dtype by the name of Megatron's arguments: bf16, fp16, fp32."""
    return f"{'bf' if dtype is torch.bfloat16 else 'fp'}{dtype.itemsize * 8}"


def decode_requests(
    rows: Tensor, parts: Parts, memory: Memory, after: Memory | None = None
) -> Tensor:
    """The next tokens of N requests, ``[N, s, P]`` to ``[N, s, H V]``.

    ``after`` ``[M, s, ...]`` receives the memory after each token, from which the context chooses
    later. Several tokens without it are a ValueError.
    """
    s = rows.shape[1]
    if s > 1 and after is None:
        raise ValueError(
            f"{s} tokens at once need buffers for the states after each, so that tokens which are "
            f"not accepted can be taken back; set num_speculative_tokens={s - 1} in the "
            f"InferenceConfig."
        )
    return decode(rows.transpose(0, 1), parts, memory, after).transpose(0, 1)


def prefill_requests(rows: Tensor, parts: Parts, memory: Memory, metadata: Any) -> Tensor:
    """Run prompts, or chunks that continue them, each from the memory in its slot.

    ``[t, 1, P]``, sequences and then padding, give ``[t, 1, H V]``, zero in the padding.
    ``metadata`` is Megatron's ``MambaMetadata`` of the step. In the capture of a CUDA graph it
    raises a NotImplementedError.
    """
    if rows.is_cuda and torch.cuda.is_current_stream_capturing():
        raise NotImplementedError(
            "prompts are cut by lengths that the host knows, which a CUDA graph would freeze; set "
            "use_cuda_graphs_for_non_decode_steps=False in the InferenceConfig."
        )
    offsets = tuple(metadata.cu_seqlens_list)  # of the requests that are not padding
    mixed = rows.new_zeros(*rows.shape[:2], parts.state.heads * parts.state.columns)
    if len(offsets) > 1:
        slots = metadata.batch_indices_prefill[: len(offsets) - 1]
        documents, real = Documents(offsets, rows.device), slice(offsets[-1])
        mixed[real] = prefill(rows[real], parts, memory._replace(slots=slots), documents)
    return mixed


def refuse(context: Any, name: str) -> None:
    """Refuse a dynamic context without room for the memory of this class of mixers."""
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
