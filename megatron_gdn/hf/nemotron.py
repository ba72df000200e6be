"""The fields of a NemotronH's ``config.json``: each is read, or legal in one value, or
harmless.

A field that is in none of the three groups is refused, because it could change the
model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .config_fields import ConfigFields, check_field
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
    "text_config",
    "tie_word_embeddings",
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
_WITHOUT_EFFECT = {
    "it is about files or the library": """
        _name_or_path auto_map dtype model_type quantization_config torch_dtype transformers_version
    """,
    "it sets first values of weights": """
        initializer_range rescale_prenorm_residual time_step_floor time_step_max time_step_min
        time_step_rank
    """,
    "it says how transformers runs": """
        chunk_size chunk_size_feed_forward mamba_ssm_cache_dtype moe_shared_expert_overlap
        use_mamba_kernels
    """,
    "it is about calls, generation or labels": """
        bos_token_id eos_token_id id2label is_encoder_decoder label2id max_position_embeddings
        num_logits_to_keep output_attentions output_hidden_states output_router_logits pad_token_id
        problem_type return_dict use_cache
    """,
    "a built model has no dropout": "attention_dropout hidden_dropout",
    "mamba_num_heads and mamba_head_dim give the width": "expand",
    "attention has no rotary embedding": """
        partial_rotary_factor rope_parameters rope_scaling rope_theta
    """,
    "heads of multi-token prediction are not built": """
        mtp_hybrid_override_pattern mtp_layers_block_type num_nextn_predict_layers
    """,
}
# Fields that change no number of the built model -> the reason.
WITHOUT_EFFECT = {
    name: why for why, names in _WITHOUT_EFFECT.items() for name in names.split()
}
_SYMBOLS = {
    "attention": "*",
    "full_attention": "*",
    "linear_attention": "M",
    "mamba": "M",
    "mlp": "-",
    "moe": "E",
}


def with_usual_names(values: Mapping[str, Any], where: str) -> dict[str, Any]:
    """``values`` of a NemotronH under the names of NemotronHConfig, without the
    harmless ones.

    Raises:
        ValueError: a field is unknown, is not supported, or has two names with two
            values.
    """
    found = {name: value for name, value in values.items() if value is not None}
    for name, usual in _OTHER_NAMES.items():
        if name not in found:
            continue
        value = found.pop(name)
        if found.setdefault(usual, value) != value:
            raise ValueError(
                f"{where}: {name}={shown(value)} and {usual}={shown(found[usual])} are "
                "one setting of a NemotronH; give one value."
            )
    found = {name: value for name, value in found.items() if name not in WITHOUT_EFFECT}
    unknown = sorted(found.keys() - READ - SETTINGS)
    if unknown:
        raise ValueError(
            f"{where}: {shown(unknown)} are not known as fields of a NemotronH, and "
            "could change the model. Remove them if they do not."
        )
    for name in sorted(SETTINGS & found.keys()):
        check_field(name, found[name], where)
    return found


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
