"""The letter 'K' in hybrid layer patterns: layers of Kimi Delta Attention.

Megatron's patterns have no such letter (0.19, main and dev of November 2026), so a 'K' layer is
built in the place of a 'G' layer, from another spec.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, ClassVar, cast

from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
from megatron.core.models.hybrid.hybrid_layer_allocation import Symbols
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_gdn.mixers.arguments import require_this_variant

KDA = "K"


def know_letter() -> None:
    """Let Megatron's patterns have 'K' layers; a Megatron that knows the letter stays as it is."""
    if KDA not in Symbols.VALID_LAYERS:
        known: Any = Symbols
        known.KDA, known.VALID_LAYERS = KDA, {*Symbols.VALID_LAYERS, KDA}


class KDAHybridStack(HybridStack):
    """Megatron's stack, with 'K' layers. Its own ``layer_type_list`` has 'G' for them, by which
    Megatron's main finds the states of recurrent layers.

    Attributes:
        kda_options: of the 'K' layers of the stack that this process built last.

    Raises:
        ValueError: the config asks for another variant of Gated DeltaNet.
    """

    kda_options: ClassVar[dict[str, Any]] = {}

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
        require_this_variant(config)
        KDAHybridStack.kda_options = cast(Any, kda_layer.submodules).self_attention.params
        submodules, letters = with_kda_layers(
            submodules, kda_layer, layer_type_list, pp_layer_offset
        )
        super().__init__(
            config, submodules, layer_type_list=letters, pp_layer_offset=pp_layer_offset, **others
        )


def with_kda_layers(
    submodules: HybridStackSubmodules,
    kda_layer: ModuleSpec,
    letters: Iterable[str],
    before: int = 0,
) -> tuple[HybridStackSubmodules, list[str]]:
    """``submodules`` whose 'G' place builds 'K' layers too, and the letters with 'G' for 'K'.

    ``before``: layers before the first of ``letters``.
    """
    letters = list(letters)
    numbers = {before + place for place, letter in enumerate(letters, start=1) if letter == KDA}
    of_two = {"gdn": submodules.gdn_layer, "kda": kda_layer, "numbers": numbers}
    submodules = replace(submodules, gdn_layer=ModuleSpec(module=_GDNOrKDALayer, params=of_two))
    return submodules, ["G" if letter == KDA else letter for letter in letters]


class _GDNOrKDALayer:
    """Builds the layer of a 'G' or of a 'K', by its number."""

    def __new__(
        cls, *, gdn: Any, kda: Any, numbers: set[int], layer_number: int, **others: Any
    ) -> Any:
        spec = kda if layer_number in numbers else gdn
        return build_module(spec, layer_number=layer_number, **others)
