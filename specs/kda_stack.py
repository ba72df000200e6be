"""The letter 'K' in hybrid layer patterns: layers of Kimi Delta Attention.

Megatron's patterns have no letter for them (0.19, main and dev of November 2026), and its stack
builds layers of the letters that it knows. Here a 'K' layer is built in the place of a 'G' layer,
from another spec.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
from megatron.core.models.hybrid.hybrid_layer_allocation import Symbols
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_config import TransformerConfig

KDA = "K"


def know_letter() -> None:
    """Let Megatron's patterns have 'K' layers; a Megatron that knows the letter stays as it is."""
    if KDA not in Symbols.VALID_LAYERS:
        known: Any = Symbols
        known.KDA, known.VALID_LAYERS = KDA, {*Symbols.VALID_LAYERS, KDA}


class KDAHybridStack(HybridStack):
    """Megatron's stack, with 'K' layers.

    Args:
        config, submodules, **others: as for Megatron's stack.
        kda_layer: of 'K'.
        layer_type_list: the letters of this pipeline stage.
        pp_layer_offset: layers on the stages before.
    """

    def __init__(
        self,
        config: TransformerConfig,
        submodules: HybridStackSubmodules,
        *,
        kda_layer: ModuleSpec,
        layer_type_list: list[str],
        pp_layer_offset: int = 0,
        **others: Any,
    ) -> None:
        numbers = {
            pp_layer_offset + place
            for place, letter in enumerate(layer_type_list, start=1)
            if letter == KDA
        }
        of_two = {"gdn": submodules.gdn_layer, "kda": kda_layer, "numbers": numbers}
        super().__init__(
            config,
            replace(submodules, gdn_layer=ModuleSpec(module=_GDNOrKDALayer, params=of_two)),
            layer_type_list=["G" if letter == KDA else letter for letter in layer_type_list],
            pp_layer_offset=pp_layer_offset,
            **others,
        )
        self.layer_type_list = layer_type_list


class _GDNOrKDALayer:
    """Builds the layer of a 'G' or of a 'K', by its number."""

    def __new__(
        cls, *, gdn: Any, kda: Any, numbers: set[int], layer_number: int, **others: Any
    ) -> Any:
        spec = kda if layer_number in numbers else gdn
        return build_module(spec, layer_number=layer_number, **others)
