"""Functions that torch.compile leaves as they are."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, cast

import torch


def uncompiled[F: Callable[..., Any]](function: F) -> F:
    """``torch.compiler.disable``, applied when ``torch.compile`` traces the call.

    Applied at the import, it would import Dynamo too, which takes seconds and needs NumPy.
    """

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return torch.compiler.disable(function)(*args, **kwargs)
        return function(*args, **kwargs)

    return cast(F, call)
