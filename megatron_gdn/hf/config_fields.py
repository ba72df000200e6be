"""The one table of the fields of ``config.json``: type, range and meaning of each.

`ConfigFields` reads fields by this table, for the conversion of weights (`.model_map`),
for the published models (`megatron_gdn.models`) and for the transformers drop-in
(`check_config`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from .json_files import shown

_MOST = 2**31 - 1
_MOST_LAYERS = 10_000
_MOST_EXPERTS = 100_000


class Field(NamedTuple):
    """What one field may hold, and what it means."""

    meaning: str
    legal: str  # the legal values, in words
    is_legal: Callable[[Any], bool]
    # whether one value is legal because the built model assumes it
    is_setting: bool = False


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    return _is_whole(value)


def _whole(meaning: str, low: int = 1, high: int = _MOST) -> Field:
    """A whole number from ``low`` to ``high``."""
    legal = f"a whole number from {low} to {high}"
    return Field(
        meaning, legal, lambda value: _is_whole(value) and low <= value <= high
    )


def _number(meaning: str, low: float, high: float, with_low: bool = False) -> Field:
    """A finite number up to ``high``, above ``low`` or (``with_low``) from ``low``."""
    legal = f"a number {'from' if with_low else 'above'} {low:g}, up to {high:g}"

    def is_legal(value: Any) -> bool:
        if not _is_number(value) or value > high:
            return False
        if with_low:
            return value >= low
        return value > low

    return Field(meaning, legal, is_legal)


def _setting(meaning: str, *values: object) -> Field:
    """A setting that the built model assumes; the first of ``values`` is the usual
    one."""

    def is_legal(value: object) -> bool:
        return any(type(value) is type(legal) and value == legal for legal in values)

    return Field(meaning, " or ".join(map(shown, values)), is_legal, is_setting=True)


def _list_of(meaning: str, legal: str, is_legal: Callable[[Any], bool]) -> Field:
    """A list whose elements are all legal."""

    def are_legal(value: object) -> bool:
        return isinstance(value, list | tuple) and all(map(is_legal, value))

    return Field(meaning, f"a list of {legal}", are_legal)


def _is_object(value: object) -> bool:
    return isinstance(value, Mapping)


def _is_pattern(value: object) -> bool:
    if not isinstance(value, str) or not 1 <= len(value) <= _MOST_LAYERS:
        return False
    return set(value) <= set("M*-E")


_ROPE = Field("settings of the rotary embedding", "an object", _is_object)


def _is_unlimited(value: object) -> bool:
    """Whether ``value`` is [0, infinity]; transformers writes infinity in two ways."""
    if not isinstance(value, list | tuple) or len(value) != 2:
        return False
    infinity = math.inf, {"__float__": "Infinity"}
    return _is_number(value[0]) and value[0] == 0 and value[1] in infinity


_LAYER_NUMBERS = _list_of(
    "the numbers of layers, from 1",
    "whole numbers from 1",
    lambda value: _is_whole(value) and value >= 1,
)
_BLOCKS = "attention", "full_attention", "linear_attention", "mamba", "mlp", "moe"

FIELDS: dict[str, Field] = {
    # What the file describes.
    "architectures": _list_of(
        "the model's classes in transformers",
        "texts",
        lambda value: isinstance(value, str),
    ),
    "text_config": Field("the config of the text model", "an object", _is_object),
    "tie_word_embeddings": Field(
        "whether the output layer uses the embedding",
        "true or false",
        lambda value: isinstance(value, bool),
    ),
    # Layers.
    "num_hidden_layers": _whole("the number of layers", high=_MOST_LAYERS),
    "layer_types": _list_of(
        "the kind of each layer", "texts", lambda value: isinstance(value, str)
    ),
    "full_attention_interval": _whole("each layer of this number has attention"),
    "hybrid_override_pattern": Field(
        "one symbol for each layer",
        f"1 to {_MOST_LAYERS} of the symbols 'M', '*', '-', 'E'",
        _is_pattern,
    ),
    "layers_block_type": _list_of(
        "the kind of each layer",
        ", ".join(map(repr, _BLOCKS)),
        lambda value: isinstance(value, str) and value in _BLOCKS,
    ),
    "decoder_sparse_step": _whole("each layer of this number has experts"),
    "mlp_only_layers": _list_of(
        "layers without experts",
        "whole numbers from 0",
        lambda value: _is_whole(value) and value >= 0,
    ),
    "mlp_layer_types": _list_of(
        "the kind of each layer's MLP",
        "'dense' or 'sparse'",
        lambda value: isinstance(value, str) and value in ("dense", "sparse"),
    ),
    "first_k_dense_replace": _whole("layers before the first experts", 0, _MOST_LAYERS),
    "linear_attn_config": Field(
        "layers and sizes of Kimi Delta Attention", "an object", _is_object
    ),
    "kda_layers": _LAYER_NUMBERS,
    "full_attn_layers": _LAYER_NUMBERS,
    # Sizes.
    "vocab_size": _whole("rows of the embedding"),
    "hidden_size": _whole("width of the model"),
    "intermediate_size": _whole("width of an MLP"),
    "num_attention_heads": _whole("query heads of attention"),
    "num_key_value_heads": _whole("key heads of attention"),
    "head_dim": _whole("dims of an attention head"),
    "linear_num_key_heads": _whole("key heads of Gated DeltaNet"),
    "linear_num_value_heads": _whole("value heads of Gated DeltaNet"),
    "linear_key_head_dim": _whole("rows of a state"),
    "linear_value_head_dim": _whole("columns of a state"),
    "linear_conv_kernel_dim": _whole("taps of the convolution", high=1024),
    "linear_num_heads": _whole("heads of Kimi Delta Attention"),
    "linear_head_dim": _whole("dims of a head of Kimi Delta Attention"),
    "kv_lora_rank": _whole("width of the latent of keys and values"),
    "q_lora_rank": _whole("width of the latent of queries"),
    "qk_nope_head_dim": _whole("dims of a head's own key"),
    "qk_rope_head_dim": _whole("dims of the key that all heads share"),
    "v_head_dim": _whole("dims of a head's value"),
    "mamba_num_heads": _whole("heads of Mamba2"),
    "mamba_head_dim": _whole("dims of a head of Mamba2"),
    "ssm_state_size": _whole("rows of a Mamba2 state"),
    "n_groups": _whole("groups of Mamba2"),
    "time_step_min": _number("the least time step of Mamba2", 0, 1e6, with_low=True),
    # Experts.
    "num_experts": _whole("the number of experts; 0 means none", 0, _MOST_EXPERTS),
    "num_experts_per_tok": _whole("experts of a token", high=_MOST_EXPERTS),
    "moe_intermediate_size": _whole("width of an expert"),
    "shared_expert_intermediate_size": _whole("width of the shared expert"),
    "routed_scaling_factor": _number("factor of the routed experts' output", 0, 1e6),
    "expert_groups": _whole("groups of experts", high=_MOST_EXPERTS),
    "chosen_expert_groups": _whole("groups of a token", high=_MOST_EXPERTS),
    "shared_experts": _whole("experts of every token", high=_MOST_EXPERTS),
    # Numbers of the computation.
    "rms_norm_eps": _number("epsilon of the norms", 0, 1),
    "rope_parameters": _ROPE,
    "rope_scaling": _ROPE,
    "rope_theta": _number("base of the rotary embedding", 0, 1e18),
    "partial_rotary_factor": _number(
        "share of a head's dims that rotate", 0, 1, with_low=True
    ),
    # Settings that the built model assumes.
    "rope_type": _setting("kind of rotary embedding", "default"),
    "attention_bias": _setting("whether attention has biases", False),
    "hidden_act": _setting("activation of the MLPs and convolutions", "silu"),
    "output_gate_type": _setting("activation of the output gate", "silu", "swish"),
    "attn_output_gate": _setting(
        "whether q_proj also computes attention's output gate", True
    ),
    "norm_topk_prob": _setting("whether the chosen experts' weights add up to 1", True),
    "use_sliding_window": _setting("whether attention sees some tokens only", False),
    # Settings of a Qwen3.5: dense, and with experts.
    "no_experts": _setting("the number of experts", 0),
    "every_layer_sparse": _setting("each layer of this number has experts", 1),
    "no_mlp_only_layers": Field(
        "layers without experts", "[]", lambda value: value == [], is_setting=True
    ),
    # Settings of a Kimi Linear that the built model assumes.
    "mla_use_nope": _setting("whether attention has no position embedding", True),
    "moe_layer_freq": _setting("each layer of this number has experts", 1),
    "moe_router_activation_func": _setting(
        "function of the router's scores", "sigmoid"
    ),
    "use_grouped_topk": _setting("whether groups of experts are chosen", True),
    # Settings of a NemotronH that the built model assumes.
    "conv_kernel": _setting("taps of the convolution", 4),
    "mamba_hidden_act": _setting("activation of the convolutions", "silu"),
    "mamba_proj_bias": _setting("whether Mamba2's projections have biases", False),
    "mlp_bias": _setting("whether MLPs have biases", False),
    "mlp_hidden_act": _setting("activation of the MLPs", "relu2"),
    "moe_latent_size": Field(
        "width of the experts' input", "null", lambda value: False, is_setting=True
    ),
    "n_group": _setting("groups of experts", 1),
    "n_shared_experts": _setting("shared experts", 1),
    "residual_in_fp32": _setting("whether the residual stream is fp32", False),
    "sliding_window": Field(
        "tokens that attention sees", "null", lambda value: False, is_setting=True
    ),
    "time_step_limit": Field(
        "range of the time steps", "[0, Infinity]", _is_unlimited, is_setting=True
    ),
    "topk_group": _setting("groups of experts that a token may choose", 1),
    "use_bias": _setting("whether Mamba2's projections have biases", False),
    "use_conv_bias": _setting("whether the convolution has a bias", True),
}


def check_field(
    name: str, value: object, where: str, known_as: str | None = None
) -> Any:
    """Return ``value`` if it is legal for the field ``name``, else raise a ValueError.

    Args:
        name: the field's name in the file ``where``.
        known_as: the field's name in `FIELDS`, if that is another one.
    """
    field = FIELDS[known_as or name]
    if field.is_legal(value):
        return value
    if field.is_setting:
        raise ValueError(
            f"{where}: {name}={shown(value)} is not supported in whole models; it must "
            f"be {field.legal}. Layers convert one by one, see layer_from_hf of "
            "megatron_gdn.hf."
        )
    raise ValueError(
        f"{where}: {name}={shown(value)} is not legal; {name} ({field.meaning}) must "
        f"be {field.legal}."
    )


def check_config(config: object, names: Iterable[str]) -> None:
    """Check the attributes ``names`` of ``config``, an object of transformers, that it
    has."""
    where = f"a {type(config).__name__}"
    for name in names:
        value = getattr(config, name, None)
        if value is not None:
            check_field(name, value, where)


class ConfigFields:
    """Reads the fields of one ``config.json``; each is checked by `FIELDS` when it is
    read.

    A field that is null counts as absent.
    """

    def __init__(
        self,
        values: Mapping[str, Any],
        where: str,
        architecture: str = "model",
        own_names: Mapping[str, str] | None = None,
    ) -> None:
        """``own_names``: this model's names of fields -> the names in `FIELDS`."""
        if not isinstance(values, Mapping):
            raise ValueError(
                f"{where} must hold one JSON object, but holds {shown(values)}."
            )
        self.where = where
        self._values = values
        self._architecture = architecture
        self._own_names = {known: own for own, known in (own_names or {}).items()}

    def __getitem__(self, name: str) -> Any:
        """The value of the field ``name``; a missing or illegal one is a ValueError."""
        value = self.get(name, None)
        if value is None:
            raise ValueError(
                f"{self.where} of a {self._architecture} has no "
                f"{self._own_names.get(name, name)!r}."
            )
        return value

    def get(self, name: str, default: object) -> Any:
        """The value of the field ``name``, or ``default``; an illegal one is a
        ValueError."""
        own_name = self._own_names.get(name, name)
        value = self._values.get(own_name)
        if value is None and own_name != name:
            own_name = name
            value = self._values.get(name)
        if value is None:
            return default
        return check_field(own_name, value, self.where, name)

    def require_multiple(self, name: str, divisor: str) -> None:
        """Raise unless the field ``name`` is a multiple of the field ``divisor``."""
        if self[name] % self[divisor]:
            raise ValueError(
                f"{self.where}: {name}={self[name]} must be a multiple of "
                f"{divisor}={self[divisor]}."
            )

    def require_at_most(self, name: str, limit: str) -> None:
        """Raise if the field ``name`` is larger than the field ``limit``."""
        if self[name] > self[limit]:
            raise ValueError(
                f"{self.where}: {name}={self[name]} must be at most "
                f"{limit}={self[limit]}."
            )

    def require_several_experts_per_token(self) -> None:
        """Raise if a token takes one expert by a sigmoid, which Megatron scales in
        another way than transformers."""
        if self["num_experts_per_tok"] == 1:
            raise ValueError(
                f"{self.where}: num_experts_per_tok=1 is not supported: Megatron does "
                "not normalise the score of a single expert, and the model does. Only "
                "models with two or more are built."
            )
