"""What Megatrons' configs say about this layer: honoured, named in the log or refused.

A config that lacks a field asks for nothing: megatron-core 0.19 knows fewer names than the branches
main and dev, and they know fewer than their proposals.
"""

from __future__ import annotations

import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig

from ...compat.observe import log_once
from ...ops.readout.base import ACTIVATIONS
from ..ignored_fields import ConfigFields

GDN_FIELDS = ConfigFields(
    prefixes=("gdn_", "linear_"),
    read=(
        "gdn_output_gate_activation", "linear_allow_neg_eigval", "linear_attention_freq",
        "linear_conv_kernel_dim", "linear_cp_mode", "linear_key_head_dim", "linear_num_key_heads",
        "linear_num_value_heads", "linear_value_head_dim",
    ),
    without_effect={
        "gdn_pre_gated_delta_rule_fusion": "what comes before the rule is one pass here anyway",
        "gdn_conv_pad_alignment": "the convolution takes any number of tokens",
    },
)  # fmt: skip

# Names of `--recompute-modules`, and what is computed again here for them.
_RECOMPUTED = {
    "gdn": ("whole",),
    "gdn_norm_out": ("norm_out",),
    "gdn_qkv": ("qkv",),
    "gdn_in_proj_conv": ("qkv",),
}
_KEEPS_PROJECTION = ("gdn_in_proj", "gdn_in_proj_conv", "gdn_qkv")
# Names of `--offload-modules` for parts of attention.
_OF_ATTENTION = ("qkv_linear", "core_attn", "attn_proj")


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


def gate_activation(given: str | None, config: TransformerConfig) -> str:
    """The activation of the output gate: the option, else the config's, else ``"silu"``.

    Raises:
        ValueError: it is neither ``"silu"`` nor ``"sigmoid"``.
    """
    activation = given or getattr(config, "gdn_output_gate_activation", None) or "silu"
    if activation not in ACTIVATIONS:
        legal = ", ".join(map(repr, ACTIVATIONS))
        raise ValueError(f"output_gate_activation={activation!r}; use one of {legal}.")
    return activation


def name_other_activation(config: TransformerConfig) -> None:
    """One log line where upstream's layer, in deterministic mode, would compute something else."""
    if config.activation_func is not F.silu:
        name = getattr(config.activation_func, "__name__", config.activation_func)
        log_once(
            f"GatedDeltaNet: config.activation_func={name} is for MLPs; convolution and gate take "
            f"SiLU here. megatron-core's own layer takes {name} for them in deterministic mode, so "
            f"the two differ on one checkpoint. --swiglu gives SiLU to both."
        )


def allows_neg_eigval(given: bool | None, config: TransformerConfig) -> bool:
    """Whether write strengths reach 2: the option, else the config's, else False."""
    return bool(getattr(config, "linear_allow_neg_eigval", False) if given is None else given)


def recomputed_parts(config: TransformerConfig) -> set[str]:
    """Which of ``whole``, ``qkv`` and ``norm_out`` ``--recompute-modules`` asks for.

    A name that means more than is computed again here is named in the log, also if it is new.
    """
    if config.recompute_granularity != "selective":
        return set()
    parts = set()
    for name in config.recompute_modules or ():
        parts.update(_RECOMPUTED.get(name, ()))
        if name in _KEEPS_PROJECTION:
            again = "query, key and value are" if name in _RECOMPUTED else "nothing is"
            log_once(
                f"GatedDeltaNet: with --recompute-modules {name}, {again} computed again; "
                f"in_proj's output is kept. 'gdn' computes the whole layer again."
            )
        elif name.startswith("gdn") and name not in _RECOMPUTED:
            log_once(f"GatedDeltaNet: --recompute-modules {name} has no effect: it is not known.")
    return parts


def name_ignored_offloads(config: TransformerConfig, mixer: str = "GatedDeltaNet") -> None:
    """One log line for the parts of ``--offload-modules`` that this layer does not have."""
    if not config.fine_grained_activation_offloading:
        return
    asked = config.offload_modules or ()
    without = [name for name in asked if name in _OF_ATTENTION or name.startswith("gdn")]
    if without:
        log_once(
            f"{mixer}: --offload-modules {' '.join(without)} has no effect on this layer: "
            f"what its backward needs stays on the GPU."
        )
