"""The plain rules on a CPU with the products that they have on a GPU: one shape for any
batch."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

from megatron_gdn.ops.rules import chunk_table


@contextmanager
def whole_groups(chunk_heads: int = 256) -> Iterator[None]:
    """Every group of chunks is filled up: libraries take kernels by shape."""
    with (
        patch.object(chunk_table, "fills_last_group", lambda device: True),
        patch.object(chunk_table, "_PRODUCTS_PER_GROUP", chunk_heads),
    ):
        yield
