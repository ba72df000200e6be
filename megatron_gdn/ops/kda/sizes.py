"""The columns of a Kimi Delta Attention's rows."""

from __future__ import annotations

from functools import lru_cache

from ..gdn.sizes import HeadSizes
from ..layout import Layout, Section


@lru_cache(maxsize=64)
def rows_of(key_heads: int, heads: int, key_dim: int, value_dim: int) -> Layout:
    """query | key | value | f | z | beta: f is the forget gate, z the output gate."""
    return Layout(
        (
            Section("query", "key", key_dim, conv=True),
            Section("key", "key", key_dim, conv=True),
            Section("value", "head", value_dim, conv=True),
            Section("f", "head", key_dim),
            Section("z", "head", value_dim),
            Section("beta", "head", 1),
        ),
        (("head", heads), ("key", key_heads)),
    )


@lru_cache(maxsize=64)
def sizes_of(layout: Layout) -> HeadSizes:
    """The sizes of a layout made by :func:`rows_of`."""
    widths = {section.name: section.width for section in layout.sections}
    return HeadSizes(layout.heads("key"), layout.state_heads, widths["key"], widths["value"])
