"""`FIELD_TABLE`: the type, the range and the meaning of each field of ``config.json``.

A `ConfigFields` reads fields and checks each against the table. The conversion of
weights (`.model_map`) and the published models (`megatron_gdn.models`) use it. The
transformers drop-in calls `check_config`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from .json_files import short_text

_MAX_INT32 = 2**31 - 1
_MAX_LAYERS = 10_000
_MAX_EXPERTS = 100_000


class Field(NamedTuple):
    """The legal values and the meaning of one field.

    A *setting* is a field with one legal value, which a built Megatron model assumes.
    """

    meaning: str  # a phrase for errors
    legal_values: str  # a phrase for errors
    is_legal: Callable[[Any], bool]  # whether a value of the field is legal
    is_setting: bool = False


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    """Whether ``value`` is a finite number; True and False do not count as numbers."""
    if isinstance(value, float):
        return math.isfinite(value)
    return _is_integer(value)


def _integer_field(meaning: str, low: int = 1, high: int = _MAX_INT32) -> Field:
    """The `Field` of a whole number from ``low`` to ``high``; ``meaning``:
    `Field.meaning`."""
    legal = f"a whole number from {low} to {high}"
    return Field(
        meaning, legal, lambda value: _is_integer(value) and low <= value <= high
    )


def _number_field(
    meaning: str, low: float, high: float, with_low: bool = False
) -> Field:
    """The `Field` of a finite number up to ``high`` and above ``low``; with
    ``with_low``, ``low`` is legal too. ``meaning``: `Field.meaning`."""
    legal = f"a number {'from' if with_low else 'above'} {low:g}, up to {high:g}"

    def is_legal(value: Any) -> bool:
        """Whether ``value`` is a finite number in the range."""
        if not _is_number(value) or value > high:
            return False
        if with_low:
            return value >= low
        return value > low

    return Field(meaning, legal, is_legal)


def _setting_field(meaning: str, *values: object) -> Field:
    """The `Field` of a setting; the ``values`` are spellings of the one value that the
    built model assumes. ``meaning``: `Field.meaning`."""

    def is_legal(value: object) -> bool:
        """Whether ``value`` is one of ``values``, with its type: 1 is not True."""
        return any(type(value) is type(legal) and value == legal for legal in values)

    return Field(
        meaning, " or ".join(map(short_text, values)), is_legal, is_setting=True
    )


def _list_field(meaning: str, legal: str, is_legal: Callable[[Any], bool]) -> Field:
    """The `Field` of a list. ``is_legal``: whether an element is legal; ``legal``: a
    phrase that names the legal elements; ``meaning``: `Field.meaning`."""

    def are_legal(value: object) -> bool:
        """Whether ``value`` is a list of legal elements."""
        return isinstance(value, list | tuple) and all(map(is_legal, value))

    return Field(meaning, f"a list of {legal}", are_legal)


def _is_mapping(value: object) -> bool:
    return isinstance(value, Mapping)


def _is_nemotron_pattern(value: object) -> bool:
    """Whether ``value`` is a text of NemotronH's symbols, one for each layer: M is
    Mamba2, * attention, - an MLP, E experts."""
    if not isinstance(value, str) or not 1 <= len(value) <= _MAX_LAYERS:
        return False
    return set(value) <= set("M*-E")


_ROTARY_FIELD = Field("settings of the rotary embedding", "an object", _is_mapping)


def _is_zero_to_infinity(value: object) -> bool:
    """Whether ``value`` is [0, infinity]; transformers writes infinity in two ways."""
    if not isinstance(value, list | tuple) or len(value) != 2:
        return False
    spellings_of_infinity = (math.inf, {"__float__": "Infinity"})
    low = value[0]
    return _is_number(low) and low == 0 and value[1] in spellings_of_infinity


_LAYER_NUMBERS_FIELD = _list_field(
    "the numbers of layers, from 1",
    "whole numbers from 1",
    lambda value: _is_integer(value) and value >= 1,
)
_NEMOTRON_BLOCKS = (
    "attention",
    "full_attention",
    "linear_attention",
    "mamba",
    "mlp",
    "moe",
)

FIELD_TABLE: dict[str, Field] = {
    # What the file describes.
    "architectures": _list_field(
        "the model's classes in transformers",
        "texts",
        lambda value: isinstance(value, str),
    ),
    "text_config": Field("the config of the text model", "an object", _is_mapping),
    "tie_word_embeddings": Field(
        "whether the output layer uses the embedding",
        "true or false",
        lambda value: isinstance(value, bool),
    ),
    # Layers.
    "num_hidden_layers": _integer_field("the number of layers", high=_MAX_LAYERS),
    "layer_types": _list_field(
        "the kind of each layer", "texts", lambda value: isinstance(value, str)
    ),
    "full_attention_interval": _integer_field("n: every n-th layer has attention"),
    "hybrid_override_pattern": Field(
        "one symbol for each layer",
        f"1 to {_MAX_LAYERS} of the symbols 'M', '*', '-', 'E'",
        _is_nemotron_pattern,
    ),
    "layers_block_type": _list_field(
        "the kind of each layer",
        ", ".join(map(repr, _NEMOTRON_BLOCKS)),
        lambda value: value in _NEMOTRON_BLOCKS,
    ),
    "decoder_sparse_step": _integer_field("n: every n-th layer has experts"),
    "mlp_only_layers": _list_field(
        "layers without experts",
        "whole numbers from 0",
        lambda value: _is_integer(value) and value >= 0,
    ),
    "mlp_layer_types": _list_field(
        "the kind of each layer's MLP",
        "'dense' or 'sparse'",
        lambda value: value in ("dense", "sparse"),
    ),
    "first_k_dense_replace": _integer_field(
        "layers before the first experts", 0, _MAX_LAYERS
    ),
    "linear_attn_config": Field(
        "layers and sizes of Kimi Delta Attention", "an object", _is_mapping
    ),
    "kda_layers": _LAYER_NUMBERS_FIELD,
    "full_attn_layers": _LAYER_NUMBERS_FIELD,
    # Sizes.
    "vocab_size": _integer_field("rows of the embedding"),
    "hidden_size": _integer_field("width of the model"),
    "intermediate_size": _integer_field("width of an MLP"),
    "num_attention_heads": _integer_field("query heads of attention"),
    "num_key_value_heads": _integer_field("key heads of attention"),
    "head_dim": _integer_field("dims of an attention head"),
    "linear_num_key_heads": _integer_field("key heads of Gated DeltaNet"),
    "linear_num_value_heads": _integer_field("value heads of Gated DeltaNet"),
    "linear_key_head_dim": _integer_field("rows of a state"),
    "linear_value_head_dim": _integer_field("columns of a state"),
    "linear_conv_kernel_dim": _integer_field("taps of the convolution", high=1024),
    "linear_num_heads": _integer_field("heads of Kimi Delta Attention"),
    "linear_head_dim": _integer_field("dims of a head of Kimi Delta Attention"),
    "kv_lora_rank": _integer_field("width of the latent of keys and values"),
    "q_lora_rank": _integer_field("width of the latent of queries"),
    "qk_nope_head_dim": _integer_field("dims of a head's own key"),
    "qk_rope_head_dim": _integer_field("dims of the key that all heads share"),
    "v_head_dim": _integer_field("dims of a head's value"),
    "mamba_num_heads": _integer_field("heads of Mamba2"),
    "mamba_head_dim": _integer_field("dims of a head of Mamba2"),
    "ssm_state_size": _integer_field("rows of a Mamba2 state"),
    "n_groups": _integer_field("groups of Mamba2"),
    "time_step_min": _number_field(
        "the least time step of Mamba2", 0, 1e6, with_low=True
    ),
    # Experts.
    "num_experts": _integer_field(
        "the number of experts; 0 means none", 0, _MAX_EXPERTS
    ),
    "num_experts_per_tok": _integer_field("experts of a token", high=_MAX_EXPERTS),
    "moe_intermediate_size": _integer_field("width of an expert"),
    "shared_expert_intermediate_size": _integer_field("width of the shared expert"),
    "routed_scaling_factor": _number_field(
        "factor of the routed experts' output", 0, 1e6
    ),
    "expert_groups": _integer_field("groups of experts", high=_MAX_EXPERTS),
    "chosen_expert_groups": _integer_field("groups of a token", high=_MAX_EXPERTS),
    "shared_experts": _integer_field("experts of every token", high=_MAX_EXPERTS),
    # Numbers of the computation.
    "rms_norm_eps": _number_field("epsilon of the norms", 0, 1),
    "rope_parameters": _ROTARY_FIELD,
    "rope_scaling": _ROTARY_FIELD,
    "rope_theta": _number_field("base of the rotary embedding", 0, 1e18),
    "partial_rotary_factor": _number_field(
        "share of a head's dims that rotate", 0, 1, with_low=True
    ),
    # Settings that the built model assumes.
    "rope_type": _setting_field("kind of rotary embedding", "default"),
    "attention_bias": _setting_field("whether attention has biases", False),
    "hidden_act": _setting_field("activation of the MLPs and convolutions", "silu"),
    "output_gate_type": _setting_field(
        "activation of the output gate", "silu", "swish"
    ),
    "attn_output_gate": _setting_field(
        "whether q_proj also computes attention's output gate", True
    ),
    "norm_topk_prob": _setting_field(
        "whether the chosen experts' weights add up to 1", True
    ),
    "use_sliding_window": _setting_field(
        "whether attention sees some tokens only", False
    ),
    # Settings of a Qwen3.5: dense, and with experts.
    "no_experts": _setting_field("the number of experts", 0),
    "every_layer_sparse": _setting_field("n: every n-th layer has experts", 1),
    "no_mlp_only_layers": Field(
        "layers without experts", "[]", lambda value: value == [], is_setting=True
    ),
    # Settings of a Kimi Linear that the built model assumes.
    "mla_use_nope": _setting_field("whether attention has no position embedding", True),
    "moe_layer_freq": _setting_field("n: every n-th layer has experts", 1),
    "moe_router_activation_func": _setting_field(
        "function of the router's scores", "sigmoid"
    ),
    "use_grouped_topk": _setting_field("whether groups of experts are chosen", True),
    # Settings of a NemotronH that the built model assumes.
    "conv_kernel": _setting_field("taps of the convolution", 4),
    "mamba_hidden_act": _setting_field("activation of the convolutions", "silu"),
    "mamba_proj_bias": _setting_field(
        "whether Mamba2's projections have biases", False
    ),
    "mlp_bias": _setting_field("whether MLPs have biases", False),
    "mlp_hidden_act": _setting_field("activation of the MLPs", "relu2"),
    "moe_latent_size": Field(
        "width of the experts' input", "null", lambda value: False, is_setting=True
    ),
    "n_group": _setting_field("groups of experts", 1),
    "n_shared_experts": _setting_field("shared experts", 1),
    "residual_in_fp32": _setting_field("whether the residual stream is fp32", False),
    "sliding_window": Field(
        "tokens that attention sees", "null", lambda value: False, is_setting=True
    ),
    "time_step_limit": Field(
        "range of the time steps",
        "[0, Infinity]",
        _is_zero_to_infinity,
        is_setting=True,
    ),
    "topk_group": _setting_field("groups of experts that a token may choose", 1),
    "use_bias": _setting_field("whether Mamba2's projections have biases", False),
    "use_conv_bias": _setting_field("whether the convolution has a bias", True),
}


def check_field(
    name: str, value: object, where: str, name_in_table: str | None = None
) -> Any:
    """Return ``value`` if it is legal for the field ``name``, else raise a ValueError.

    If the field is a setting (`Field.is_setting`), the error names ``layer_from_hf``,
    which converts single layers.

    Args:
        name: the field's name in the file.
        value: the field's value in the file.
        where: the file's name, for errors.
        name_in_table: the field's name in `FIELD_TABLE`; None: ``name``.
    """
    field = FIELD_TABLE[name_in_table or name]
    if field.is_legal(value):
        return value
    if field.is_setting:
        raise ValueError(
            f"{where}: {name}={short_text(value)} is not supported in whole models; it "
            f"must be {field.legal_values}. Layers convert one by one, see "
            "layer_from_hf of megatron_gdn.hf."
        )
    raise ValueError(
        f"{where}: {name}={short_text(value)} is not legal; {name} ({field.meaning}) "
        f"must be {field.legal_values}."
    )


def check_config(config: object, names: Iterable[str]) -> None:
    """Raise a ValueError if ``config``, a config object of transformers, has an illegal
    value in one of the attributes ``names``. Absent attributes are not checked."""
    where = f"a {type(config).__name__}"
    for name in names:
        value = getattr(config, name, None)
        if value is not None:
            check_field(name, value, where)


class ConfigFields:
    """Reads the fields of one ``config.json``, and checks each field that is read
    against `FIELD_TABLE`.

    A field that is null counts as absent.
    """

    def __init__(
        self,
        values: Mapping[str, Any],
        where: str,
        architecture: str = "model",
        names_in_table: Mapping[str, str] | None = None,
    ) -> None:
        """Read from ``values``, the parsed file.

        ``where`` (the file's name) and ``architecture`` (the model's class) are for
        errors. ``names_in_table``: names of fields in the file -> their names in
        `FIELD_TABLE`, where the two differ.
        """
        if not isinstance(values, Mapping):
            raise ValueError(
                f"{where} must hold one JSON object, but holds {short_text(values)}."
            )
        self.where = where
        self._values = values
        self._architecture = architecture
        # names in `FIELD_TABLE` -> names in the file
        self._name_in_file = {
            in_table: in_file for in_file, in_table in (names_in_table or {}).items()
        }

    def __getitem__(self, name: str) -> Any:
        """The value of the field ``name`` (as in `FIELD_TABLE`); raise a ValueError if
        the field is missing or its value is illegal."""
        value = self.get(name, None)
        if value is None:
            raise ValueError(
                f"{self.where} of a {self._architecture} has no "
                f"{self._name_in_file.get(name, name)!r}."
            )
        return value

    def get(self, name: str, default: object) -> Any:
        """The value of the field ``name`` (as in `FIELD_TABLE`), or ``default`` if the
        file has no such field; raise a ValueError if the value is illegal."""
        file_name = self._name_in_file.get(name, name)
        value = self._values.get(file_name)
        if value is None:
            return default
        return check_field(file_name, value, self.where, name)

    def require_multiple(self, name: str, divisor: str) -> None:
        """Raise a ValueError unless the field ``name`` is a multiple of the field
        ``divisor``."""
        if self[name] % self[divisor]:
            raise ValueError(
                f"{self.where}: {name}={self[name]} must be a multiple of "
                f"{divisor}={self[divisor]}."
            )

    def require_at_most(self, name: str, limit: str) -> None:
        """Raise a ValueError if the field ``name`` is larger than the field
        ``limit``."""
        if self[name] > self[limit]:
            raise ValueError(
                f"{self.where}: {name}={self[name]} must be at most "
                f"{limit}={self[limit]}."
            )

    def require_several_experts_per_token(self) -> None:
        """Raise a ValueError if the router chooses one expert for each token: Megatron
        does not normalise the sigmoid score of a single expert, transformers does."""
        if self["num_experts_per_tok"] == 1:
            raise ValueError(
                f"{self.where}: num_experts_per_tok=1 is not supported: Megatron does "
                "not normalise the score of a single expert, and the model does. Only "
                "models with two or more are built."
            )
