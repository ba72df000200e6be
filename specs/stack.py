"""Megatron's hybrid stack, with 'K' layers, and its heads of multi-token prediction (MTP).

Megatron's patterns have no letter for Kimi Delta Attention (0.19, main and dev of November 2026),
so a 'K' layer is built in the place of a 'G' layer, from another spec; so is a 'G' of variant
"gdn2". ``"M*G-/M*/M*"`` is the model ``M*G-`` and two heads of the layers ``M*``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, ClassVar, cast

from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
from megatron.core.models.hybrid.hybrid_layer_allocation import Symbols
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.transformer import multi_token_prediction as mtp
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron_gdn.compat.torch_norm import TorchRMSNorm
from megatron_gdn.context_parallel import SequenceLayout
from megatron_gdn.mixers.loader_layout import AUTO, FollowsLoader, LoaderLayout
from megatron_gdn.mixers.packing import TREE

KDA, GDN2 = "K", "gdn2"  # a letter of patterns; a variant of the config


def know_letter() -> None:
    """Let Megatron's patterns have 'K' layers; a Megatron that knows the letter stays as it is."""
    if KDA not in Symbols.VALID_LAYERS:
        known: Any = Symbols
        known.KDA, known.VALID_LAYERS = KDA, {*Symbols.VALID_LAYERS, KDA}


class KDAHybridStack(HybridStack):
    """Megatron's stack, with 'K' layers, which its ``layer_type_list`` calls 'G'.

    ``kda_options`` are of the 'K' layers of the stack that this process built last.
    """

    kda_options: ClassVar[dict[str, Any]] = {}

    def __init__(
        self,
        config: TransformerConfig,
        submodules: HybridStackSubmodules,
        *,
        layers: Mapping[str, ModuleSpec],
        layer_type_list: list[str],
        pp_layer_offset: int = 0,
        **others: Any,
    ) -> None:
        KDAHybridStack.kda_options = cast(Any, layers[KDA].submodules).self_attention.params
        submodules, letters = _with_layers(
            submodules, layers, config, layer_type_list, pp_layer_offset
        )
        super().__init__(
            config, submodules, layer_type_list=letters, pp_layer_offset=pp_layer_offset, **others
        )


def _with_layers(
    submodules: HybridStackSubmodules,
    layers: Mapping[str, ModuleSpec],
    config: TransformerConfig,
    letters: Iterable[str],
    before: int,
) -> tuple[HybridStackSubmodules, list[str]]:
    """``submodules`` whose 'G' place builds these layers too, and the letters with 'G' for 'K'."""
    letters = list(letters)
    numbers = {before + place for place, letter in enumerate(letters, start=1) if letter == KDA}
    variant = config.experimental_attention_variant
    gdn = layers[GDN2] if variant == GDN2 else submodules.gdn_layer
    of_two = {"gdn": gdn, "kda": layers[KDA], "numbers": numbers}
    # Megatron's main writes its own class into the place's mixer under this variant.
    written = SimpleNamespace(self_attention=SimpleNamespace())
    place = ModuleSpec(module=_GDNOrKDALayer, params=of_two, submodules=written)
    submodules = replace(submodules, gdn_layer=place)
    return submodules, ["G" if letter == KDA else letter for letter in letters]


class _GDNOrKDALayer:
    """Builds the layer of a 'G' or of a 'K', by its number."""

    def __new__(
        cls, *, gdn: Any, kda: Any, numbers: set[int], layer_number: int, submodules: Any,
        **others: Any,
    ) -> Any:  # fmt: skip
        spec = kda if layer_number in numbers else gdn
        return build_module(spec, layer_number=layer_number, **others)


class HybridMTPLayer(FollowsLoader, mtp.MultiTokenPredictionLayer):
    """Megatron's MTP layer, which refuses sequences that Megatron would shift wrongly.

    Megatron shifts tokens, labels and loss masks by one token per head, document by document. It
    assumes that each document begins at its offset in ``cu_seqlens_q`` and, over context-parallel
    ranks, lies in zigzag. Otherwise tokens would get other tokens' labels.

    Args:
        cp_layout: how the data loader cuts sequences over context-parallel ranks.
        layers: of 'K', and of 'G' in another variant.
        others: as for Megatron's layer.

    Raises:
        ValueError: another layout than zigzag over several ranks.
    """

    def __init__(
        self,
        config: TransformerConfig,
        submodules: mtp.MultiTokenPredictionLayerSubmodules,
        *,
        pg_collection: ProcessGroupCollection,
        cp_layout: str | SequenceLayout = AUTO,
        layers: Mapping[str, ModuleSpec],
        mtp_layer_pattern: str,
        hybrid_submodules: HybridStackSubmodules,
        **others: Any,
    ) -> None:
        loader_layout = LoaderLayout(cp_layout, config)
        if pg_collection.cp.size() > 1:
            _require_zigzag(loader_layout.of_packed(), pg_collection.cp)
        hybrid_submodules, letters = _with_layers(
            hybrid_submodules, layers, config, mtp_layer_pattern, 0
        )
        super().__init__(
            config, submodules, pg_collection=pg_collection, mtp_layer_pattern="".join(letters),
            hybrid_submodules=hybrid_submodules, **others,
        )  # fmt: skip
        self.loader_layout = loader_layout

    def forward(
        self, *args: Any, packed_seq_params: PackedSeqParams | None = None, **others: Any
    ) -> tuple[Tensor | None, ...]:
        """As Megatron's; documents that it would shift wrongly are refused."""
        _require_shiftable(packed_seq_params, self.cp_group)
        if self.cp_group.size() > 1:
            _require_zigzag(self.loader_layout.of(packed_seq_params), self.cp_group)
        return super().forward(*args, packed_seq_params=packed_seq_params, **others)


def _require_zigzag(layout: SequenceLayout, cp_group: Any) -> None:
    """Refuse a cut in which Megatron would give tokens other tokens' labels."""
    if layout is not SequenceLayout.ZIGZAG:
        raise ValueError(
            f"Megatron shifts the labels of multi-token prediction in the zigzag layout, and "
            f"cp_layout={layout.value!r} over {cp_group.size()} ranks is another: labels would be "
            f"those of other tokens. Cut every document in zigzag, use one context-parallel rank, "
            f"or a layer pattern without '/'."
        )


def _require_shiftable(packed: PackedSeqParams | None, cp_group: Any) -> None:
    """Refuse packed documents whose labels Megatron would shift across their ends.

    If documents and slots have two tensors of offsets, a GPU's host waits for the comparison.
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
    padded = slots is not None and slots is not documents
    if padded and (documents is None or slots.tolist() != documents.tolist()):
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
    """Heads of local modules, whose checkpoints also fit Transformer Engine's."""
    parts = mtp.MultiTokenPredictionLayerSubmodules(
        enorm=TorchRMSNorm,
        hnorm=TorchRMSNorm,
        eh_proj=ColumnParallelLinear,
        mtp_model_layer=cast(Any, None),  # Megatron builds it from the pattern and the stack's spec
        layer_norm=TorchRMSNorm,
    )
    layer = ModuleSpec(module=HybridMTPLayer, params=options, submodules=parts)
    block = mtp.MultiTokenPredictionBlockSubmodules(layer_specs=[layer])
    return ModuleSpec(module=mtp.MultiTokenPredictionBlock, submodules=block)


def checked_mtp_spec(theirs: ModuleSpec, **options: Any) -> ModuleSpec:
    """``theirs`` with each layer replaced by a :class:`HybridMTPLayer` of the same submodules."""
    layers = [
        replace(layer, module=HybridMTPLayer, params={**layer.params, **options})
        for layer in cast(Any, theirs.submodules).layer_specs
    ]
    return replace(theirs, submodules=mtp.MultiTokenPredictionBlockSubmodules(layer_specs=layers))
