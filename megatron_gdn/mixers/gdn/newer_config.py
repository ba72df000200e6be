"""Fields of newer Megatrons' configs that are about this layer: honoured, named or refused.

megatron-core 0.19 has none of them; a config that lacks a field asks for nothing.
"""

from __future__ import annotations

from megatron.core.transformer.transformer_config import TransformerConfig

from ...compat.observe import log_once

_WITHOUT_EFFECT = {
    "gdn_pre_gated_delta_rule_fusion": "what comes before the rule is one pass here anyway",
    "gdn_conv_pad_alignment": "the convolution takes any number of tokens",
}


def require_this_variant(config: TransformerConfig) -> None:
    """Refuse a config that asks for another recurrence.

    Raises:
        ValueError: ``experimental_attention_variant`` is ``"gdn2"``.
    """
    if config.experimental_attention_variant == "gdn2":
        raise ValueError(
            "experimental_attention_variant='gdn2' asks for Gated DeltaNet 2, and this layer is "
            "Gated DeltaNet ('gdn', 'gated_delta_net' in older Megatrons), which has other gates "
            "and parameters. Change the variant, or build "
            "megatron.core.ssm.gated_delta_net.GatedDeltaNet2."
        )


def recomputes_whole_layer(config: TransformerConfig) -> bool:
    """Whether ``--recompute-modules gdn`` is asked for, which means the whole layer.

    Here it switches both recomputations of the layer on; the projection's output is still saved.
    """
    selective = config.recompute_granularity == "selective"
    asked = selective and "gdn" in (config.recompute_modules or ())
    if asked:
        log_once(
            "GatedDeltaNet: --recompute-modules gdn switches recompute_qkv and recompute_norm_out "
            "on; in_proj's output is kept and not computed again."
        )
    return asked


def name_ignored_fields(config: TransformerConfig) -> None:
    """One log line for each field that is set and has no effect on this layer."""
    for name, why in _WITHOUT_EFFECT.items():
        value = getattr(config, name, None)
        if value not in (None, False):
            log_once(f"GatedDeltaNet: config.{name}={value!r} has no effect: {why}.")
