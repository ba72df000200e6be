"""Qwen3-Next and Qwen3.5: the fields of their ``config.json``, the pattern of their
layers and the settings of the rotary embedding."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .config_fields import ConfigFields
from .field_groups import FieldGroups, fields_without_effect
from .json_files import short_text

# Three sets of fields that are read: the first for every model, the second for models
# with experts, the third for Qwen3-Next only.
_READ_FIELDS = {
    "architectures",
    "full_attention_interval",
    "head_dim",
    "hidden_size",
    "layer_types",
    "linear_conv_kernel_dim",
    "linear_key_head_dim",
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_value_head_dim",
    "num_attention_heads",
    "num_hidden_layers",
    "num_key_value_heads",
    "partial_rotary_factor",
    "rms_norm_eps",
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
    "text_config",
    "tie_word_embeddings",
    "vocab_size",
}
_EXPERT_READ_FIELDS = {
    "moe_intermediate_size",
    "num_experts",
    "num_experts_per_tok",
    "shared_expert_intermediate_size",
}
# In Qwen3-Next some layers have an MLP and others have experts.
_QWEN3_NEXT_READ_FIELDS = {
    "decoder_sparse_step",
    "intermediate_size",
    "mlp_only_layers",
}
_SETTING_FIELDS = {
    "attention_bias",
    "attn_output_gate",
    "hidden_act",
    "norm_topk_prob",
    "output_gate_type",
    "rope_type",
    "use_sliding_window",
}
# Reason -> fields that change no number of a built model.
_FIELDS_WITHOUT_EFFECT = {
    "it is a loss, which a launch's flags choose": "router_aux_loss_coef",
    "gates are fp32": "mamba_ssm_dtype",
    "attention sees all tokens": "max_window_layers sliding_window",
    "heads of multi-token prediction are not built": """
        mtp_num_hidden_layers mtp_use_dedicated_embeddings
    """,
}
_VISION_FIELDS_WITHOUT_EFFECT = {
    "the vision encoder is not built": """
        image_token_id language_model_only video_token_id vision_config vision_end_token_id
        vision_start_token_id
    """,
}
# Each layer has an MLP or experts.
QWEN3_NEXT_FIELDS = FieldGroups(
    model_name="Qwen3-Next",
    read_fields=frozenset(_READ_FIELDS | _EXPERT_READ_FIELDS | _QWEN3_NEXT_READ_FIELDS),
    setting_fields=frozenset(_SETTING_FIELDS),
    without_effect=fields_without_effect(_FIELDS_WITHOUT_EFFECT),
)
# Each layer has an MLP.
QWEN3_5_FIELDS = FieldGroups(
    model_name="dense Qwen3.5",
    read_fields=frozenset(_READ_FIELDS | {"intermediate_size"}),
    setting_fields=frozenset(_SETTING_FIELDS | {"num_experts"}),
    without_effect=fields_without_effect(
        _FIELDS_WITHOUT_EFFECT
        | {
            "the model has no experts": """
                decoder_sparse_step mlp_only_layers moe_intermediate_size num_experts_per_tok
                shared_expert_intermediate_size
            """
        }
    ),
    names_in_table={"num_experts": "no_experts"},
)
# Each layer has experts.
QWEN3_5_MOE_FIELDS = FieldGroups(
    model_name="Qwen3.5 with experts",
    read_fields=frozenset(_READ_FIELDS | _EXPERT_READ_FIELDS),
    setting_fields=frozenset(
        _SETTING_FIELDS | {"decoder_sparse_step", "mlp_only_layers"}
    ),
    without_effect=fields_without_effect(
        _FIELDS_WITHOUT_EFFECT | {"the model has no MLP": "intermediate_size"}
    ),
    names_in_table={
        "decoder_sparse_step": "every_layer_sparse",
        "mlp_only_layers": "no_mlp_only_layers",
    },
)
# The top level of a file whose text model has a config of its own, ``text_config``.
TOP_LEVEL_FIELDS = FieldGroups(
    model_name="Qwen3.5 with a text_config",
    read_fields=frozenset({"architectures", "text_config", "tie_word_embeddings"}),
    setting_fields=frozenset(),
    without_effect=fields_without_effect(_VISION_FIELDS_WITHOUT_EFFECT),
)
# Fields that are both in the text_config and at the file's top level. `parse_hf_config`
# reads the top level, as transformers does, since `tie_word_embeddings` is wrong in some
# published text_configs.
_FIELDS_OF_BOTH_LEVELS = ("architectures", "tie_word_embeddings")
FIELDS_OF_ARCHITECTURE = {
    "Qwen3NextForCausalLM": QWEN3_NEXT_FIELDS,
    "Qwen3_5ForCausalLM": QWEN3_5_FIELDS,
    "Qwen3_5ForConditionalGeneration": QWEN3_5_FIELDS,
    "Qwen3_5MoeForCausalLM": QWEN3_5_MOE_FIELDS,
    "Qwen3_5MoeForConditionalGeneration": QWEN3_5_MOE_FIELDS,
}
_ROPE_FIELDS = ("rope_type", "rope_theta", "partial_rotary_factor")
# Fields for the three positions of a token, which are equal for tokens of text.
_ROPE_FIELDS_WITHOUT_EFFECT = ("mrope_section", "mrope_interleaved")


def canonical_fields(
    values: Mapping[str, Any], text: Mapping[str, Any], architecture: str, where: str
) -> dict[str, Any]:
    """The text model's fields by canonical names; the rotary embedding's fields are
    moved out of ``rope_parameters``.

    ``values``: the parsed file ``where``; ``text``: its ``text_config``, or ``values``
    itself if it has none. Raises as `FieldGroups.canonical_fields`.
    """
    if text is not values:
        TOP_LEVEL_FIELDS.canonical_fields(values, where)  # only checks the top level
        text = {
            name: value
            for name, value in text.items()
            if name not in _FIELDS_OF_BOTH_LEVELS
        }
    return FIELDS_OF_ARCHITECTURE[architecture].canonical_fields(
        _with_rotary_fields(text, where), where
    )


def _with_rotary_fields(values: Mapping[str, Any], where: str) -> dict[str, Any]:
    """``values`` without ``rope_parameters`` (older files: ``rope_scaling``); the fields
    inside of it, such as ``rope_theta``, become fields of ``values``.

    Raises a ValueError if a setting is given twice with two values, or is unknown.
    """
    found = dict(values)
    fields = ConfigFields(values, where)
    ropes = {}
    for name in ("rope_parameters", "rope_scaling"):
        found.pop(name, None)
        if rope := fields.get(name, {}):
            ropes[name] = rope
    if len(ropes) == 2 and ropes["rope_parameters"] != ropes["rope_scaling"]:
        raise ValueError(
            f"{where}: rope_parameters={short_text(ropes['rope_parameters'])} and "
            f"rope_scaling={short_text(ropes['rope_scaling'])} are one setting; give "
            "one."
        )
    for name, given in ropes.items():
        rope = {key: value for key, value in given.items() if value is not None}
        kind = rope.pop("type", None)  # the older name of "rope_type"
        if kind is not None:
            rope.setdefault("rope_type", kind)
        # Another rope_type, which has more fields, is refused as a setting later.
        unknown = sorted(rope.keys() - set(_ROPE_FIELDS + _ROPE_FIELDS_WITHOUT_EFFECT))
        if rope.get("rope_type", "default") == "default" and unknown:
            raise ValueError(
                f"{where}: {name}={short_text(given)} is not legal; its fields must be "
                f"{', '.join(_ROPE_FIELDS)}, and it has {short_text(unknown)}, which "
                "could change the model."
            )
        for key in _ROPE_FIELDS:
            if key not in rope:
                continue
            outside = found.get(key)
            if outside is not None and outside != rope[key]:
                raise ValueError(
                    f"{where}: {key}={short_text(outside)}, and {name} has {key}="
                    f"{short_text(rope[key])}; give one value."
                )
            found[key] = rope[key]
    return found


def pattern_of(fields: ConfigFields, architecture: str) -> str:
    """A HybridModel's pattern: for each layer the symbol of its mixer ("G" or "*"), then
    of its MLP ("-") or experts ("E"). Raises a ValueError if fields contradict each
    other."""
    count = fields["num_hidden_layers"]
    interval = fields.get("full_attention_interval", None)
    step = interval or 4  # transformers' default
    by_interval = ["linear_attention"] * count
    for layer in range(step - 1, count, step):
        by_interval[layer] = "full_attention"
    types = fields.get("layer_types", by_interval)
    symbols = {"linear_attention": "G", "full_attention": "*"}
    unknown = sorted(set(types) - symbols.keys())
    if unknown or len(types) != count:
        raise ValueError(
            f"{fields.where}: layer_types must be {count} times 'linear_attention' or "
            f"'full_attention'; it has {len(types)} entries"
            f"{f' and also {short_text(unknown)}' if unknown else ''}."
        )
    if interval is not None and list(types) != by_interval:
        raise ValueError(
            f"{fields.where}: full_attention_interval={interval} contradicts "
            "layer_types, which names other layers; give one of them."
        )
    mlps = _mlp_or_expert_symbols(fields, architecture, count)
    return "".join(symbols[kind] + mlp for kind, mlp in zip(types, mlps, strict=True))


def _mlp_or_expert_symbols(fields: ConfigFields, architecture: str, count: int) -> str:
    """A string of ``count`` symbols, one for each layer: '-' (an MLP) or 'E'
    (experts)."""
    if (
        FIELDS_OF_ARCHITECTURE[architecture] is QWEN3_5_FIELDS
        or fields["num_experts"] == 0
    ):
        return "-" * count
    step = fields.get("decoder_sparse_step", 1)
    mlp_only = set(fields.get("mlp_only_layers", []))
    if beyond := sorted(mlp_only - set(range(count))):
        raise ValueError(
            f"{fields.where}: mlp_only_layers has {short_text(beyond)}; the layers are "
            f"0 to {count - 1}."
        )
    symbols = ""
    for layer in range(count):
        if (layer + 1) % step == 0 and layer not in mlp_only:
            symbols += "E"
        else:
            symbols += "-"
    return symbols
