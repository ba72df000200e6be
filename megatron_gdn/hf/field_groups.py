"""`FieldGroups` puts each field of a model's ``config.json`` in one of three groups:
fields that are read, settings (legal in one value) and fields without effect.

A field that is in none of the three groups is refused, because it could change the
model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from .config_fields import check_field
from .json_files import short_text

# Reason -> fields that change no number of a built model for this reason. Every model of
# transformers may have these fields.
_WITHOUT_EFFECT_IN_EVERY_MODEL = {
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


def fields_without_effect(family_fields: Mapping[str, str]) -> dict[str, str]:
    """The fields without effect of one family, each with its reason.

    They are the fields of `_WITHOUT_EFFECT_IN_EVERY_MODEL` and of ``family_fields``
    (reason -> field names, with spaces between).
    """
    # A union of the two dicts would lose fields if both have the same reason.
    reasons = list(_WITHOUT_EFFECT_IN_EVERY_MODEL.items()) + list(family_fields.items())
    return {name: reason for reason, names in reasons for name in names.split()}


class FieldGroups(NamedTuple):
    """The fields that one family of models may have.

    The three groups, ``read_fields``, ``setting_fields`` and ``without_effect``, have
    the *canonical* names of fields: those of the family's config class in transformers.
    """

    model_name: str  # the family's name, for errors
    read_fields: frozenset[str]  # fields that `ConfigFields` reads
    # fields with one legal value, which the built model assumes (see `Field`)
    setting_fields: frozenset[str]
    without_effect: Mapping[str, str]  # field -> why it changes no number
    # other names of fields that files may have -> canonical names
    other_names: Mapping[str, str] = {}
    # canonical names -> names in `config_fields.FIELD_TABLE`, where the two differ
    names_in_table: Mapping[str, str] = {}

    def canonical_fields(self, values: Mapping[str, Any], where: str) -> dict[str, Any]:
        """The fields ``values`` of the file ``where`` by their canonical names. Fields
        that are null or change no number are left out. Settings are checked.

        Raises:
            ValueError: a field is unknown, has a value that is not supported, or is
                given under two names with two values.
        """
        found = {name: value for name, value in values.items() if value is not None}
        for name, canonical in self.other_names.items():
            if name not in found:
                continue
            value = found.pop(name)
            if found.setdefault(canonical, value) != value:
                raise ValueError(
                    f"{where}: {name}={short_text(value)} and "
                    f"{canonical}={short_text(found[canonical])} are one setting of a "
                    f"{self.model_name}; give one value."
                )
        found = {
            name: value
            for name, value in found.items()
            if name not in self.without_effect
        }
        unknown = sorted(found.keys() - self.read_fields - self.setting_fields)
        if unknown:
            raise ValueError(
                f"{where}: {short_text(unknown)} are not known as fields of a "
                f"{self.model_name}, and could change the model. Remove them if they "
                "do not."
            )
        for name in sorted(self.setting_fields & found.keys()):
            check_field(name, found[name], where, self.names_in_table.get(name))
        return found
