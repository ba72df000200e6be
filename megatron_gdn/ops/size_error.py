"""The error of sizes that do not fit, and the check that a size is one."""

from collections.abc import Container
from dataclasses import fields
from typing import Any


class SizeError(ValueError, AssertionError):
    """Heads, widths or lengths that cannot be shared or do not fit each other.

    An AssertionError too, because Megatron's mixers and Automodel's assert such sizes: a caller who
    catches theirs catches this.
    """


def require_sizes(dims: Any, may_be_zero: Container[str] = ()) -> None:
    """Refuse a dataclass of sizes with a field that is not an integer of at least 1 (or 0).

    Raises:
        ValueError: says which field and what it holds.
    """
    for field in fields(dims):
        size = getattr(dims, field.name)
        least = 0 if field.name in may_be_zero else 1
        if not isinstance(size, int) or isinstance(size, bool) or size < least:
            raise ValueError(
                f"{field.name}={size!r} is not a size; it must be an integer of at least {least}."
            )
