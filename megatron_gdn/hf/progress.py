"""A progress bar, on a terminal only."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator


def progress_bar[Item](
    items: Iterable[Item], label: str, show: bool, total: int | None = None
) -> Iterator[Item]:
    """Iterate with a tqdm bar on a terminal; silently if not asked, not a terminal, or no tqdm."""
    if show and sys.stderr.isatty():
        try:
            from tqdm import tqdm
        except ImportError:
            return iter(items)
        return iter(tqdm(items, desc=label, total=total, unit="part"))
    return iter(items)
