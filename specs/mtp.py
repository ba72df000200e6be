"""Multi-token prediction (MTP) in a hybrid stack: the layers after '/' in its layer pattern.

``"M*G-/M*/M*"`` is the model ``M*G-`` and two heads of the layers ``M*``, from the same stack spec.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

from megatron.core.models.hybrid.hybrid_block import HybridStackSubmodules
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.transformer.multi_token_prediction import (
    MultiTokenPredictionBlock,
    MultiTokenPredictionBlockSubmodules,
    MultiTokenPredictionLayer,
    MultiTokenPredictionLayerSubmodules,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron_gdn.compat.torch_norm import TorchRMSNorm
from megatron_gdn.context_parallel import SequenceLayout
from megatron_gdn.mixers.loader_layout import AUTO, FollowsLoader, LoaderLayout
from megatron_gdn.mixers.packing import TREE

from .kda_stack import with_kda_layers


class HybridMTPLayer(FollowsLoader, MultiTokenPredictionLayer):
    """Megatron's MTP layer, which refuses sequences that Megatron would shift wrongly.

    Megatron shifts tokens, labels and loss masks by one token per head, document by document. It
    assumes that each document begins at its offset in ``cu_seqlens_q`` and lies in the zigzag
    layout on the model's context-parallel ranks. Otherwise tokens would get other tokens' labels.

    Args:
        cp_layout: how the data loader cuts sequences over context-parallel ranks.
        kda_layer: of 'K'.
        others: as for Megatron's layer.

    Raises:
        ValueError: another layout than zigzag over several ranks.
    """

    def __init__(
        self,
        config: TransformerConfig,
        submodules: MultiTokenPredictionLayerSubmodules,
        *,
        pg_collection: ProcessGroupCollection,
        cp_layout: str | SequenceLayout = AUTO,
        kda_layer: ModuleSpec,
        mtp_layer_pattern: str,
        hybrid_submodules: HybridStackSubmodules,
        **others: Any,
    ) -> None:
        loader_layout = LoaderLayout(cp_layout, config)
        if pg_collection.cp.size() > 1:
            require_zigzag(loader_layout.expected(), pg_collection.cp)
        hybrid_submodules, letters = with_kda_layers(
            hybrid_submodules, kda_layer, mtp_layer_pattern
        )
        super().__init__(
            config, submodules, pg_collection=pg_collection, mtp_layer_pattern="".join(letters),
            hybrid_submodules=hybrid_submodules, **others,
        )  # fmt: skip
        self.loader_layout = loader_layout

    def forward(
        self, *args: Any, packed_seq_params: PackedSeqParams | None = None, **others: Any
    ) -> tuple[Tensor | None, ...]:
        """As Megatron's. Raises as `require_shiftable` and `require_zigzag` do."""
        require_shiftable(packed_seq_params, self.cp_group)
        if self.cp_group.size() > 1:
            require_zigzag(self.loader_layout.of(packed_seq_params), self.cp_group)
        return super().forward(*args, packed_seq_params=packed_seq_params, **others)


def require_zigzag(layout: SequenceLayout, cp_group: Any) -> None:
    """Refuse a cut in which Megatron would give tokens other tokens' labels."""
    if layout is not SequenceLayout.ZIGZAG:
        raise ValueError(
            f"Megatron shifts the labels of multi-token prediction in the zigzag layout, and "
            f"cp_layout={layout.value!r} over {cp_group.size()} ranks is another: labels would be "
            f"those of other tokens. Cut every document in zigzag, use one context-parallel rank, "
            f"or a layer pattern without '/'."
        )


def require_shiftable(packed: PackedSeqParams | None, cp_group: Any) -> None:
    """Refuse packed documents whose labels Megatron would shift across their ends.

    If documents and slots have two tensors of offsets, a GPU's host waits for the comparison.

    Raises:
        ValueError: slots (``cu_seqlens_q_padded``) that are longer than their documents.
        NotImplementedError: documents that continue others; a context-parallel group other than
            the model's.
    """
    if packed is None:
        return
    if packed.qkv_format == TREE:
        raise NotImplementedError(
            f"multi-token prediction with qkv_format={TREE!r}: Megatron shifts labels inside one "
            f"document, and the tokens that follow a prompt's last one lie in its responses, which "
            f"are other documents. Pack every prompt with its response as one document "
            f"(qkv_format='thd'), or use a layer pattern without '/'."
        )
    documents, slots = packed.cu_seqlens_q, packed.cu_seqlens_q_padded
    if (
        slots is not documents
        and slots is not None
        and (documents is None or slots.tolist() != documents.tolist())
    ):
        raise ValueError(
            "multi-token prediction with padded slots: Megatron shifts labels between the offsets "
            "of cu_seqlens_q, and the rows lie at those of cu_seqlens_q_padded. Make the padding "
            "part of its document, or a document of its own, with one cu_seqlens_q for all, and "
            "mask its loss."
        )
    ranks = 1 if packed.cp_group is None else packed.cp_group.size()
    given = packed.cp_group is not None or packed.local_cp_size is not None
    if given and packed.cp_group is not cp_group and (ranks, cp_group.size()) != (1, 1):
        raise NotImplementedError(
            f"multi-token prediction over a context-parallel group of {ranks} ranks that "
            f"packed_seq_params brings: Megatron shifts labels over the model's group of "
            f"{cp_group.size()}. Leave cp_group and local_cp_size None, or use a layer pattern "
            f"without '/'."
        )


def local_mtp_spec(**options: Any) -> ModuleSpec:
    """Heads over local modules, whose checkpoints load into Transformer Engine models and back."""
    parts = MultiTokenPredictionLayerSubmodules(
        enorm=TorchRMSNorm,
        hnorm=TorchRMSNorm,
        eh_proj=ColumnParallelLinear,
        mtp_model_layer=cast(Any, None),  # Megatron builds it from the pattern and the stack's spec
        layer_norm=TorchRMSNorm,
    )
    layer = ModuleSpec(module=HybridMTPLayer, params=options, submodules=parts)
    return ModuleSpec(
        module=MultiTokenPredictionBlock,
        submodules=MultiTokenPredictionBlockSubmodules(layer_specs=[layer]),
    )


def checked_mtp_spec(theirs: ModuleSpec, **options: Any) -> ModuleSpec:
    """``theirs`` with each layer replaced by a :class:`HybridMTPLayer` of the same submodules."""
    layers = [
        replace(layer, module=HybridMTPLayer, params={**layer.params, **options})
        for layer in cast(Any, theirs.submodules).layer_specs
    ]
    return replace(theirs, submodules=MultiTokenPredictionBlockSubmodules(layer_specs=layers))
