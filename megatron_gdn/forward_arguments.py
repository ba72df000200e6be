"""What Megatron hands to every mixer and a recurrence cannot use: ignored by name, or refused.

Ignored are arguments that only attention has a use for. Refused is what would change the result if
it were honoured: an inference context, an attention bias, and any attention mask but a causal one.
The recurrence is causal by itself and takes document boundaries from ``PackedSeqParams``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_ATTENTION_ONLY = frozenset(
    {
        "key_value_states",
        "rotary_pos_emb",
        "rotary_pos_cos",
        "rotary_pos_sin",
        "rotary_pos_cos_sin",
        "padding_mask",
    }
)

_CHECKED = "_megatron_gdn_causal"

_HELP = (
    "This layer is causal and reads document boundaries from packed_seq_params "
    "(qkv_format='thd', cu_seqlens_q) only. Pass attention_mask=None or a causal mask; put padding "
    "at the end of a sequence, and pack documents instead of masking between them: "
    "megatron_gdn.pack_rows(x, mask) lays the documents of a mask [b, S] (ids from 1, 0 at "
    "padding) end to end and gives packed_seq_params, megatron_gdn.unpack_rows brings them back."
)


def require_causal(mask: Tensor | None, local_positions: Callable[[], Tensor | range]) -> None:
    """Refuse an attention mask that masks something else than the future.

    A mask is looked at once, when a layer first meets it (which waits for the device); the other
    layers of the micro-batch see a mark on the tensor.

    Args:
        mask: None; Megatron's bool ``[b or 1, 1, s, S]`` with True where attention is forbidden,
            s this rank's tokens and S all; or a 2-D mask ``[b, S]`` that keeps every token.
        local_positions: gives the sequence positions of the s tokens.

    Raises:
        NotImplementedError: the mask is not causal.
    """
    if mask is None or getattr(mask, _CHECKED, None) == mask._version:
        return
    if mask.is_cuda and torch.cuda.is_current_stream_capturing():
        raise NotImplementedError(
            f"an attention mask cannot be checked while a CUDA graph is captured. {_HELP}"
        )
    if mask.dim() == 2:
        legal = bool((mask == 1).all())
    elif mask.dim() == 4 and mask.dtype == torch.bool:
        positions = torch.as_tensor(local_positions(), device=mask.device)
        columns = torch.arange(mask.shape[-1], device=mask.device)
        future = columns > positions[:, None]
        legal = mask.shape[-2] == future.shape[0] and bool((mask == future).all())
    else:
        legal = False
    if not legal:
        raise NotImplementedError(
            f"attention_mask of shape {tuple(mask.shape)} and dtype {mask.dtype} is not a causal "
            f"mask. {_HELP}"
        )
    setattr(mask, _CHECKED, mask._version)


def refuse_unsupported(
    inference_context: Any, inference_params: Any, sequence_len_offset: Any, keywords: dict
) -> None:
    """Refuse what the layer cannot honour.

    Raises:
        NotImplementedError: an inference context, an offset into one, or an attention bias.
        TypeError: a keyword that is neither None nor known to be of no meaning here.
    """
    if inference_context is not None or inference_params is not None:
        raise NotImplementedError(
            "GatedDeltaNet is a training layer and keeps no inference state; export the weights "
            "and serve them elsewhere, or call the model without an inference context."
        )
    if sequence_len_offset is not None:
        raise NotImplementedError("GatedDeltaNet does not support sequence_len_offset.")
    if keywords.get("attention_bias") is not None:
        raise NotImplementedError(
            "GatedDeltaNet has no attention scores to add attention_bias to; pass None."
        )
    given = {name for name, value in keywords.items() if value is not None}
    unknown = sorted(given - _ATTENTION_ONLY)
    if unknown:
        raise TypeError(
            f"GatedDeltaNet.forward() does not know the keyword(s) {', '.join(unknown)}; it "
            f"ignores only {', '.join(sorted(_ATTENTION_ONLY))}."
        )
