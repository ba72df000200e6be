"""A progress bar, on a terminal only."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable


def progress_bar[Item](items: Collection[Item], label: str, show: bool) -> Iterable[Item]:
    """``items`` with a tqdm bar on a terminal; as they are if not asked, or without tqdm."""
    if show and sys.stderr.isatty():
        try:
            from tqdm import tqdm
        except ImportError:
            return items
        return tqdm(items, desc=label, unit="part")
    return items
