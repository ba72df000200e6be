"""A mixer's generation in Megatron's static and dynamic contexts.

A ``DynamicInferenceContext`` lays the tokens of a step end to end: first the s tokens
of each decoding request (s = 1 + num_speculative_tokens), then prompts or chunks of
them, then padding. A slot of the context's buffers has a request's states and last W
conv inputs; padding has slot -1.

Legend: N requests, M slots, s tokens of one request, t tokens of a step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..compat.observe import nvtx_range_of
from ..ops.autograd import uncompiled
from ..ops.documents import Documents
from ..ops.generation.memory import Memory, MemoryShape
from ..ops.generation.step import decode, prefill
from ..ops.stages import Stages
from .arguments import require_causal
from .packing import resolve_packed_seq_params
from .static_context import mix_static

if TYPE_CHECKING:
    from megatron.core.packed_seq_params import PackedSeqParams

    from .interface import Mixer

# Megatron's StaticInferenceContext or DynamicInferenceContext; the two share no
# attribute that is read here.
Context = Any


@uncompiled  # torch.compile would gain nothing: kernels and tables are cached already
def generate(
    mixer: Mixer,
    rows: Tensor,
    context: Context,
    attention_mask: Tensor | None,
    packed: PackedSeqParams | None,
) -> Tensor:
    """Turn the next tokens' rows ``[s, B, P]`` into rows ``[s, B, H V]`` for out_proj.

    The memory in ``context`` is updated. On each rank ``rows`` has all tokens, also
    under sequence parallelism. Packed sequences, context parallelism and calls that
    want gradients raise a NotImplementedError.
    """
    _refuse_generation(mixer, rows, context)
    if not context.is_static_batching():
        if attention_mask is not None or packed is not None:
            raise NotImplementedError(
                "a dynamic context holds the request of each token; pass neither an "
                "attention_mask nor packed_seq_params."
            )
        with nvtx_range_of(mixer, "mixer"):
            return _dynamic_step(mixer, rows, context)
    s, B = rows.shape[:2]
    with nvtx_range_of(mixer, "mixer"):
        if (
            packed is not None
            and resolve_packed_seq_params(packed, s, rows.device) is not None
        ):
            raise NotImplementedError(
                "a StaticInferenceContext holds one batch of equal lengths; for "
                "requests of other lengths use Megatron's DynamicInferenceContext."
            )
        offset = context.sequence_len_offset
        if attention_mask is not None:
            require_causal(
                attention_mask, B, offset + s, lambda: range(offset, offset + s)
            )
        assert mixer.layer_number is not None
        return mix_static(
            rows, mixer.stages_of_whole_sequences(rows), context, mixer.layer_number
        )


def _refuse_generation(mixer: Mixer, rows: Tensor, context: Context) -> None:
    """Raise for a context or layer that cannot generate, and for rows that need a
    gradient."""
    static = getattr(context, "is_static_batching", None)
    if static is None or not (static() or hasattr(context, "mamba_states_cache")):
        raise NotImplementedError(
            f"{type(mixer).__name__} generates with Megatron's StaticInferenceContext "
            f"and DynamicInferenceContext, not with a {type(context).__name__}."
        )
    if mixer.layer_number is None:
        raise ValueError(
            "a layer keeps its state under its layer_number; build it with "
            "layer_number=1, 2, ..."
        )
    cp_size = mixer.pg_collection.cp.size()
    if cp_size > 1 and not getattr(context, "whole_on_every_rank", False):
        raise NotImplementedError(
            f"generation runs on whole sequences, and this layer was built with "
            f"context_parallel_size={cp_size}; build the model with 1 and load the "
            f"checkpoint there, or let every rank run all tokens, with a context from "
            f"megatron_gdn.inference.generate.static_context."
        )
    if torch.is_grad_enabled() and rows.requires_grad:
        raise NotImplementedError(
            "generation has no backward; call the model under torch.inference_mode() "
            "or torch.no_grad(), or without an inference context to train it."
        )


def _dynamic_step(mixer: Mixer, rows: Tensor, context: Context) -> Tensor:
    """Turn a step's rows ``[t, 1, P]``, padding included, into rows ``[t, 1, H V]``."""
    if not getattr(context, "is_hybrid_model", False):
        raise ValueError(
            f"this {type(context).__name__} has no buffers for recurrent states; give "
            "its InferenceConfig a mamba_inference_state_config."
        )
    if getattr(context, "mamba_slot_allocator", None) is not None:
        raise NotImplementedError(
            f"{type(mixer).__name__} does not store states at the ends of cached "
            "prefixes; set prefix_caching_mamba_gb=None."
        )
    assert mixer.layer_number is not None
    number = mixer.layer_number - mixer.pp_layer_offset
    conv_state, ssm_state = context.mamba_states_cache(number)
    s = 1 + context.num_speculative_tokens
    conv_steps = None
    ssm_steps = None
    if s > 1:
        conv_steps, ssm_steps = context.mamba_states_cache(number, intermediate=True)
    padded = context.padded_batch_dimensions
    real = context.batch_dimensions
    count = padded.decode_req_count * s
    mixed = None
    if count:
        of_requests = rows[:count, 0].unflatten(0, (-1, s))
        slots = context.mamba_metadata.batch_indices_decode
        mixed = mixer.ssm_decode(
            of_requests, conv_state, ssm_state, slots, conv_steps, ssm_steps
        )
        mixed = mixed.flatten(0, 1)[:, None]
    if mixed is None or count < len(rows):
        decoded = mixed
        heads, _, columns, _ = mixer.dims.state
        mixed = rows.new_zeros(rows.shape[0], 1, heads * columns)
        if decoded is not None:
            mixed[:count] = decoded
    if padded.prefill_req_count:
        begin = real.decode_req_count * s
        mixed[begin:] = mixer.ssm_prefill(rows[begin:], conv_state, ssm_state, context)
    return mixed


def state_shapes_per_request(
    mixer: Mixer,
) -> tuple[tuple[int, int], tuple[int, int, int]]:
    """The shapes of a request's conv window ``[C, W]`` and its states ``[H, K, V]``.

    States are ``[H, V, K]`` if ``state_transposed``. In ``batch_invariant_mode`` the
    window is larger, as described in :class:`..ops.generation.memory.Memory`.
    """
    heads, rows, columns, _ = mixer.dims.state
    if mixer.state_transposed:
        states = (heads, columns, rows)
    else:
        states = (heads, rows, columns)
    taps = mixer.dims.conv_kernel_dim
    on_grid = mixer.config.batch_invariant_mode
    return MemoryShape.of(
        mixer.dims.layout, mixer.dims.state, taps, on_grid
    ).window, states


def decode_requests(
    mixer: Mixer,
    projected: Tensor,
    conv_state: Tensor,
    ssm_state: Tensor,
    batch_indices: Tensor | None = None,
    intermediate_conv_state: Tensor | None = None,
    intermediate_ssm_state: Tensor | None = None,
) -> Tensor:
    """Turn ``projected [N, s, P]``, N requests' next tokens, into rows ``[N, s, H V]``.

    ``conv_state``, ``ssm_state``: the context's histories and states; request n has
    slot ``batch_indices[n]`` (default n). The intermediate buffers ``[M, s, ...]``
    receive the memory after each token, and the context later keeps the memory after
    the last accepted token. Several tokens without intermediate buffers raise a
    ValueError.
    """
    rows = projected.transpose(0, 1)
    slots = batch_indices
    if slots is None:
        slots = torch.arange(len(projected), device=projected.device)
    stages = mixer.stages_of_whole_sequences(rows)
    s = len(rows)
    memory = _checked_memory(mixer, stages, rows, conv_state, ssm_state, slots)
    after = None
    if intermediate_conv_state is not None and intermediate_ssm_state is not None:
        after = _memory_of(mixer, intermediate_conv_state, intermediate_ssm_state)
    if s > 1 and after is None:
        raise ValueError(
            f"{s} tokens at once need buffers for the states after each token, so that "
            "tokens which are not accepted can be taken back; set "
            f"num_speculative_tokens={s - 1} in the InferenceConfig."
        )
    return decode(rows, stages, memory, after).transpose(0, 1)


def prefill_requests(
    mixer: Mixer,
    projected: Tensor,
    conv_state: Tensor,
    ssm_state: Tensor,
    context: Context,
) -> Tensor:
    """Run prompts or chunks of prompts; each continues from the memory in its request's
    slot.

    ``projected [t, 1, P]`` has the sequences' rows, then padding. The result
    ``[t, 1, H V]`` is zero at padding. The capture of a CUDA graph raises a
    NotImplementedError.
    """
    if projected.is_cuda and torch.cuda.is_current_stream_capturing():
        raise NotImplementedError(
            "prompts are cut by lengths that the host knows, which a CUDA graph would "
            "freeze; set use_cuda_graphs_for_non_decode_steps=False in the "
            "InferenceConfig."
        )
    stages = mixer.stages_of_whole_sequences(projected)
    metadata = context.mamba_metadata
    offsets = tuple(metadata.cu_seqlens_list)  # offsets of the requests' tokens
    memory = _checked_memory(mixer, stages, projected, conv_state, ssm_state)
    mixed = projected.new_zeros(
        len(projected), 1, stages.state.heads * stages.state.columns
    )
    if len(offsets) > 1:
        slots = metadata.batch_indices_prefill[: len(offsets) - 1]
        documents = Documents(offsets, projected.device)
        real = slice(offsets[-1])
        mixed[real] = prefill(
            projected[real], stages, memory._replace(slots=slots), documents
        )
    return mixed


def _memory_of(
    mixer: Mixer, conv: Tensor, states: Tensor, slots: Tensor | None = None
) -> Memory:
    """The Memory in these buffers, states ``[H, K, V]``; request n has slot
    ``slots[n]``."""
    return Memory(conv, states.mT if mixer.state_transposed else states, slots)


def _checked_memory(
    mixer: Mixer,
    stages: Stages,
    rows: Tensor,
    conv: Tensor,
    states: Tensor,
    slots: Tensor | None = None,
) -> Memory:
    """The memory in the context's buffers, after a check of their shapes and dtypes."""
    dtype = rows.dtype
    H, K, V = stages.memory_shape.state
    wide = torch.promote_types(dtype, torch.float32)
    if mixer.state_transposed:
        of_states = (H, V, K)
    else:
        of_states = (H, K, V)
    for name, buffer, of_request, least in (
        ("conv", conv, stages.memory_shape.window, dtype),
        ("states", states, of_states, wide),
    ):
        if tuple(buffer.shape[1:]) != of_request:
            raise ValueError(
                f"the context holds {name} of shape {tuple(buffer.shape)}, and this "
                f"layer's are {of_request} per request. A dynamic context has room for "
                "recurrent layers of one kind and size; generate with this model "
                "through a StaticInferenceContext."
            )
        if torch.promote_types(buffer.dtype, least) != buffer.dtype:
            raise ValueError(
                f"the context holds {name} in {buffer.dtype}, which would round them "
                f"at every token; they must be {least}. Build the context with "
                "MambaInferenceStateConfig.from_model(model, "
                f"conv_states_dtype={dtype}, ssm_states_dtype={wide}); in a launch: "
                f"--mamba-inference-conv-states-dtype {_dtype_flag(dtype)} "
                f"--mamba-inference-ssm-states-dtype {_dtype_flag(wide)}."
            )
    return _memory_of(mixer, conv, states, slots)


def _dtype_flag(dtype: torch.dtype) -> str:
    """The name of ``dtype`` in Megatron's arguments: bf16, fp16 or fp32."""
    return f"{'bf' if dtype is torch.bfloat16 else 'fp'}{dtype.itemsize * 8}"
