"""Causal attention over packed documents and trees of documents, with context
parallelism.

Legend: S tokens of the whole buffer in sequence order, s tokens of this rank in the
rank's order, B batch (1 when packed), H query heads and G key heads of this
tensor-parallel rank, D head size.
"""

from __future__ import annotations

import copy
from contextlib import nullcontext
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.inference.contexts import BaseInferenceContext
from megatron.core.models.common.embeddings.rope_utils import apply_rotary_pos_emb
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from ..context_parallel.gathered import LocalDocument, gather_in_order
from ..context_parallel.layouts import SequenceLayout, positions
from ..ops.documents import Documents, one_document
from .arguments import require_causal
from .flex_attention import DocumentMask, attend
from .loader_layout import AUTO, HasCpLayout, LoaderLayout
from .packing import TREE_FORMAT, MicroBatchShare, context_parallel_group_of
from .rotary_lengths import explain_rotary_lengths

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_CAUSAL_MASK_TYPES = (AttnMaskType.causal, AttnMaskType.padding_causal)


class TorchAttention(HasCpLayout, DotProductAttention):
    """Softmax attention, for the field ``core_attention`` of Megatron's
    ``SelfAttentionSubmodules``.

        o_t = sum_j p_tj v_j,  p_t = softmax_j(scale q_t . k_j),  j <= t in t's document

    On one context-parallel rank, a batch that is not packed runs in Megatron's
    DotProductAttention with all its options. With packed documents or context
    parallelism, every rank gathers the keys and values of all ranks, and attends with
    its own queries. So the number of heads does not limit the number of ranks. GPUs run
    ``flex_attention``. On a CPU, in fp64, with dropout, with head sizes below 16 and in
    ``batch_invariant_mode``, plain torch runs each document by itself.

    Constructor arguments are those of DotProductAttention, and ``cp_layout`` as in
    `GatedDeltaNet`. Latent attention gives ``v_channels``, the columns of a head's
    value. It also gives ``k_channels`` and the ``softmax_scale`` for them, so
    ``k_channels`` is not read.
    """

    def __init__(
        self,
        config: TransformerConfig,
        *args: Any,
        pg_collection: ProcessGroupCollection | None = None,
        cp_layout: str | SequenceLayout = AUTO,
        k_channels: int | None = None,
        v_channels: int | None = None,
        **kwargs: Any,
    ) -> None:
        """Build Megatron's attention for one context-parallel rank.

        ``cp_layout`` says how the loader cuts sequences. ``v_channels`` are the columns
        of a head's value; None: those of its query. ``k_channels`` is not read.
        """
        if pg_collection is None:
            pg_collection = ProcessGroupCollection.use_mpu_process_groups(["tp", "cp"])
        # DotProductAttention refuses a context_parallel_size above 1.
        super().__init__(
            _config_of_one_rank(config), *args, pg_collection=pg_collection, **kwargs
        )
        self.config = config
        if v_channels is not None:
            heads = self.num_attention_heads_per_partition
            # the columns of the output; Megatron takes those of the queries
            self.hidden_size_per_partition = heads * v_channels
        self.loader_layout = LoaderLayout(cp_layout, config)
        if config.context_parallel_size > 1:
            self._require_plain_attention(
                f"context_parallel_size={config.context_parallel_size}"
            )

    @property
    def cp_group(self) -> ProcessGroup:
        """The context-parallel group, ``pg_collection.cp``; either may be set."""
        return self.pg_collection.cp

    @cp_group.setter
    def cp_group(self, group: Any) -> None:
        """Use ``group`` in later forwards; None: this rank has whole sequences."""
        if group is not self.pg_collection.cp:
            # other modules share the old object
            self.pg_collection = copy.copy(self.pg_collection)
            self.pg_collection.cp = group

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """Attend with this rank's queries to all ranks' keys; return ``[s, B, H * D]``.

        ``query`` is ``[s, B, H, D]``; ``key`` and ``value`` have G heads. In generation
        ``key`` and ``value`` have all tokens so far, and ``query`` has the last tokens.
        Packed inputs may lack the dimension B. ``attn_mask_type`` (Megatron's) says
        which keys a query sees. With packed documents, context parallelism or
        ``batch_invariant_mode``, ``attention_mask`` must be None or causal;
        ``attention_bias`` must be None.
        """
        share = MicroBatchShare.of(
            packed_seq_params,
            self.cp_group,
            self.loader_layout.of,
            query.shape[0],
            query.device,
        )
        if attention_bias is not None:
            raise NotImplementedError(
                "TorchAttention adds no attention_bias; pass None."
            )
        if share.documents is None and share.size == 1:
            queries = query.shape[0]
            keys = key.shape[0]
            if self.config.batch_invariant_mode:
                require_causal(
                    attention_mask,
                    query.shape[1],
                    keys,
                    lambda: range(keys - queries, keys),
                )
                return self._query_by_query(query, key, value)
            # in generation the queries are the last tokens: True hides a later key
            if attention_mask is None and 1 < queries < keys:
                position = torch.arange(keys, device=query.device)
                query_position = position[keys - queries :, None]
                attention_mask = (position > query_position)[None, None]
            config = self.config
            # With a context_parallel_size above 1, Megatron's dev would gather the keys
            # here.
            self.config = _config_of_one_rank(self.config)
            try:
                return super().forward(
                    query, key, value, attention_mask, attn_mask_type
                )
            finally:
                self.config = config
        is_packed = share.documents is not None
        if is_packed:
            feature = "packed documents"
            rows = 1
        else:
            feature = "context parallelism"
            rows = query.shape[1]
        self._require_plain_attention(feature, attn_mask_type)
        tokens = query.shape[0] * share.size
        require_causal(attention_mask, rows, tokens, lambda: share.positions)
        # Megatron removes the dimension B of "thd" queries
        lacks_batch = query.dim() == 3
        if lacks_batch:
            query, key, value = (x.unsqueeze(1) for x in (query, key, value))
        key = share.gather(key)
        value = share.gather(value)
        if self._runs_flex(query) and self._runs_flex(value):
            out_sBHD = attend(query, key, value, _shared_mask(share), self._scale)
        else:
            query_by_query = self.config.batch_invariant_mode and share.size == 1
            out_sBHD = torch.cat(
                [
                    self._attend_in_document(
                        document, query, key, value, query_by_query
                    )
                    for document in share.local_documents
                ]
            )
        if lacks_batch:
            return out_sBHD.flatten(1)
        return out_sBHD.flatten(2)

    @property
    def _scale(self) -> float:
        """The factor of q . k before the softmax.

        With ``apply_query_key_layer_scaling`` Megatron divides ``softmax_scale`` by the
        layer's number, and its softmax multiplies by this number again.
        """
        return self.softmax_scale * (self.scale_mask_softmax.scale or 1.0)

    @property
    def _dropout(self) -> float:
        """The probability with which dropout zeroes an attention weight in this
        forward."""
        if self.training:
            return self.attention_dropout.p
        return 0.0

    def _runs_flex(self, query: Tensor) -> bool:
        """Whether ``flex_attention`` can compute the attention of ``query`` (any
        tensor ``[..., D]``); else plain torch runs document by document."""
        return (
            query.is_cuda
            and query.dtype is not torch.float64
            and query.shape[-1] >= 16  # Triton's tl.dot needs at least 16
            and not self._dropout
            and not self.config.batch_invariant_mode
        )

    def _attend_in_document(
        self,
        document: LocalDocument,
        query_sBHD: Tensor,
        key_SBGD: Tensor,
        value_SBGD: Tensor,
        query_by_query: bool,
    ) -> Tensor:
        """The attention output ``[n, B, H, D]`` of this rank's n queries of one
        document.

        ``query_sBHD`` has this rank's queries. ``key_SBGD`` and ``value_SBGD`` have the
        tokens of all ranks in sequence order. ``document`` names the rows and the keys.
        ``query_by_query``: compute one query at a time, for ``batch_invariant_mode``.
        """
        query = query_sBHD[document.first_row : document.end_row]
        key = document.keys(key_SBGD)
        value = document.keys(value_SBGD)
        if query_by_query:
            return self._query_by_query(query, key, value).unflatten(
                -1, (query.shape[2], -1)
            )
        queries_per_key = query.shape[2] // key.shape[2]
        if queries_per_key > 1:
            key, value = (
                x.repeat_interleave(queries_per_key, dim=2) for x in (key, value)
            )
        mask = document.mask(query.device)  # None: query i sees keys 0 to i
        # Tensor-parallel ranks hold different heads, so each draws dropout from its own
        # generator.
        generator: Any = nullcontext()
        if self._dropout and not self.config.sequence_parallel:
            tracker: Any = tensor_parallel.get_cuda_rng_tracker()
            generator = tracker.fork()
        with generator:
            out_BHsD = F.scaled_dot_product_attention(
                query.permute(1, 2, 0, 3),
                key.permute(1, 2, 0, 3),
                value.permute(1, 2, 0, 3),
                attn_mask=mask,
                dropout_p=self._dropout,
                is_causal=mask is None,
                scale=self._scale,
            )
        return out_BHsD.permute(2, 0, 1, 3)

    def _query_by_query(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """The output ``[s, B, H * D]`` of attention, computed for one query after the
        other (slow).

        So the bits of a query's result do not depend on the other queries. ``query`` is
        ``[s, B, H, D]``, ``key`` and ``value`` are ``[S, B, G, D]``. The s queries
        belong to the last s tokens.
        """
        self._require_plain_attention("batch_invariant_mode")
        earlier_keys = key.shape[0] - query.shape[0]
        queries_per_key = query.shape[2] // key.shape[2]
        outputs = []
        for s in range(query.shape[0]):
            for b in range(query.shape[1]):
                seen = slice(earlier_keys + s + 1)
                k_HSD, v_HSD = (
                    x[seen, b].repeat_interleave(queries_per_key, dim=1).transpose(0, 1)
                    for x in (key, value)
                )
                q_H1D = query[s, b][:, None]
                # contiguous, since the order of torch's sums depends on strides
                scores = (q_H1D * k_HSD.contiguous()).sum(-1, keepdim=True)
                weights = (scores * self._scale).softmax(1)
                outputs.append((weights * v_HSD.contiguous()).sum(1).flatten())
        return torch.stack(outputs).unflatten(0, query.shape[:2])

    def _require_plain_attention(
        self, feature: str, mask_type: AttnMaskType | None = None
    ) -> None:
        """Raise if ``mask_type`` (None: the layer's) or a setting, such as a window,
        cannot run with ``feature``, which is named as in the error."""
        if mask_type is None:
            mask_type = self.attn_mask_type
        refused = {
            f"window_size={self.config.window_size}": self.scale_mask_softmax.window_size,
            f"softmax_type={self.config.softmax_type!r}": self.config.softmax_type
            != "vanilla",
            f"attn_mask_type={mask_type}": mask_type not in _CAUSAL_MASK_TYPES,
            f"attention_type={self.attention_type!r}": self.attention_type != "self",
        }
        for setting, is_set in refused.items():
            if is_set:
                raise NotImplementedError(
                    f"TorchAttention cannot combine {feature} with {setting}: with "
                    f"{feature} it computes causal self-attention with a plain softmax "
                    "and no window. Change the setting, or use Transformer Engine's "
                    "attention."
                )


def _shared_mask(share: MicroBatchShare) -> DocumentMask:
    """The mask of this rank's queries over the keys of all ranks.

    ``Documents.keep`` stores the mask on the documents, where later layers find it. A
    batch that is not packed counts as one document.
    """
    documents = share.documents or one_document(sum(share.lengths), share.device)
    return documents.keep(_mask_of_rank, share.size, share.rank, share.layout)


def _mask_of_rank(
    documents: Documents, size: int, rank: int, layout: SequenceLayout
) -> DocumentMask:
    """The mask of the queries that rank ``rank`` of ``size`` holds in ``layout``."""
    query_positions = positions(documents.lengths, size, layout)[rank]
    return DocumentMask.of(documents, query_positions)


def _config_of_one_rank(config: TransformerConfig) -> TransformerConfig:
    """``config`` if its context_parallel_size is 1, else a copy with size 1, since
    DotProductAttention refuses larger sizes."""
    if config.context_parallel_size == 1:
        return config
    config_of_one_rank = copy.copy(config)
    config_of_one_rank.context_parallel_size = 1
    return config_of_one_rank


def _is_tree(packed: PackedSeqParams | None) -> bool:
    return packed is not None and packed.qkv_format == TREE_FORMAT


@cache
def class_with_tree_attention(theirs: type) -> type:
    """A subclass of the attention class ``theirs`` in which trees of documents run in a
    `TorchAttention`, and which refuses documents that are not cut in zigzag.

    ``theirs``, such as Transformer Engine's attention, refuses trees. It takes the
    tokens of every context-parallel rank as cut in zigzag, document by document.
    """

    class WithTreeAttention(theirs):
        """``theirs``, but a tree of documents runs in a `TorchAttention`, and another
        cut than zigzag raises a ValueError."""

        # Without Transformer Engine ``theirs`` is a stand-in of Megatron's, beside
        # which Python allows no other base class.
        cp_layout = HasCpLayout.cp_layout

        def __init__(
            self,
            config: TransformerConfig,
            *args: Any,
            cp_layout: str | SequenceLayout = AUTO,
            **kwargs: Any,
        ) -> None:
            """Build ``theirs``; ``cp_layout`` says how the loader cuts sequences."""
            super().__init__(config, *args, **kwargs)
            self.loader_layout = LoaderLayout(cp_layout, config)
            groups = kwargs.get("pg_collection")
            if groups is None:
                groups = ProcessGroupCollection.use_mpu_process_groups(["cp"])
            self._own_cp_group = groups.cp
            # The TorchAttention is built at the first tree, since it refuses some
            # configs that run without trees.
            self._make_tree_attention = partial(TorchAttention, config, *args, **kwargs)
            # An empty list, or a list with the TorchAttention. The list hides the
            # module from torch, since a submodule would add keys to checkpoints.
            self._tree_attention: list[TorchAttention] = []

        def forward(
            self,
            query: Tensor,
            *args: Any,
            packed_seq_params: PackedSeqParams | None = None,
            **kwargs: Any,
        ) -> Tensor:
            """The output of ``theirs``; for a tree, the output of the `TorchAttention`,
            which gets the same arguments."""
            kwargs["packed_seq_params"] = packed_seq_params
            if not _is_tree(packed_seq_params):
                _refuse_other_cuts(
                    query, packed_seq_params, self._own_cp_group, self.loader_layout
                )
                return super().forward(query, *args, **kwargs)
            if not self._tree_attention:
                tree_attention = self._make_tree_attention()
                # one object, so that a later ``cp_layout`` counts in both
                tree_attention.loader_layout = self.loader_layout
                self._tree_attention = [tree_attention]
            # `train()` of the model does not reach the hidden module
            tree_attention = self._tree_attention[0].train(self.training)
            return tree_attention(query, *args, **kwargs)

    return WithTreeAttention


def _refuse_other_cuts(
    query: Tensor,
    packed: PackedSeqParams | None,
    own_group: ProcessGroup,
    loader_layout: LoaderLayout,
) -> None:
    """Raise a ValueError unless this rank's tokens are cut as in zigzag, as Transformer
    Engine's attention takes them.

    ``query`` is ``[s, ...]``. ``own_group`` is the attention layer's context-parallel
    group. The layout "zigzag_buffer" cuts a single document as zigzag does.
    """
    group = context_parallel_group_of(packed, own_group)
    if group is None or group.size() == 1:
        return
    # The usual case ends here, before the host would wait for a GPU's boundaries.
    if loader_layout.of(packed) is SequenceLayout.ZIGZAG:
        return
    share = MicroBatchShare.of(
        packed, own_group, loader_layout.of, query.shape[0], query.device
    )
    documents = sum(length > 0 for length in share.lengths)
    is_zigzag = share.layout is SequenceLayout.ZIGZAG or (
        share.layout is SequenceLayout.ZIGZAG_BUFFER and documents == 1
    )
    if not is_zigzag:
        raise ValueError(
            f"the loader cut this micro-batch {share.layout.value!r} over {share.size} "
            f"context-parallel ranks (documents: {documents}). Transformer Engine's "
            "attention takes each document as cut in zigzag, so queries would attend "
            "to wrong tokens. Cut documents in zigzag (Megatron's --sft does), take "
            "attention of local modules (modules='local'), or use one "
            "context-parallel rank."
        )


class TorchSelfAttention(HasCpLayout, SelfAttention):
    """``SelfAttention`` that rotates queries and keys by the positions of this rank's
    tokens.

    Megatron's ``SelfAttention`` rotates for the zigzag layout and the model's
    context-parallel group. If ``core_attention`` is a `TorchAttention`, this class
    rotates in place of Megatron for any other layout or group. With any
    ``core_attention`` it also rotates for trees, and for a micro-batch that brings
    another group, over which Transformer Engine's attention then runs. In all other
    cases Megatron rotates, for example for Transformer Engine's attention, which also
    expects the zigzag layout.

    Constructor arguments are those of SelfAttention, and ``cp_layout`` as in
    `GatedDeltaNet`.
    """

    core_attention: Any

    def __init__(
        self, *args: Any, cp_layout: str | SequenceLayout = AUTO, **kwargs: Any
    ) -> None:
        """Build Megatron's ``SelfAttention``; ``cp_layout`` says how the loader cuts
        sequences."""
        super().__init__(*args, **kwargs)
        # the first layer changes Megatron's errors about rotary positions
        explain_rotary_lengths()
        self.loader_layout = LoaderLayout(cp_layout, self.config)
        # During a forward in which this class rotates: the rotary angles of q and of k.
        # Else None.
        self._angles: tuple[Tensor, ...] | None = None

    # Megatron's layers pass all arguments from the third on by name.
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        hidden_states: Tensor,
        attention_mask: Any,  # a Tensor or None; Megatron's annotation differs
        *,
        inference_context: BaseInferenceContext | None = None,
        rotary_pos_emb: Tensor | tuple[Tensor, Tensor] | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """``[s, B, hidden] -> [s, B, hidden]``, and the output bias, as Megatron's.

        If Megatron would rotate by wrong positions, this method sets ``_angles``.
        :meth:`get_query_key_value_tensors` then rotates in place of Megatron.
        ``rotary_pos_emb`` has the model's angles: one tensor, or those of q and of k.
        """
        kwargs.update(
            attention_mask=attention_mask, packed_seq_params=packed_seq_params
        )
        if inference_context is not None:
            kwargs["inference_context"] = inference_context
        own_group = self.pg_collection.cp
        if not (
            isinstance(self.core_attention, TorchAttention)
            or _is_tree(packed_seq_params)
            or context_parallel_group_of(packed_seq_params, own_group) is not own_group
        ):
            return super().forward(
                hidden_states, rotary_pos_emb=rotary_pos_emb, **kwargs
            )
        if inference_context is not None:
            return self._generate(hidden_states, rotary_pos_emb, **kwargs)
        self._require_same_cp_group()
        # None, or for each layer whether the layer rotates nothing
        layers_without_rope: Any = self.config.no_rope_freq
        rotates = not (
            layers_without_rope and layers_without_rope[self.layer_number - 1]
        )
        if rotary_pos_emb is not None and rotates:
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
            if not self._megatron_rotates_correctly(share):
                self._angles = tuple(
                    self._local_angles(angles, share)
                    for angles in _angles_of_q_and_k(rotary_pos_emb)
                )
                rotary_pos_emb = None  # so Megatron does not rotate
        try:
            return super().forward(
                hidden_states, rotary_pos_emb=rotary_pos_emb, **kwargs
            )
        finally:
            self._angles = None

    def _generate(
        self,
        hidden_states: Tensor,
        rotary_pos_emb: Tensor | tuple[Tensor, Tensor] | None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Run Megatron's forward with an inference context, which stores k and v.

        Under context parallelism every rank runs whole sequences. But the model cuts
        its rotary angles over the ranks, so this method gathers the angles first.
        """
        if self.pg_collection.cp.size() == 1:
            return super().forward(
                hidden_states, rotary_pos_emb=rotary_pos_emb, **kwargs
            )
        if not getattr(kwargs["inference_context"], "whole_on_every_rank", False):
            raise NotImplementedError(
                "this layer was built with "
                f"context_parallel_size={self.pg_collection.cp.size()}, and generation "
                "runs on whole sequences; take the context from "
                "megatron_gdn.inference.generate.static_context."
            )
        if rotary_pos_emb is not None:
            q_angles, k_angles = (
                _gather_angles(angles, self.pg_collection.cp)
                for angles in _angles_of_q_and_k(rotary_pos_emb)
            )
            rotary_pos_emb = q_angles, k_angles
        core = self.core_attention
        groups = self.core_attention.pg_collection  # cp_group's setter replaces it
        core.cp_group = None  # each rank has queries and keys of whole sequences
        try:
            return super().forward(
                hidden_states, rotary_pos_emb=rotary_pos_emb, **kwargs
            )
        finally:
            core.pg_collection = groups

    def get_query_key_value_tensors(self, *args: Any, **kwargs: Any) -> tuple:
        """Megatron's q, k, v, ..., with q and k rotated if ``_angles`` is set."""
        tensors: Any = super().get_query_key_value_tensors(*args, **kwargs)
        if self._angles is None:
            return tensors
        rotated = [
            apply_rotary_pos_emb(
                x,
                angles,
                config=self.config,
                mscale=self._yarn_concentration_factor,
                cp_group=self.pg_collection.cp,
            )
            for x, angles in zip(tensors[:2], self._angles, strict=True)
        ]
        return tuple(rotated) + tuple(tensors[2:])

    def _require_same_cp_group(self) -> None:
        """Raise if this layer and its ``core_attention`` have different
        context-parallel groups."""
        own_group = self.pg_collection.cp
        core = self.core_attention
        if isinstance(core, TorchAttention) and core.cp_group is not own_group:
            raise ValueError(
                f"core_attention.cp_group has {core.cp_group.size()} ranks and this "
                "layer's pg_collection.cp is another group, of "
                f"{own_group.size()} ranks: queries would be rotated for one group and "
                "attend over the other. Set both to one group."
            )

    def _megatron_rotates_correctly(self, share: MicroBatchShare) -> bool:
        """Whether Megatron's own rotation uses the positions of the tokens in
        ``share``. It does so for batches without trees, on one rank or in zigzag over
        this layer's own group."""
        own_group = self.pg_collection.cp
        if share.documents is not None and share.documents.may_have_parents:
            return False
        # Megatron raises if a document is empty
        if self.config.rotary_interleaved and 0 in share.lengths:
            return False
        same_group = share.group is own_group or share.size == own_group.size() == 1
        return same_group and (share.size == 1 or share.layout is SequenceLayout.ZIGZAG)

    def _local_angles(self, angles: Tensor, share: MicroBatchShare) -> Tensor:
        """The rotary angles ``[s, 1, 1, D]`` of this rank's tokens.

        The model's ``angles`` for packed documents are those of positions
        ``0 .. max_seqlen - 1``. For other batches and for trees they are those of this
        rank's share in zigzag.
        """
        positions = share.positions.to(angles.device)
        if share.documents is not None:
            # the model treats a batch of trees as not packed
            if share.documents.may_have_parents:
                ranks = self.pg_collection.cp.size()
                if share.group is None and ranks > 1:
                    raise ValueError(
                        "a tree of documents has local_cp_size=1 and no cp_group, so "
                        "the model cut the rotary positions over its own "
                        f"context-parallel group of {ranks} ranks; set cp_group to a "
                        "group of this rank alone."
                    )
                angles = _gather_angles(angles, share.group)
            longest = share.documents.longest_sequence
            if longest > angles.shape[0]:
                raise ValueError(
                    "packed_seq_params.max_seqlen_q and max_seqlen_kv give "
                    f"{angles.shape[0]} rotary positions, but the longest document's "
                    f"slot, with the documents that it continues, has {longest} "
                    f"tokens; set both to at least {longest}."
                )
            return angles[share.documents.position_in_sequence_T[positions]]
        if share.group is not self.pg_collection.cp:
            raise NotImplementedError(
                "a batch that is not packed brings its own context-parallel group, and "
                "the model cut the rotary positions for another group; pack the "
                "sequences (qkv_format='thd')."
            )
        return _gather_angles(angles, share.group)[positions]


def _gather_angles(angles: Tensor, group: ProcessGroup | None) -> Tensor:
    """Gather the rotary angles ``[S, 1, 1, D]`` of all positions.

    ``angles [s, 1, 1, D]`` are this rank's share in zigzag. Without a ``group`` this
    rank has all positions, s = S.
    """
    total = len(angles)
    if group is not None:
        total *= group.size()
    return gather_in_order(angles, group, (total,), SequenceLayout.ZIGZAG)


def _angles_of_q_and_k(angles: Tensor | tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """The rotary angles of queries and of keys; if ``angles`` is one tensor, it is for
    both."""
    if isinstance(angles, tuple):
        return angles
    return (angles, angles)
