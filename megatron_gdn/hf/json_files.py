"""Reads JSON from files that may be damaged or hostile: the file must be one object, and
no object may list a key twice."""

from __future__ import annotations

import json
import reprlib
from pathlib import Path
from typing import Any

from ..command_line import one_line

# A JSON object, whose values are of any type; code that reads a value checks its type.
JsonObject = dict[str, Any]

_SHORT_REPR = reprlib.Repr()
_SHORT_REPR.maxstring = 60
_SHORT_REPR.maxother = 60


def read_object(path: Path) -> JsonObject:
    """The JSON object in the file ``path``; a ValueError names the file and the
    fault."""
    return parse_object(path.read_bytes(), str(path))


def parse_object(content: bytes, where: str) -> JsonObject:
    """The JSON object in ``content``, the bytes of the file ``where``.

    Raises a ValueError if the content is not one object or an object lists a key twice:
    two readers could take different values of such a key. The error names the file and
    the fault.
    """
    try:
        parsed = json.loads(content.decode(), object_pairs_hook=_with_each_key_once)
    except RecursionError as error:
        raise ValueError(
            f"{where} is not JSON: its values are nested too deeply."
        ) from error
    except ValueError as error:
        # not UTF-8, not JSON, a key twice, or an integer with thousands of digits,
        # which Python refuses
        raise ValueError(f"{where} is not JSON: {error}.") from error
    if not isinstance(parsed, dict):
        raise ValueError(
            f"{where} must hold one JSON object, but holds {short_text(parsed)}."
        )
    return parsed


def _with_each_key_once(pairs: list[tuple[str, object]]) -> JsonObject:
    """The object with these ``pairs`` of key and value; two equal keys raise a
    ValueError."""
    found: JsonObject = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"the key {short_text(key)} is listed twice")
        found[key] = value
    return found


def short_text(value: object) -> str:
    """A value of a JSON file as one short line, for an error."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    return one_line(_SHORT_REPR.repr(value))
