"""NemotronH: the fields of its ``config.json``, and the pattern of its layers."""

from __future__ import annotations

from .config_fields import ConfigFields
from .field_groups import FieldGroups, fields_without_effect
from .json_files import short_text

# Fields of a NemotronH -> their names in `config_fields.FIELD_TABLE`. The table has the
# names that other models use.
NAMES_IN_TABLE = {
    "layer_norm_epsilon": "rms_norm_eps",
    "n_routed_experts": "num_experts",
    "moe_shared_expert_intermediate_size": "shared_expert_intermediate_size",
}
# A field's name in older files, or another name that transformers accepts -> its name in
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
READ_FIELDS = {
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
# Fields with one legal value, which the built model assumes; `FIELD_TABLE` of
# `config_fields` has the value.
SETTING_FIELDS = {
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
FIELDS_WITHOUT_EFFECT = fields_without_effect(
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
NEMOTRON_FIELDS = FieldGroups(
    model_name="NemotronH",
    read_fields=frozenset(READ_FIELDS),
    setting_fields=frozenset(SETTING_FIELDS),
    without_effect=FIELDS_WITHOUT_EFFECT,
    other_names=_OTHER_NAMES,
    names_in_table=NAMES_IN_TABLE,
)
_SYMBOL_OF_BLOCK_TYPE = {
    "attention": "*",
    "full_attention": "*",
    "linear_attention": "M",
    "mamba": "M",
    "mlp": "-",
    "moe": "E",
}


def pattern_of(fields: ConfigFields) -> str:
    """A HybridModel's pattern, one symbol for each layer, from the fields
    ``hybrid_override_pattern`` or ``layers_block_type``."""
    blocks = fields.get("layers_block_type", None)
    if blocks is None:
        source = "hybrid_override_pattern"
        pattern = fields["hybrid_override_pattern"]
    else:
        source = "layers_block_type"
        pattern = "".join(_SYMBOL_OF_BLOCK_TYPE[block] for block in blocks)
        given = fields.get("hybrid_override_pattern", pattern)
        if given != pattern:
            raise ValueError(
                f"{fields.where}: hybrid_override_pattern has the layers "
                f"{short_text(given)}, and layers_block_type has {short_text(pattern)}."
            )
    count = fields.get("num_hidden_layers", len(pattern))
    if count != len(pattern):
        raise ValueError(
            f"{fields.where}: num_hidden_layers={count}, but {source} has "
            f"{len(pattern)} layers."
        )
    return pattern
