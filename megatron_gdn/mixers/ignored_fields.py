"""Fields of Megatron's config that are about a mixer and that it does not read."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import MISSING, fields
from typing import NamedTuple

from megatron.core.transformer.transformer_config import TransformerConfig

from ..compat.observe import log_once


class ConfigFields(NamedTuple):
    """The config's fields about one mixer.

    Attributes:
        prefixes: how their names begin.
        read: those that the mixer, or the spec of a model with it, reads.
        without_effect: those that cannot mean anything here, and why.
    """

    prefixes: tuple[str, ...]
    read: Collection[str]
    without_effect: Mapping[str, str]


def name_ignored_fields(mixer: str, about: ConfigFields, config: TransformerConfig) -> None:
    """One log line for each field that is set and has no effect, also if its name is new."""
    defaults = {field.name: field.default for field in fields(config)}
    for name, value in vars(config).items():
        if not name.startswith(about.prefixes) or name in about.read:
            continue
        default = defaults.get(name, MISSING)
        if not value if default is MISSING else value == default:
            continue
        why = about.without_effect.get(name, f"this version of {mixer} does not know it")
        log_once(f"{mixer}: config.{name}={value!r} has no effect: {why}.")
