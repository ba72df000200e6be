"""Reads JSON from files that nobody vouches for: one object, and each key once."""

from __future__ import annotations

import json
import reprlib
from pathlib import Path
from typing import Any

from ..command_line import one_line

# A JSON object: what its values are is checked where they are read.
JsonObject = dict[str, Any]

_SHORT = reprlib.Repr()
_SHORT.maxstring = 60
_SHORT.maxother = 60


def read_object(path: Path) -> JsonObject:
    """The JSON object in the file ``path``; a ValueError names the file and the
    fault."""
    return parse_object(path.read_bytes(), str(path))


def parse_object(content: bytes, where: str) -> JsonObject:
    """The JSON object in ``content``, which is read from ``where``; a ValueError names
    both.

    The file must hold one object. A key that an object lists twice is an error, because
    two readers of the file could take different values.
    """
    try:
        parsed = json.loads(content.decode(), object_pairs_hook=_with_each_key_once)
    except RecursionError as error:
        raise ValueError(
            f"{where} is not JSON: its values are nested too deeply."
        ) from error
    except (
        ValueError
    ) as error:  # no UTF-8, no JSON, a key twice, a number of 5,000 digits
        raise ValueError(f"{where} is not JSON: {error}.") from error
    if not isinstance(parsed, dict):
        raise ValueError(
            f"{where} must hold one JSON object, but holds {shown(parsed)}."
        )
    return parsed


def _with_each_key_once(pairs: list[tuple[str, object]]) -> JsonObject:
    """The object with these ``pairs`` of key and value."""
    found: JsonObject = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"the key {shown(key)} is listed twice")
        found[key] = value
    return found


def shown(value: object) -> str:
    """A value of a JSON file as one short line, for an error."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    return one_line(_SHORT.repr(value))
