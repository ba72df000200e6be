"""Records as text, to compare with a file what a version declared."""

import dataclasses
import enum
import json
from pathlib import Path
from types import SimpleNamespace


def in_words(x):
    """``x`` as JSON gives it back: the values of records in the order of their fields,
    functions and classes by name."""
    if isinstance(x, type):
        return x.__name__
    if isinstance(x, enum.Enum):
        return x.name
    if dataclasses.is_dataclass(x):
        return [in_words(getattr(x, field.name)) for field in dataclasses.fields(x)]
    if isinstance(x, SimpleNamespace):
        return in_words(vars(x))
    if isinstance(x, dict):
        return {str(name): in_words(value) for name, value in x.items()}
    if isinstance(x, tuple | list):
        return [in_words(each) for each in x]
    if x is None or isinstance(x, bool | int | float | str):
        return x
    return getattr(x, "__name__", str(x))


def read(file: Path) -> dict:
    return json.loads(file.read_text())


def write(file: Path, declared: dict) -> None:
    """A line for each entry of an entry of ``declared``."""
    texts = []
    for name, entries in declared.items():
        lines = [f"  {json.dumps(k)}: {json.dumps(x)}" for k, x in entries.items()]
        texts.append(f" {json.dumps(name)}: {{\n" + ",\n".join(lines) + "\n }")
    file.write_text("{\n" + ",\n".join(texts) + "\n}\n")
