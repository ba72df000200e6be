"""Functions that torch.compile leaves as they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch


def uncompiled[F: Callable[..., Any]](function: F) -> F:
    """``torch.compiler.disable`` with the type of what it is given."""
    return cast(F, torch.compiler.disable(function))
