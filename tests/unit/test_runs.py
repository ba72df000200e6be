"""Runs of sections: one section for a front, several for ranks and checkpoints."""

import pytest

from megatron_gdn.gdp.sizes import gdp_layout
from megatron_gdn.ops.delta_rule.base import HeadSizes
from megatron_gdn.ops.layout import Layout, Section


def test_a_run_is_one_section_of_all_heads_and_each_member_is_split_by_itself():
    layout = gdp_layout(HeadSizes(2, 4, 5, 6), 3)
    assert layout.names == (
        *["z", "V0", "V1", "V2", "K0", "K1", "K2", "Q", "b0", "b1", "b2", "a"],
    )
    assert layout.shape_of("V") == (12, 6) and layout.shape_of("V1") == (4, 6)
    assert layout.shape_of("K") == (6, 5) and layout.shape_of("b") == (12, 1)
    assert layout.columns("V") == slice(24, 96)
    assert layout.columns("K1") == slice(106, 116)
    share = layout.share(4)
    assert share.shape_of("V") == (3, 6) and share.shape_of("K") == (3, 5)
    assert share.widths == (6, 6, 6, 6, 5, 5, 5, 5, 1, 1, 1, 1)


@pytest.mark.parametrize(
    "sections",
    [
        [("a", "h", 2, "r"), ("b", "h", 2, ""), ("c", "h", 2, "r")],
        [("a", "h", 2, "r"), ("b", "h", 3, "r")],
    ],
    ids=["apart", "of two widths"],
)
def test_a_run_has_neighbours_of_one_shape(sections):
    made = tuple(
        Section(name, heads, width, run_name=run)
        for name, heads, width, run in sections
    )
    with pytest.raises(AssertionError, match="run r must be neighbours of one shape"):
        Layout(made, (("h", 1),))
