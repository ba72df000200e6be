"""The table of a projection's columns, for sections and heads unlike those of a Gated DeltaNet."""

import pytest

from megatron_gdn.ops.layout import Layout, Section

# z | x | B | C | dt: convolved sections in the middle, and more heads than groups.
MAMBA = Layout(
    (
        Section("z", "head", 4),
        Section("x", "head", 4, conv=True),
        Section("B", "group", 3, conv=True),
        Section("C", "group", 3, conv=True),
        Section("dt", "head", 1),
    ),
    (("head", 12), ("group", 2)),
)


def test_columns_follow_each_other_in_storage_order():
    assert MAMBA.widths == (48, 48, 6, 6, 12) and MAMBA.width == 120
    assert MAMBA.columns("B") == slice(96, 102)
    assert MAMBA.conv_names == ("x", "B", "C") and MAMBA.conv_columns == slice(48, 108)
    assert MAMBA.conv_width == 60 and MAMBA.state_heads == 12


@pytest.mark.parametrize(("ranks", "groups", "copies"), [(2, 1, 1), (4, 1, 2), (12, 1, 6)])
def test_ranks_beyond_the_groups_hold_copies_of_them(ranks, groups, copies):
    share = MAMBA.share(ranks)
    assert (share.heads("head"), share.heads("group")) == (12 // ranks, groups)
    assert MAMBA.copies(ranks) == (1, 1, copies, copies, 1)
    # Every rank's columns, copies counted once, are the whole row.
    together = zip(share.widths, MAMBA.copies(ranks), MAMBA.widths, strict=True)
    assert all(width * ranks == whole * times for width, times, whole in together)


def test_which_numbers_of_ranks_can_share():
    assert [n for n in range(1, 13) if MAMBA.shares_among(n)] == [1, 2, 4, 6, 12]


def test_convolved_sections_that_are_no_neighbours_are_refused():
    with pytest.raises(AssertionError, match="neighbours"):
        Layout(
            (
                Section("a", "h", 1, conv=True),
                Section("b", "h", 1),
                Section("c", "h", 1, conv=True),
            ),
            (("h", 1),),
        )


def test_gates_that_do_not_come_last_are_refused():
    with pytest.raises(AssertionError, match="gates must come last"):
        Layout((Section("dt", "h", 1, gates=True), Section("z", "h", 1)), (("h", 1),))
