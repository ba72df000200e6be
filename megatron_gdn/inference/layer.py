"""A layer's middle under an inference context: its projection rows go on from what it carries.

Legend: s tokens, B batch rows, P projection width, H heads with a state, V columns of a state.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..forward_arguments import require_causal
from ..observe import span
from ..ops.documents import Documents
from ..packing import resolve_packed_seq_params
from ..precision import require_wide_gates
from .carry import CarryShape
from .dynamic import mix_dynamic
from .generating import GeneratingMixer
from .requests import RequestPool
from .slots import decode_slots
from .static import mix_static
from .step import RowMixer, decode, prefill

if TYPE_CHECKING:
    from megatron.core.packed_seq_params import PackedSeqParams

    from .context import RequestsContext


def pool_for(model: torch.nn.Module, slots: int, device: torch.device | None = None) -> RequestPool:
    """A :class:`.requests.RequestPool` for all recurrent layers of ``model`` on this rank.

    Args:
        slots: the most requests at a time.
        device: where the states lie; None: where the layers' parameters do.

    Raises:
        ValueError: no layer of the model carries a state.
    """
    layers = {
        module.layer_number: module
        for module in model.modules()
        if isinstance(module, GeneratingMixer)
    }
    if not layers:
        raise ValueError("no layer of this model carries a state.")
    weight = next(iter(layers.values())).conv_weight
    shapes: dict[int, CarryShape] = {n: layer.carry_shape for n, layer in layers.items()}
    return RequestPool(shapes, slots, dtype=weight.dtype, device=device or weight.device)


def mix_inference(
    layer: GeneratingMixer,
    proj: Tensor,
    context: Any,
    attention_mask: Tensor | None,
    packed: PackedSeqParams | None,
) -> Tensor:
    """Projection rows of the next tokens to rows for out_proj; what is carried moves on.

    Args:
        proj: ``[s, B, P]``, all tokens, whatever sequence parallelism did before.
        context: Megatron's ``StaticInferenceContext`` or ``DynamicInferenceContext``, or a
            :class:`.context.RequestsContext`.
        attention_mask: None or causal.
        packed: boundaries of the requests; with a ``RequestsContext`` only.

    Returns:
        ``[s, B, H * V]``.

    Raises:
        ValueError: see :func:`.static.mix_static`, :func:`.dynamic.mix_dynamic` and
            :class:`.requests.RequestPool`.
        NotImplementedError: context parallelism, a call that wants gradients; and as mix_dynamic.
    """
    return _mix(layer, proj, context, attention_mask, packed)


@torch.compiler.disable  # one kernel after the other, from tables cached by value
def _mix(layer, proj, context, attention_mask, packed) -> Tensor:
    _refuse(layer, proj, context)
    require_wide_gates(layer)
    if not context.is_static_batching():
        if attention_mask is not None or packed is not None:
            raise NotImplementedError(
                "a dynamic context says itself which tokens belong to which request; pass neither "
                "an attention_mask nor packed_seq_params."
            )
        with span(layer, "mixer"):
            return mix_dynamic(layer, proj, context)
    mixer = layer.row_mixer(proj)
    s, B = proj.shape[:2]
    with span(layer, "mixer"):
        if getattr(context, "pool", None) is not None:
            require_causal(attention_mask, B, s, lambda: range(s))
            return _mix_requests(proj, mixer, context, layer.layer_number, packed)
        if packed is not None and resolve_packed_seq_params(packed, s, proj.device) is not None:
            raise NotImplementedError(
                "a StaticInferenceContext holds one batch of equal lengths; packed requests go "
                "through megatron_gdn.inference.context.RequestsContext."
            )
        offset = context.sequence_len_offset
        require_causal(attention_mask, B, offset + s, lambda: range(offset, offset + s))
        return mix_static(proj, mixer, context, layer.layer_number)


def _mix_requests(
    proj: Tensor,
    mixer: RowMixer,
    context: RequestsContext,
    number: int,
    packed: PackedSeqParams | None,
) -> Tensor:
    s, B = proj.shape[:2]
    pool, requests = context.pool, context.requests
    if context.slots is not None:
        return decode_slots(proj, mixer, pool.in_slots(number), context.slots)
    documents = _boundaries(packed, s, proj.device)
    lengths = (s,) * B if documents is None else documents.lengths
    if len(lengths) != len(requests):
        what = f"{B} rows" if documents is None else f"{len(lengths)} packed sequences"
        raise ValueError(f"{what} for {len(requests)} requests; give one for each, in their order.")
    pool.check(number, requests, lengths)
    carry = pool.read(number, requests)
    stands = pool.stands(number, requests)
    if documents is None and (s == 1 or context.keep_steps):
        mixed, after = decode(proj, mixer, carry, stands=stands)
        kept = after if context.keep_steps else ()
        pool.write(number, requests, after[-1], lengths, kept)
        return mixed
    mixed, carry = prefill(proj, mixer, carry, documents, stands=stands)
    pool.write(number, requests, carry, lengths)
    return mixed


def _boundaries(
    packed: PackedSeqParams | None, tokens: int, device: torch.device
) -> Documents | None:
    documents = resolve_packed_seq_params(packed, tokens, device)
    if documents is None:
        return None
    padded, real = packed.cu_seqlens_q_padded, packed.cu_seqlens_q
    if padded is not None and real is not None and not torch.equal(padded, real):
        raise ValueError(
            f"cu_seqlens_q={real.tolist()} and cu_seqlens_q_padded={padded.tolist()} leave padding "
            f"after some request, which would enter its state. Pack requests without padding."
        )
    return documents


def _refuse(layer: GeneratingMixer, proj: Tensor, context: Any) -> None:
    static = getattr(context, "is_static_batching", None)
    if static is None or not (static() or hasattr(context, "mamba_states_cache")):
        raise NotImplementedError(
            f"{type(layer).__name__} generates with Megatron's StaticInferenceContext and "
            f"DynamicInferenceContext or with megatron_gdn.inference.context.RequestsContext, not "
            f"with a {type(context).__name__}."
        )
    if layer.layer_number is None:
        raise ValueError(
            "a layer keeps its state under its layer_number; build it with layer_number=1, 2, ..."
        )
    cp_size = layer.pg_collection.cp.size()
    if cp_size > 1 and not getattr(context, "whole_on_every_rank", False):
        raise NotImplementedError(
            f"generation runs on whole sequences, and this layer was built with "
            f"context_parallel_size={cp_size}; build the model with 1 and load the "
            f"checkpoint there, or let every rank run all tokens, with a context from "
            f"megatron_gdn.inference.generate.static_context."
        )
    if torch.is_grad_enabled() and proj.requires_grad:
        raise NotImplementedError(
            "generation has no backward; call the model under torch.inference_mode() or "
            "torch.no_grad(), or without an inference context to train it."
        )
