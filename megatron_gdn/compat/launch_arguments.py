"""The arguments of a launch of Megatron's scripts."""

from __future__ import annotations

import sys
from typing import Any


def launch_arguments() -> dict[str, Any]:
    """Values by name; empty outside a launch."""
    module = sys.modules.get("megatron.training.global_vars")
    args = getattr(module, "_GLOBAL_ARGS", None)
    return {} if args is None else vars(args)
