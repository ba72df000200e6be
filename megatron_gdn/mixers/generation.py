"""A mixer's generation in Megatron's static and dynamic contexts.

A ``DynamicInferenceContext`` lays the tokens of a step end to end: first the s tokens
of each decoding request (s = 1 + num_speculative_tokens), then prompts or chunks of
prompts, then padding. The context's buffers hold each request's states and last W conv
inputs. A slot is the index of one request in these buffers; padding has slot -1.

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

# Megatron's StaticInferenceContext or DynamicInferenceContext: after
# ``is_static_batching`` the code here reads other attributes of each.
InferenceContext = Any


@uncompiled  # torch.compile would gain nothing: kernels and tables are cached already
def generate(
    mixer: Mixer,
    rows: Tensor,
    context: InferenceContext,
    attention_mask: Tensor | None,
    packed: PackedSeqParams | None,
) -> Tensor:
    """Turn the next tokens' rows ``[s, B, P]`` into rows ``[s, B, H V]`` for out_proj.

    The states and histories in ``context`` are read and updated. On each rank ``rows``
    has all tokens, also under sequence parallelism.

    Raises:
        NotImplementedError: packed sequences, context parallelism, a mask that is not
            causal, or rows that need a gradient.
        ValueError: the mixer has no ``layer_number``, or the rows do not fit the
            context's buffers or the tokens before them.
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


def _refuse_generation(mixer: Mixer, rows: Tensor, context: InferenceContext) -> None:
    """Raise for a context or layer that cannot generate, and for rows that need a
    gradient."""
    is_static = getattr(context, "is_static_batching", None)
    is_known = is_static is not None and (
        is_static() or hasattr(context, "mamba_states_cache")
    )
    if not is_known:
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


def _dynamic_step(mixer: Mixer, rows: Tensor, context: InferenceContext) -> Tensor:
    """Turn a step's rows ``[t, 1, P]`` into rows ``[t, 1, H V]``; both have padding.

    Decoding requests run through ``mixer.ssm_decode``, prompts through
    ``mixer.ssm_prefill``; ``context`` has the buffers of both.
    """
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
    # the context only has buffers for the layers of this pipeline stage
    number_on_stage = mixer.layer_number - mixer.pp_layer_offset
    conv_state, ssm_state = context.mamba_states_cache(number_on_stage)
    s = 1 + context.num_speculative_tokens
    # buffers for the memory after each token of a request
    conv_steps = None
    ssm_steps = None
    if s > 1:
        conv_steps, ssm_steps = context.mamba_states_cache(
            number_on_stage, intermediate=True
        )
    padded_counts = context.padded_batch_dimensions
    real_counts = context.batch_dimensions
    decoded_tokens = padded_counts.decode_req_count * s
    decoded = None
    if decoded_tokens:
        rows_NsP = rows[:decoded_tokens, 0].unflatten(0, (-1, s))
        slots = context.mamba_metadata.batch_indices_decode
        decoded = mixer.ssm_decode(
            rows_NsP, conv_state, ssm_state, slots, conv_steps, ssm_steps
        )
        decoded = decoded.flatten(0, 1)[:, None]
    if decoded is not None and decoded_tokens == len(rows):
        mixed = decoded
    else:
        state = mixer.dims.state_shape
        mixed = rows.new_zeros(rows.shape[0], 1, state.heads * state.columns)
        if decoded is not None:
            mixed[:decoded_tokens] = decoded
    if padded_counts.prefill_req_count:
        # Prompts begin after the real decoding requests, so they overwrite the results
        # of padded requests.
        begin = real_counts.decode_req_count * s
        mixed[begin:] = mixer.ssm_prefill(rows[begin:], conv_state, ssm_state, context)
    return mixed


def state_shapes_per_request(
    mixer: Mixer,
) -> tuple[tuple[int, int], tuple[int, int, int]]:
    """The shapes of a request's conv window ``[C, W]`` and of its states ``[H, K, V]``.

    The states are ``[H, V, K]`` if ``state_transposed``. In ``batch_invariant_mode``
    the window is larger, as described in :class:`..ops.generation.memory.Memory`.
    """
    dims = mixer.dims
    state = dims.state_shape
    if mixer.state_transposed:
        states = (state.heads, state.columns, state.rows)
    else:
        states = (state.heads, state.rows, state.columns)
    shape = MemoryShape.of(
        dims.layout,
        dims.state_shape,
        dims.conv_kernel_dim,
        mixer.config.batch_invariant_mode,
    )
    return shape.dynamic_context_history, states


def decode_requests(
    mixer: Mixer,
    projected: Tensor,
    conv_state: Tensor,
    ssm_state: Tensor,
    batch_indices: Tensor | None = None,
    intermediate_conv_state: Tensor | None = None,
    intermediate_ssm_state: Tensor | None = None,
) -> Tensor:
    """Turn the rows of the next s tokens of N requests into rows ``[N, s, H V]``.

    Args:
        projected: ``[N, s, P]``.
        conv_state, ssm_state: the context's histories and states, updated in place.
        batch_indices: int ``[N]``, the slot of each request; None: request n has slot
            n.
        intermediate_conv_state, intermediate_ssm_state: buffers ``[M, s, ...]`` that
            receive histories and states after each token. Later the context takes the
            histories and states after the last accepted token.

    Raises:
        ValueError: buffers of another shape or dtype, or several tokens without
            intermediate buffers.
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
    context: InferenceContext,
) -> Tensor:
    """Run prompts or chunks of prompts; each starts from the state in its request's
    slot.

    ``projected [t, 1, P]`` has the rows of all prompts end to end, then padding. The
    result ``[t, 1, H V]`` is zero at padding. ``conv_state`` and ``ssm_state`` are the
    context's buffers, updated in place. Raises a NotImplementedError while a CUDA graph
    is captured.
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
        len(projected), 1, stages.state_shape.heads * stages.state_shape.columns
    )
    if len(offsets) > 1:
        slots = metadata.batch_indices_prefill[: len(offsets) - 1]
        documents = Documents(offsets, projected.device)
        tokens = offsets[-1]  # without padding
        mixed[:tokens] = prefill(
            projected[:tokens], stages, memory._replace(slots=slots), documents
        )
    return mixed


def _memory_of(
    mixer: Mixer, conv: Tensor, states: Tensor, slots: Tensor | None = None
) -> Memory:
    """The Memory over the context's buffers ``conv`` and ``states``.

    Its states are views ``[M, H, K, V]``; request n has slot ``slots[n]``.
    """
    if mixer.state_transposed:
        states = states.mT
    return Memory(conv, states, slots)


def _checked_memory(
    mixer: Mixer,
    stages: Stages,
    rows: Tensor,
    conv: Tensor,
    states: Tensor,
    slots: Tensor | None = None,
) -> Memory:
    """The result of :func:`_memory_of` for the context's buffers ``conv [M, C, W]`` and
    ``states [M, H, K, V]``.

    Raises a ValueError if a buffer does not fit ``stages``, or would round ``rows`` or
    states.
    """
    dtype = rows.dtype
    H, K, V = stages.memory_shape.state
    wide = torch.promote_types(dtype, torch.float32)
    if mixer.state_transposed:
        state_shape = (H, V, K)
    else:
        state_shape = (H, K, V)
    for name, buffer, shape_per_request, narrowest in (
        ("conv", conv, stages.memory_shape.dynamic_context_history, dtype),
        ("states", states, state_shape, wide),
    ):
        if tuple(buffer.shape[1:]) != shape_per_request:
            raise ValueError(
                f"the context holds {name} of shape {tuple(buffer.shape)}, and this "
                f"layer's are {shape_per_request} per request. A dynamic context has "
                "room for recurrent layers of one kind and size; generate with this "
                "model through a StaticInferenceContext."
            )
        if torch.promote_types(buffer.dtype, narrowest) != buffer.dtype:
            raise ValueError(
                f"the context holds {name} in {buffer.dtype}, which would round them "
                f"at every token; they must be {narrowest}. Build the context with "
                "MambaInferenceStateConfig.from_model(model, "
                f"conv_states_dtype={dtype}, ssm_states_dtype={wide}); in a launch: "
                f"--mamba-inference-conv-states-dtype {_megatron_dtype_name(dtype)} "
                f"--mamba-inference-ssm-states-dtype {_megatron_dtype_name(wide)}."
            )
    return _memory_of(mixer, conv, states, slots)


def _megatron_dtype_name(dtype: torch.dtype) -> str:
    """The name of ``dtype`` in Megatron's arguments: bf16, fp16 or fp32."""
    if dtype is torch.bfloat16:
        return "bf16"
    return f"fp{dtype.itemsize * 8}"
