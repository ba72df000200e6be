"""Tiles of the walking kernels: the table's, where 32-bit offsets and shared memory
hold them."""

import re

import pytest

from megatron_gdn.ops.kernels.tiles import (
    FrontTile,
    front_backward_tile,
    front_forward_tile,
    norm_backward_tile,
    norm_forward_tile,
    rows_need_64_bits,
    tile_of_32_bit_offsets,
    within_grid,
    within_shared_memory,
)

WIDTH = 12352  # of a projection row with 16 key and 32 value heads of 128
TABLE = [front_forward_tile, front_backward_tile]


# The steps of a front's forward and backward, from so many tokens on.
STEPS = {1: (8, 16), 2048: (8, 32), 4096: (32, 32), 8192: (32, 64), 32768: (32, 128)}
# The rows of a norm's forward, the rows of its backward, the repeats for few rows and
# for many, and the warps, for rows of so many columns.
NORMS = {
    16: (256, 128, 4, 8, 4),
    128: (32, 16, 4, 8, 4),
    2048: (2, 1, 16, 16, 4),
    4096: (1, 1, 16, 16, 8),
    2**15: (1, 1, 16, 16, 16),
}


def test_the_tiles_of_a_front_stay():
    """They decide the order of sums, and so the bits of every run on a GPU."""
    ends = [*list(STEPS)[1:], 2**20]
    for (first, (forward, backward)), end in zip(STEPS.items(), ends, strict=True):
        for tokens in (first, end - 1):
            assert front_forward_tile(tokens, 128) == (4, forward, 4, None, 3)
            assert front_backward_tile(tokens, 128) == (4, backward, 4, 96, 3)
            assert front_backward_tile(tokens, 128, True) == (4, backward, 4, 128, 3)


@pytest.mark.parametrize("width", NORMS)
def test_the_tiles_of_a_norm_stay(width):
    ahead, back, few, many, warps = NORMS[width]
    assert norm_forward_tile(width) == (ahead, 1, warps)
    assert norm_backward_tile(2**17 - 1, width) == (back, few, warps)
    assert norm_backward_tile(2**17, width) == (back, many, warps)


def reach(tile: FrontTile, tokens: int, taps: int) -> int:
    return min(tile.tokens + taps - 1, tokens) - 1


@pytest.mark.parametrize("table", TABLE)
@pytest.mark.parametrize("widest_head", [16, 128, 256])
@pytest.mark.parametrize(
    ("tokens", "batch"), [(1, 1), (8192, 4), (512, 339), (1 << 20, 1)]
)
def test_rows_within_reach_keep_the_tile_of_the_table(
    tokens, batch, widest_head, table
):
    tile = table(tokens * batch, widest_head)
    assert tile_of_32_bit_offsets(tile, tokens, 4, (batch * WIDTH, 4096)) == tile


@pytest.mark.parametrize("table", TABLE)
@pytest.mark.parametrize("taps", [2, 4, 8])
@pytest.mark.parametrize("tokens", [512, 100_000])
@pytest.mark.parametrize("stride", [2**22, 340 * WIDTH, 2**24 + 1, 2**27, 2**31 // 14])
def test_no_offset_of_a_tile_leaves_32_bits(stride, tokens, taps, table):
    usual = table(tokens * (stride // WIDTH), 128)
    tile = tile_of_32_bit_offsets(usual, tokens, taps, (4096, stride))
    assert reach(tile, tokens, taps) * stride < 2**31
    assert tile.steps % 4 == 0 and tile.steps >= taps - 1
    assert (
        tile[2:] == usual[2:] and tile.rows <= usual.rows and tile.steps <= usual.steps
    )
    if tile != usual:  # the next larger one would not do
        larger = (
            {"rows": 2 * tile.rows}
            if tile.rows < usual.rows
            else {"steps": 2 * tile.steps}
        )
        assert reach(tile._replace(**larger), tokens, taps) * stride >= 2**31


def test_a_stride_that_is_64_bits_wide_itself_needs_no_smaller_tile():
    tile = front_forward_tile(10_000, 128)
    assert tile_of_32_bit_offsets(tile, 10_000, 4, (2**31,)) == tile


def test_rows_too_far_apart_for_any_tile_are_refused_in_words():
    with pytest.raises(
        ValueError, match="1000000000 elements apart.*at most 214748364 .*torch"
    ):
        tile_of_32_bit_offsets(FrontTile(4, 32, 4), 10_000, 4, (1_000_000_000,))


@pytest.mark.parametrize("taps", [2, 4, 8])
def test_the_distance_that_an_error_names_is_the_largest_that_is_taken(taps):
    def take(stride):
        tile_of_32_bit_offsets(FrontTile(4, 32, 4), 10_000, taps, (stride,))

    with pytest.raises(ValueError) as error:
        take(2**31 - 1)
    most = int(re.search(r"at most (\d+) elements", str(error.value))[1])
    take(most)
    with pytest.raises(ValueError, match=f"at most {most} elements"):
        take(most + 1)


@pytest.mark.parametrize("stride", [WIDTH, 2**25, 2**31, 2**40])
def test_a_readout_has_no_64_bits_where_32_do(stride):
    """Strides of more than 32 bits have 64 bits whatever the rows have."""
    assert not rows_need_64_bits(64, 32 * 10**6, 1, (stride, 4096), 128)


@pytest.mark.parametrize(
    ("group", "stages"), [(1, 3), (2, 3), (8, 3), (16, 2), (32, 1), (64, 1)]
)
def test_stages_are_fewer_where_their_copies_would_not_fit(group, stages):
    """A head of 128 in bf16, whose key head has ``group`` gradients."""
    usual = front_backward_tile(8192, 128)
    assert within_shared_memory(usual, 2 * 128 * (1 + group)) == usual._replace(
        stages=stages
    )


@pytest.mark.parametrize("table", TABLE)
@pytest.mark.parametrize("tokens", [1, 65535 * 128, 65535 * 128 + 1, 10**8])
def test_any_number_of_tokens_is_counted_by_a_grid(table, tokens):
    tile = table(tokens, 128)
    longer = within_grid(tile, tokens, 1)
    assert -(-tokens // longer.tokens) <= 65535 and longer.steps % 4 == 0
    assert longer == tile or -(-tokens // tile.tokens) > 65535


def test_more_rows_than_a_grid_counts_are_refused():
    tile = front_forward_tile(8, 128)
    assert within_grid(tile, 8, 65535) == tile
    with pytest.raises(ValueError, match="65536 rows.*at most 65535.*packed documents"):
        within_grid(tile, 8, 65536)
