"""The price of the two context-parallel schemes, against sums done by hand."""

import pytest

from megatron_gdn import GDNDims, SequenceLayout
from megatron_gdn.context_parallel.choice import FIXED, SUMMARY, LinearCpMode, price

QWEN = GDNDims(
    hidden_size=2048,
    num_key_heads=16,
    num_value_heads=32,
    key_head_dim=128,
    value_head_dim=128,
    conv_kernel_dim=4,
)
MAP = 32 * 128 * 256 * 4  # 4.19 MB: one map of 32 heads


def priced(cp, tokens, rows=1, lengths=None, layout="zigzag", limit=8):
    return price(QWEN, cp, SequenceLayout.parse(layout), tokens, rows, lengths, 2, limit)


def test_headwise_pays_for_the_rows_of_the_other_ranks():
    assert priced(8, 8 * 32768).headwise == 7 / 8 * 32768 * (12352 + 4096) * 2
    assert priced(2, 2 * 1024, rows=3).headwise == 1 / 2 * 3 * 1024 * (12352 + 4096) * 2


@pytest.mark.parametrize(
    ("cp", "maps", "case"),
    [
        (4, 2 * 3, {}),
        (4, 2 * 3 * 5, {"rows": 5}),
        (4, 1 * 3, {"layout": "contiguous"}),
        (4, 2 * 3 * 2, {"lengths": (8192, 0, 8192)}),
        (4, 2 * 3, {"lengths": (8192, 0, 8192), "layout": "zigzag_buffer"}),
        (16, 2 * 5, {}),  # scan: log2 of 32 nodes
        (16, 1 * 4, {"layout": "contiguous"}),
        (16, 2 * 15, {"limit": 16}),
    ],
)
def test_chunkwise_pays_for_maps_and_for_computing_them(cp, maps, case):
    tokens = 16384 // cp * case.get("rows", 1)
    expected = MAP * (maps + SUMMARY * tokens) + FIXED
    assert priced(cp, 16384, **case).chunkwise == pytest.approx(expected, rel=1e-12)


def test_long_sequences_go_chunkwise_and_many_short_documents_headwise():
    assert priced(4, 131072).cheaper is LinearCpMode.CHUNKWISE
    assert priced(4, 2048).cheaper is LinearCpMode.HEADWISE
    assert priced(4, 131072, lengths=(1024,) * 128).cheaper is LinearCpMode.HEADWISE


def test_a_mode_comes_from_the_argument_then_the_config_then_is_auto():
    class Config:
        linear_cp_mode = "headwise"

    assert LinearCpMode.of("chunkwise", Config) is LinearCpMode.CHUNKWISE
    assert LinearCpMode.of(None, Config) is LinearCpMode.HEADWISE
    assert LinearCpMode.of(None, object()) is LinearCpMode.AUTO
    with pytest.raises(ValueError, match="'headwise', 'chunkwise', 'auto'"):
        LinearCpMode.of("ring", Config)
