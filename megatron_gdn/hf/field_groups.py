"""Accounts for every field of a model's ``config.json``: each is read, or legal in one
value, or without effect.

A field that is in none of the three groups is refused, because it could change the
model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from .config_fields import check_field
from .json_files import shown

# Fields of every model of transformers that change no number of a built model.
_OF_EVERY_MODEL = {
    "it is about files or the library": """
        _name_or_path auto_map dtype model_type quantization_config torch_dtype transformers_version
    """,
    "it sets first values of weights": "initializer_range",
    "it says how transformers runs": "chunk_size_feed_forward",
    "it is about calls, generation or labels": """
        bos_token_id eos_token_id id2label is_encoder_decoder label2id max_position_embeddings
        output_attentions output_hidden_states output_router_logits pad_token_id problem_type
        return_dict use_cache
    """,
    "a built model has no dropout": "attention_dropout",
}


def without_effect(more: Mapping[str, str]) -> dict[str, str]:
    """Field -> why it changes no number, of every model and of a model with ``more``
    (reason -> fields)."""
    # Both may have one reason, so this is no union of dicts.
    reasons = list(_OF_EVERY_MODEL.items()) + list(more.items())
    return {name: why for why, names in reasons for name in names.split()}


class FieldGroups(NamedTuple):
    """The fields that one family of models may have, under the names of transformers'
    class."""

    model: str
    read: frozenset[str]
    # Fields with one legal value, which the built model assumes; the value is in
    # `config_fields.FIELDS`.
    settings: frozenset[str]
    without_effect: Mapping[str, str]  # field -> the reason
    # other names that files have -> the names above
    other_names: Mapping[str, str] = {}
    # the family's names of fields -> the names in `config_fields.FIELDS`
    known_as: Mapping[str, str] = {}

    def with_usual_names(self, values: Mapping[str, Any], where: str) -> dict[str, Any]:
        """``values`` under their usual names, without the fields that change no result of
        the model.

        Raises:
            ValueError: a field is unknown, is not supported, or has two names with two
                values.
        """
        found = {name: value for name, value in values.items() if value is not None}
        for name, usual in self.other_names.items():
            if name not in found:
                continue
            value = found.pop(name)
            if found.setdefault(usual, value) != value:
                raise ValueError(
                    f"{where}: {name}={shown(value)} and {usual}={shown(found[usual])} "
                    f"are one setting of a {self.model}; give one value."
                )
        found = {
            name: value
            for name, value in found.items()
            if name not in self.without_effect
        }
        unknown = sorted(found.keys() - self.read - self.settings)
        if unknown:
            raise ValueError(
                f"{where}: {shown(unknown)} are not known as fields of a {self.model}, "
                "and could change the model. Remove them if they do not."
            )
        for name in sorted(self.settings & found.keys()):
            check_field(name, found[name], where, self.known_as.get(name))
        return found
