"""The price of the two context-parallel schemes, against sums done by hand."""

import pytest

from megatron_gdn import GDNDims, SequenceLayout
from megatron_gdn.context_parallel.price import (
    FIXED,
    LATENCY,
    STEP,
    SUMMARY,
    LinearCpMode,
    exchange_prices,
    price,
)

QWEN = GDNDims(
    hidden_size=2048,
    num_key_heads=16,
    num_value_heads=32,
    key_head_dim=128,
    value_head_dim=128,
    conv_kernel_dim=4,
)
MAP = 32 * 128 * 256 * 4  # 4.19 MB: one map of 32 heads


def priced(cp, tokens, rows=1, lengths=None, layout="zigzag", dims=QWEN):
    inside, layout = dims.layout.share(cp), SequenceLayout.parse(layout)
    return price(dims.heads.state, inside, cp, layout, tokens, rows, lengths, 2)


def exchanges(cp, rows=1, lengths=None, layout="zigzag", dims=QWEN):
    return exchange_prices(dims.heads.state, cp, SequenceLayout.parse(layout), rows, lengths)


def test_headwise_pays_for_the_rows_of_the_other_ranks():
    assert priced(8, 8 * 32768).headwise == 7 / 8 * 32768 * (12352 + 4096) * 2
    assert priced(2, 2 * 1024, rows=3).headwise == 1 / 2 * 3 * 1024 * (12352 + 4096) * 2


@pytest.mark.parametrize(
    ("cp", "per_rank", "nodes", "case"),
    [
        (4, 2, 8, {}),
        (4, 2 * 5, 8, {"rows": 5}),
        (4, 1, 4, {"layout": "contiguous"}),
        (4, 2 * 2, 8, {"lengths": (8192, 0, 8192)}),
        (4, 2, 8, {"lengths": (8192, 0, 8192), "layout": "zigzag_buffer"}),
        (8, 2, 16, {}),
        (16, 2, 32, {}),
        (16, 1, 16, {"layout": "contiguous"}),
    ],
)
def test_chunkwise_pays_for_maps_and_for_computing_them(cp, per_rank, nodes, case):
    b = per_rank * MAP
    expected = {
        "gather": (cp - 1) * b + LATENCY + nodes * STEP,
        "share": 1.5 * (cp - 1) / cp * b + 2 * LATENCY + nodes * STEP,
    }
    if cp > 8:
        del expected["gather"]
    assert exchanges(cp, **case) == pytest.approx(expected, rel=1e-12)
    local = 16384 // cp * case.get("rows", 1)
    total = min(expected.values()) + MAP * SUMMARY * local + FIXED
    assert priced(cp, 16384, **case).chunkwise == pytest.approx(total, rel=1e-12)


def test_a_map_of_a_rule_that_mixes_no_rows_has_one_column_beside_the_state():
    decays = QWEN.heads.state._replace(diagonal=True)
    b = 2 * 32 * 128 * (128 + 1) * 4
    found = exchange_prices(decays, 4, SequenceLayout.ZIGZAG, 1, None)
    expected = {
        "gather": 3 * b + LATENCY + 8 * STEP,
        "share": (1 + 128 / 129) * 3 / 4 * b + 2 * LATENCY + 8 * STEP,
    }
    assert found == pytest.approx(expected, rel=1e-12)


def test_few_ranks_gather_and_more_share():
    def cheapest(cp, **case):
        prices = exchanges(cp, **case)
        return min(prices, key=prices.get)

    assert [cheapest(cp) for cp in (2, 4, 8, 16, 64, 256)] == [
        "gather", "gather", "share", "share", "share", "share",
    ]  # fmt: skip
    assert cheapest(64, lengths=(32768,) * 16) == "share"


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
