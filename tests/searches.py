"""How many cases the random searches of hypothesis try."""

import os


def examples(most: int) -> int:
    """``most`` with ``ALL_EXAMPLES=1``, as in the nightly run; a third without."""
    if os.environ.get("ALL_EXAMPLES") == "1":
        return most
    return -(-most // 3)
