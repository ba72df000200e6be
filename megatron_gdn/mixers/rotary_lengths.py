"""Clear errors for lengths that Megatron's rotary embedding cannot process.

A model makes its table of angles before any layer runs. Without these errors Megatron
would raise errors about types and shapes.
"""

from __future__ import annotations

from functools import cache, wraps
from typing import TYPE_CHECKING, Any

from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.transformer_config import TransformerConfig

if TYPE_CHECKING:
    from megatron.core.inference.contexts import BaseInferenceContext
    from megatron.core.transformer.transformer_block import TransformerBlock
    from torch import Tensor


@cache
def explain_rotary_lengths() -> None:
    """Change Megatron's ``RotaryEmbedding``: for a length that cannot run, it raises a
    ValueError with the reason, before it makes a table of angles."""
    theirs = RotaryEmbedding.get_rotary_seq_len

    @wraps(theirs)
    def get_rotary_seq_len(
        self: RotaryEmbedding,
        inference_context: BaseInferenceContext,
        transformer: TransformerBlock,
        transformer_input: Tensor,
        transformer_config: TransformerConfig,
        packed_seq_params: PackedSeqParams | None = None,
        **others: Any,
    ) -> int:
        """Megatron's number of rows of the table of angles, after the checks.

        ``others`` has Megatron's keyword ``inference_params``, the old name of
        ``inference_context``.
        """
        _require_max_seqlen(packed_seq_params)
        length = theirs(
            self,
            inference_context,
            transformer,
            transformer_input,
            transformer_config,
            packed_seq_params,
            **others,
        )
        if inference_context is None and not others:
            _require_fragments(
                length, transformer_config.context_parallel_size, packed_seq_params
            )
        return length

    RotaryEmbedding.get_rotary_seq_len = get_rotary_seq_len


def _require_max_seqlen(packed: PackedSeqParams | None) -> None:
    """Raise if ``packed`` lacks the length of its longest document."""
    if packed is None or None not in (packed.max_seqlen_q, packed.max_seqlen_kv):
        return
    raise ValueError(
        f"packed_seq_params has max_seqlen_q={packed.max_seqlen_q} and "
        f"max_seqlen_kv={packed.max_seqlen_kv}, and a model with rotary positions "
        "reads both. Set them to the tokens of the longest document's slot, as "
        "integers."
    )


def _require_fragments(
    length: int, cp_size: int, packed: PackedSeqParams | None
) -> None:
    """Raise if Megatron cannot cut a table of ``length`` angles for ``cp_size``
    context-parallel ranks. ``packed`` is None if the batch is not packed."""
    # Megatron does not cut the table of packed documents, and with a local_cp_size it
    # cuts the table for other ranks.
    if packed is not None and (
        packed.qkv_format == "thd" or packed.local_cp_size is not None
    ):
        return
    parts = 2 * cp_size
    if cp_size == 1 or length % parts == 0:
        return
    least = -(-length // parts) * parts
    if packed is None:
        what = "a batch that is not packed has"
    else:
        what = "max_seqlen_q is"
    raise ValueError(
        f"{what} {length} tokens over {cp_size} context-parallel ranks, and a model "
        f"with rotary positions cuts its angles into {parts} equal parts, in every "
        f"cp_layout. Give a multiple of {parts} tokens (pad to {least}), or "
        "position_embedding_type='none'."
    )
