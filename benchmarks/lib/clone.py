"""A clone of Megatron-LM, for layers that megatron-core lacks; imports nothing."""

from __future__ import annotations

import os
import sys
from pathlib import Path

# The clone, or its folder "megatron" alone.
CLONE = Path(os.environ.get("MEGATRON_LM", "shared/megatron-lm"))


def has_clone(file: str) -> bool:
    return bool(file) and (CLONE / file).is_file()


def take_clone(file: str) -> None:
    """From now on Megatron is imported from the clone, if it has this file."""
    if has_clone(file):
        sys.path.insert(0, str(CLONE.resolve()))
