"""Options of the layer in a launch: ``--spec`` names a spec and takes no options of its own.

    MEGATRON_GDN_OPTIONS="linear_cp_mode=chunkwise,recompute_qkv=True" torchrun ... \\
        pretrain_hybrid.py --spec megatron_gdn.specs hybrid_stack_spec ...

An option reaches 'G' and 'K' layers if their mixer has it: recompute both, gate_lower_bound 'K'.
The specs read the variable once. Every process of a launch must have the same value. An option that
a call in Python gives overrides the variable's.
"""

from __future__ import annotations

import ast
import inspect
import os
import re
from collections.abc import Collection
from contextlib import suppress
from functools import cache
from typing import Any

from megatron_gdn.compat.observe import log_once
from megatron_gdn.gdn.layer import GatedDeltaNet
from megatron_gdn.kda.layer import KimiDeltaAttention

VARIABLE = "MEGATRON_GDN_OPTIONS"
# What Megatron passes itself; every other keyword of the constructor is an option.
_OF_MEGATRON = {
    "self", "config", "submodules", "layer_number", "pg_collection", "name", "cp_comm_type",
    "pp_layer_offset", "is_mtp_layer",
}  # fmt: skip


def with_launch_options(options: dict[str, Any]) -> dict[str, Any]:
    """``options`` of GatedDeltaNet, plus the options of the launch that they do not name."""
    known = _options_of(GatedDeltaNet)
    return {**{n: value for n, value in _of_launch().items() if n in known}, **options}


def kda_launch_options(named: Collection[str]) -> dict[str, Any]:
    """The options of the launch that KimiDeltaAttention has, but those that a call ``named``."""
    own = _options_of(KimiDeltaAttention).keys() - {"backend", *named}
    return {name: value for name, value in _of_launch().items() if name in own}


@cache
def _of_launch() -> dict[str, Any]:
    options = parse_options(os.environ.get(VARIABLE, ""))
    if options:
        said = ", ".join(f"{name}={value!r}" for name, value in options.items())
        log_once(f"{VARIABLE}: layers are built with {said}, each with those that it has")
    return options


def parse_options(text: str) -> dict[str, Any]:
    """``"name=value,name=value"`` with values as in Python, or words; spaces separate too."""
    legal = _options_of(KimiDeltaAttention) | _options_of(GatedDeltaNet)
    options = {}
    for part in filter(None, re.split(r"[,\s]+(?=\w+\s*=)|^\s+|[,\s]+$", text)):
        name, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals or name not in legal:
            raise ValueError(
                f"{VARIABLE}={text!r} has {part!r}; it must be name=value,name=value with the "
                f"names {', '.join(sorted(legal))}."
            )
        options[name] = value
        with suppress(ValueError, SyntaxError):
            options[name] = ast.literal_eval(value)
        if legal[name].startswith("bool") and not isinstance(options[name], bool):
            raise ValueError(f"{VARIABLE} has {name}={value!r}; it must be True or False.")
    return options


def _options_of(mixer: type) -> dict[str, str]:
    """Every option of a mixer, with its type as written."""
    arguments = inspect.signature(mixer).parameters.items()
    return {name: str(given.annotation) for name, given in arguments if name not in _OF_MEGATRON}
