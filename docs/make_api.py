"""Writes docs/api.md from the docstrings of the public names.

    .venv/bin/python docs/make_api.py

A name is public if its module's ``__all__`` lists it without a leading underscore.
"""

from __future__ import annotations

import inspect
import re
from enum import Enum
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any

MODULES = (
    "megatron_gdn",
    "megatron_gdn.specs",
    "megatron_gdn.ops",
    "megatron_gdn.context_parallel",
    "megatron_gdn.hf",
    "megatron_gdn.inference",
    "megatron_gdn.testing",
)
PAGE = Path(__file__).with_name("api.md")
TOP = """# API

The public names and their docstrings. `.venv/bin/python docs/make_api.py` writes this page.
"""


def page() -> str:
    seen: dict[int, str] = {}
    return "\n".join([TOP, *(_module(name, seen) for name in MODULES)])


def _module(name: str, seen: dict[int, str]) -> str:
    module = import_module(name)
    parts = [f"## {name}\n", f"{_first_sentence(module)}\n"]
    for public in sorted(n for n in module.__all__ if not n.startswith("_")):
        found = getattr(module, public)
        home = seen.setdefault(id(found), name)
        if home != name:
            parts.append(f"### {public}\n\nThe one of `{home}`.\n")
        else:
            parts.append(_entry("###", public, found))
            if inspect.isclass(found):
                parts += [_entry("####", f"{public}.{n}", x) for n, x in _methods(found, seen)]
    return "\n".join(parts)


def _methods(cls: type, seen: dict[int, str]) -> list[tuple[str, Any]]:
    """The public methods and properties that the class defines and documents.

    Those of a base of this package too, unless the page has had the base already.
    """
    ours = [base for base in reversed(cls.__mro__) if base.__module__.startswith("megatron_gdn")]
    bases = [base for base in ours if base is cls or id(base) not in seen]
    own = {n: x for base in bases for n, x in vars(base).items() if not n.startswith("_")}
    unwrapped = {
        n: property(x.func) if isinstance(x, cached_property) else getattr(x, "__func__", x)
        for n, x in own.items()
    }
    return [
        (n, x)
        for n, x in unwrapped.items()
        if inspect.getdoc(x) and (inspect.isfunction(x) or isinstance(x, property))
    ]


def _entry(heading: str, name: str, found: Any) -> str:
    doc = inspect.getdoc(found) or ""
    return f"{heading} {name}\n\n```text\n{_signature(name, found)}{doc}\n```\n"


def _signature(name: str, found: Any) -> str:
    if isinstance(found, property) or not callable(found):
        return ""
    if inspect.isclass(found) and issubclass(found, Enum):
        return ""
    try:
        signature = str(inspect.signature(found))
    except (TypeError, ValueError):
        return ""
    signature = re.sub(r" at 0x[0-9a-f]+", "", signature.replace("'", ""))
    return f"{name.rpartition('.')[2]}{_broken(signature)}\n\n"


def _broken(signature: str) -> str:
    """One argument a line, if the signature is long."""
    if len(signature) <= 80:
        return signature
    depth, out = 0, []
    for character in signature:
        depth += (character in "([{") - (character in ")]}")
        if depth == 0 and character == ")":
            out.append("\n)")
        elif depth == 1 and character in "(,":
            out.append(f"{character}\n   " + " " * (character == "("))
        else:
            out.append(character)
    return re.sub(r"\n +", "\n    ", "".join(out))


def _first_sentence(module: Any) -> str:
    return re.split(r"(?<=\.)\s", inspect.getdoc(module) or "", maxsplit=1)[0]


if __name__ == "__main__":
    PAGE.write_text(page())
