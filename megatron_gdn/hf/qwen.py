"""The fields of the ``config.json`` of Qwen3-Next and Qwen3.5, and the layers and rotary
embedding that they name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .config_fields import ConfigFields
from .field_groups import FieldGroups, without_effect
from .json_files import shown

_READ = {
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
_OF_EXPERTS = {
    "moe_intermediate_size",
    "num_experts",
    "num_experts_per_tok",
    "shared_expert_intermediate_size",
}
_OF_BOTH = {"decoder_sparse_step", "intermediate_size", "mlp_only_layers"}
_SETTINGS = {
    "attention_bias",
    "attn_output_gate",
    "hidden_act",
    "norm_topk_prob",
    "output_gate_type",
    "rope_type",
    "use_sliding_window",
}
_WITHOUT_EFFECT = {
    "it is a loss, which a launch's flags choose": "router_aux_loss_coef",
    "gates are fp32": "mamba_ssm_dtype",
    "attention sees all tokens": "max_window_layers sliding_window",
    "heads of multi-token prediction are not built": """
        mtp_num_hidden_layers mtp_use_dedicated_embeddings
    """,
}
_VISION = {
    "the vision encoder is not built": """
        image_token_id language_model_only video_token_id vision_config vision_end_token_id
        vision_start_token_id
    """,
}
# Each layer has an MLP or experts.
NEXT = FieldGroups(
    model="Qwen3-Next",
    read=frozenset(_READ | _OF_EXPERTS | _OF_BOTH),
    settings=frozenset(_SETTINGS),
    without_effect=without_effect(_WITHOUT_EFFECT),
)
# Each layer has an MLP.
DENSE = FieldGroups(
    model="dense Qwen3.5",
    read=frozenset(_READ | {"intermediate_size"}),
    settings=frozenset(_SETTINGS | {"num_experts"}),
    without_effect=without_effect(
        _WITHOUT_EFFECT
        | {
            "the model has no experts": """
                decoder_sparse_step mlp_only_layers moe_intermediate_size num_experts_per_tok
                shared_expert_intermediate_size
            """
        }
    ),
    known_as={"num_experts": "no_experts"},
)
# Each layer has experts.
EXPERTS = FieldGroups(
    model="Qwen3.5 with experts",
    read=frozenset(_READ | _OF_EXPERTS),
    settings=frozenset(_SETTINGS | {"decoder_sparse_step", "mlp_only_layers"}),
    without_effect=without_effect(
        _WITHOUT_EFFECT | {"the model has no MLP": "intermediate_size"}
    ),
    known_as={
        "decoder_sparse_step": "every_layer_sparse",
        "mlp_only_layers": "no_mlp_only_layers",
    },
)
# A file whose text model has a config of its own.
WITH_TEXT_CONFIG = FieldGroups(
    model="Qwen3.5 with a text_config",
    read=frozenset({"architectures", "text_config", "tie_word_embeddings"}),
    settings=frozenset(),
    without_effect=without_effect(_VISION),
)
# Fields of a text_config that the file states at its top level too. transformers reads
# them there: `tie_word_embeddings` of some published text_configs is wrong.
_OF_TOP = ("architectures", "tie_word_embeddings")
GROUPS = {
    "Qwen3NextForCausalLM": NEXT,
    "Qwen3_5ForCausalLM": DENSE,
    "Qwen3_5ForConditionalGeneration": DENSE,
    "Qwen3_5MoeForCausalLM": EXPERTS,
    "Qwen3_5MoeForConditionalGeneration": EXPERTS,
}
_ROPE = ("rope_type", "rope_theta", "partial_rotary_factor")
# The three positions of a text's token are equal.
_ROPE_WITHOUT_EFFECT = ("mrope_section", "mrope_interleaved")


def with_usual_names(
    values: Mapping[str, Any], text: Mapping[str, Any], architecture: str, where: str
) -> dict[str, Any]:
    """The fields of the text model, ``values`` themselves or their ``text_config``
    ``text``, with those of the rotary embedding beside them."""
    if text is not values:
        WITH_TEXT_CONFIG.with_usual_names(values, where)
        text = {name: value for name, value in text.items() if name not in _OF_TOP}
    return GROUPS[architecture].with_usual_names(_with_rope(text, where), where)


def _with_rope(values: Mapping[str, Any], where: str) -> dict[str, Any]:
    """``values`` with the fields of ``rope_parameters`` or ``rope_scaling``, the older
    name, beside the others."""
    found = dict(values)
    fields = ConfigFields(values, where)
    ropes = {}
    for name in ("rope_parameters", "rope_scaling"):
        found.pop(name, None)
        if rope := fields.get(name, {}):
            ropes[name] = rope
    if len(ropes) == 2 and ropes["rope_parameters"] != ropes["rope_scaling"]:
        raise ValueError(
            f"{where}: rope_parameters={shown(ropes['rope_parameters'])} and "
            f"rope_scaling={shown(ropes['rope_scaling'])} are one setting; give one."
        )
    for name, given in ropes.items():
        rope = {key: value for key, value in given.items() if value is not None}
        kind = rope.pop("type", None)  # the older name
        if kind is not None:
            rope.setdefault("rope_type", kind)
        unknown = sorted(rope.keys() - set(_ROPE + _ROPE_WITHOUT_EFFECT))
        if rope.get("rope_type", "default") == "default" and unknown:
            raise ValueError(
                f"{where}: {name}={shown(given)} is not legal; its fields must be "
                f"{', '.join(_ROPE)}, and it has {shown(unknown)}, which could change "
                "the model."
            )
        for key in _ROPE:
            if key not in rope:
                continue
            beside = found.get(key)
            if beside is not None and beside != rope[key]:
                raise ValueError(
                    f"{where}: {key}={shown(beside)}, and {name} has {key}="
                    f"{shown(rope[key])}; give one value."
                )
            found[key] = rope[key]
    return found


def pattern_of(fields: ConfigFields, architecture: str) -> str:
    """A HybridModel's pattern: for each layer the symbols of its mixer and of its
    MLP."""
    count = fields["num_hidden_layers"]
    interval = fields.get("full_attention_interval", None)
    kinds = "linear_attention", "full_attention"
    step = interval or 4
    by_interval = [kinds[(layer + 1) % step == 0] for layer in range(count)]
    types = fields.get("layer_types", by_interval)
    symbols = {"linear_attention": "G", "full_attention": "*"}
    unknown = sorted(set(types) - symbols.keys())
    if unknown or len(types) != count:
        raise ValueError(
            f"{fields.where}: layer_types must be {count} times 'linear_attention' or "
            f"'full_attention'; it has {len(types)} entries"
            f"{f' and also {shown(unknown)}' if unknown else ''}."
        )
    if interval is not None and list(types) != by_interval:
        raise ValueError(
            f"{fields.where}: full_attention_interval={interval} contradicts "
            "layer_types, which names other layers; give one of them."
        )
    mlps = _mlps(fields, architecture, count)
    return "".join(symbols[kind] + mlp for kind, mlp in zip(types, mlps, strict=True))


def _mlps(fields: ConfigFields, architecture: str, count: int) -> str:
    """For each of ``count`` layers '-' (an MLP) or 'E' (experts)."""
    if GROUPS[architecture] is DENSE or fields["num_experts"] == 0:
        return "-" * count
    step = fields.get("decoder_sparse_step", 1)
    dense = set(fields.get("mlp_only_layers", []))
    if beyond := sorted(dense - set(range(count))):
        raise ValueError(
            f"{fields.where}: mlp_only_layers has {shown(beyond)}; the layers are 0 to "
            f"{count - 1}."
        )
    return "".join("-E"[(n + 1) % step == 0 and n not in dense] for n in range(count))
