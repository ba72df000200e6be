"""Megatron's self-attention with rotary positions that follow the layout of the tokens."""

from __future__ import annotations

from typing import Any

from megatron.core.inference.contexts import BaseInferenceContext
from megatron.core.models.common.embeddings.rope_utils import apply_rotary_pos_emb
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.attention import SelfAttention
from torch import Tensor

from ...context_parallel.layouts import SequenceLayout
from ...ops.trees import TreeDocuments
from ..loader_layout import AUTO, FollowsLoader, LoaderLayout
from .attention import MicroBatchShare, TorchAttention, gather_in_order


class TorchSelfAttention(FollowsLoader, SelfAttention):
    """``SelfAttention`` that rotates queries and keys by the positions this rank holds.

    Megatron's always rotates for the zigzag layout and for the model's own context-parallel group.
    Where that is wrong, this class rotates itself; elsewhere it runs Megatron's code.

    Constructor arguments are those of SelfAttention, and ``cp_layout``: how sequences were cut for
    context parallelism, as in `GatedDeltaNet`.
    """

    core_attention: Any

    def __init__(self, *args: Any, cp_layout: str | SequenceLayout = AUTO, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.loader_layout = LoaderLayout(cp_layout, self.config)
        self._rotations: tuple[Tensor, Tensor] | None = None  # during a forward

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Any,  # a Tensor or None; Megatron's annotation differs
        *,
        inference_context: BaseInferenceContext | None = None,
        rotary_pos_emb: Tensor | tuple[Tensor, Tensor] | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """As ``SelfAttention.forward``: ``[s, B, D]`` and the output bias or None.

        Raises:
            ValueError: ``max_seqlen_q`` of packed documents is less than their longest slot; the
                core attention runs over another group than the rotation.
            NotImplementedError: a batch that has its own context-parallel group and is not packed.
        """
        kwargs.update(attention_mask=attention_mask, packed_seq_params=packed_seq_params)
        if inference_context is not None:
            kwargs["inference_context"] = inference_context
            return self._generate(hidden_states, rotary_pos_emb, **kwargs)
        self._require_one_group()
        skips: Any = self.config.no_rope_freq  # by layer
        if rotary_pos_emb is not None and not (skips and skips[self.layer_number - 1]):
            rank_tokens = hidden_states.shape[0]
            if self.config.sequence_parallel:
                rank_tokens *= self.pg_collection.tp.size()
            share = MicroBatchShare.of(
                packed_seq_params,
                self.pg_collection.cp,
                self.loader_layout.of,
                rank_tokens,
                hidden_states.device,
            )
            if not self._megatron_rotates_right(share):
                first, second = (
                    self._of_local_tokens(angles, share) for angles in _pair(rotary_pos_emb)
                )
                self._rotations = first, second
                rotary_pos_emb = None
        try:
            return super().forward(hidden_states, rotary_pos_emb=rotary_pos_emb, **kwargs)
        finally:
            self._rotations = None

    def _generate(
        self,
        hidden_states: Tensor,
        rotary_pos_emb: Tensor | tuple[Tensor, Tensor] | None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Megatron's forward, with keys and values in the context; every rank has all tokens."""
        if self.pg_collection.cp.size() == 1:
            return super().forward(hidden_states, rotary_pos_emb=rotary_pos_emb, **kwargs)
        if not getattr(kwargs["inference_context"], "whole_on_every_rank", False):
            raise NotImplementedError(
                f"this layer was built with context_parallel_size={self.pg_collection.cp.size()}, "
                f"and generation runs on whole sequences; take the context from "
                f"megatron_gdn.inference.generate.static_context."
            )
        if rotary_pos_emb is not None:
            group = self.pg_collection.cp
            first, second = (_of_all_ranks(angles, group) for angles in _pair(rotary_pos_emb))
            rotary_pos_emb = first, second
        with self.core_attention.on_whole_sequences():
            return super().forward(hidden_states, rotary_pos_emb=rotary_pos_emb, **kwargs)

    def get_query_key_value_tensors(self, *args: Any, **kwargs: Any) -> tuple:
        tensors: Any = super().get_query_key_value_tensors(*args, **kwargs)
        if self._rotations is None:
            return tensors
        query, key, *rest = tensors
        rotated = (
            apply_rotary_pos_emb(
                x,
                angles,
                config=self.config,
                mscale=self._yarn_concentration_factor,
                cp_group=self.pg_collection.cp,
            )
            for x, angles in zip((query, key), self._rotations, strict=True)
        )
        return (*rotated, *rest)

    def _require_one_group(self) -> None:
        mine, core = self.pg_collection.cp, self.core_attention
        if isinstance(core, TorchAttention) and core.cp_group is not mine:
            raise ValueError(
                f"core_attention.cp_group has {core.cp_group.size()} ranks and this layer's "
                f"pg_collection.cp is another group, of {mine.size()}: queries would be rotated "
                f"for one and attend over the other. Set both to one group."
            )

    def _megatron_rotates_right(self, share: MicroBatchShare) -> bool:
        own_group = self.pg_collection.cp
        if isinstance(share.documents, TreeDocuments):
            return False
        if self.config.rotary_interleaved and 0 in share.lengths:  # Megatron's reshape raises
            return False
        same_group = share.group is own_group or share.size == own_group.size() == 1
        return same_group and (share.size == 1 or share.layout is SequenceLayout.ZIGZAG)

    def _of_local_tokens(self, angles: Tensor, share: MicroBatchShare) -> Tensor:
        """The angles of this rank's tokens, ``[s, 1, 1, D]``.

        ``angles``: as the model passes them. When packed, those of positions
        ``0 .. max_seqlen - 1``; else those of the positions that this rank would hold in zigzag.
        """
        positions = share.positions.to(angles.device)
        if share.documents is not None:
            if isinstance(share.documents, TreeDocuments):  # the model cut them, as if not packed
                angles = _of_all_ranks(angles, share.group)
            longest = share.documents.longest_sequence
            if longest > angles.shape[0]:
                raise ValueError(
                    f"packed_seq_params.max_seqlen_q and max_seqlen_kv give {angles.shape[0]} "
                    f"rotary positions, but the longest document's slot, with what it continues, "
                    f"has {longest} tokens; set both to at least {longest}."
                )
            return angles[share.documents.position_in_sequence_T[positions]]
        if share.group is not self.pg_collection.cp:
            raise NotImplementedError(
                "rotary positions of a batch that is not packed cannot follow a context-parallel "
                "group of the micro-batch's own; pack the sequences (qkv_format='thd')."
            )
        return _of_all_ranks(angles, share.group)[positions]


def _of_all_ranks(angles: Tensor, group: Any) -> Tensor:
    """The angles of all positions, from the zigzag share that the model cut for this rank."""
    total = angles.shape[0] * (1 if group is None else group.size())
    return gather_in_order(angles, group, (total,), SequenceLayout.ZIGZAG)


def _pair(angles: Tensor | tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return angles if isinstance(angles, tuple) else (angles, angles)
