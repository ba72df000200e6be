"""The fields of a NemotronH's ``config.json``, and the layers that it names."""

from __future__ import annotations

from .config_fields import ConfigFields
from .field_groups import FieldGroups, without_effect
from .json_files import shown

# Fields of a NemotronH -> the names of these fields in the other models.
OWN_NAMES = {
    "layer_norm_epsilon": "rms_norm_eps",
    "n_routed_experts": "num_experts",
    "moe_shared_expert_intermediate_size": "shared_expert_intermediate_size",
}
# Names in older files, and other names that transformers takes -> names of
# NemotronHConfig.
_OTHER_NAMES = {
    "attention_head_dim": "head_dim",
    "layer_types": "layers_block_type",
    "mamba_chunk_size": "chunk_size",
    "mamba_conv_bias": "use_conv_bias",
    "mamba_d_conv": "conv_kernel",
    "mamba_dt_init_floor": "time_step_floor",
    "mamba_dt_limit": "time_step_limit",
    "mamba_dt_max": "time_step_max",
    "mamba_dt_min": "time_step_min",
    "mamba_expand": "expand",
    "mamba_n_groups": "n_groups",
    "num_local_experts": "n_routed_experts",
    "rms_norm_eps": "layer_norm_epsilon",
}
READ = {
    "architectures",
    "head_dim",
    "hidden_size",
    "hybrid_override_pattern",
    "intermediate_size",
    "layer_norm_epsilon",
    "layers_block_type",
    "mamba_head_dim",
    "mamba_num_heads",
    "moe_intermediate_size",
    "moe_shared_expert_intermediate_size",
    "n_groups",
    "n_routed_experts",
    "num_attention_heads",
    "num_experts_per_tok",
    "num_hidden_layers",
    "num_key_value_heads",
    "routed_scaling_factor",
    "ssm_state_size",
    "tie_word_embeddings",
    "time_step_min",
    "vocab_size",
}
# Fields with one legal value, which the built model assumes; the value is in
# `config_fields.FIELDS`.
SETTINGS = {
    "attention_bias",
    "conv_kernel",
    "mamba_hidden_act",
    "mamba_proj_bias",
    "mlp_bias",
    "mlp_hidden_act",
    "moe_latent_size",
    "n_group",
    "n_shared_experts",
    "norm_topk_prob",
    "residual_in_fp32",
    "sliding_window",
    "time_step_limit",
    "topk_group",
    "use_bias",
    "use_conv_bias",
}
# Fields that change no number of the built model -> the reason.
WITHOUT_EFFECT = without_effect(
    {
        "it sets first values of weights": """
            rescale_prenorm_residual time_step_floor time_step_max time_step_rank
        """,
        "it says how transformers runs": """
            chunk_size mamba_ssm_cache_dtype moe_shared_expert_overlap use_mamba_kernels
        """,
        "it is about calls, generation or labels": "num_logits_to_keep",
        "a built model has no dropout": "hidden_dropout",
        "mamba_num_heads and mamba_head_dim give the width": "expand",
        "attention has no rotary embedding": """
            partial_rotary_factor rope_parameters rope_scaling rope_theta
        """,
        "heads of multi-token prediction are not built": """
            mtp_hybrid_override_pattern mtp_layers_block_type num_nextn_predict_layers
        """,
    }
)
FIELDS = FieldGroups(
    model="NemotronH",
    read=frozenset(READ),
    settings=frozenset(SETTINGS),
    without_effect=WITHOUT_EFFECT,
    other_names=_OTHER_NAMES,
    known_as=OWN_NAMES,
)
_SYMBOLS = {
    "attention": "*",
    "full_attention": "*",
    "linear_attention": "M",
    "mamba": "M",
    "mlp": "-",
    "moe": "E",
}


def pattern_of(fields: ConfigFields) -> str:
    """The layers, one symbol each, of ``hybrid_override_pattern`` or
    ``layers_block_type``."""
    pattern = fields.get("hybrid_override_pattern", None)
    kinds = None
    if (names := fields.get("layers_block_type", None)) is not None:
        kinds = "".join(_SYMBOLS[name] for name in names)
    if pattern is not None and kinds is not None and pattern != kinds:
        raise ValueError(
            f"{fields.where}: hybrid_override_pattern has the layers {shown(pattern)}, "
            f"and layers_block_type has {shown(kinds)}."
        )
    if pattern is None:
        source = "layers_block_type"
    else:
        source = "hybrid_override_pattern"
    if pattern is None:
        pattern = kinds
    if pattern is None:
        return fields["hybrid_override_pattern"]  # raises: the field is missing
    count = fields.get("num_hidden_layers", len(pattern))
    if count != len(pattern):
        raise ValueError(
            f"{fields.where}: num_hidden_layers={count}, but {source} has "
            f"{len(pattern)} layers."
        )
    return pattern
