"""The price of both context-parallel schemes, by hand, and which ranks share a
machine."""

import math
from dataclasses import replace

import pytest
import torch

from megatron_gdn import SequenceLayout
from megatron_gdn.context_parallel.agreement import (
    largest_shared_run,
    ranks_per_machine,
)
from megatron_gdn.context_parallel.price import (
    COLLECTIVE_TIME,
    FIXED_TIME,
    FIXED_TIME_ACROSS_MACHINES,
    MAP_TIME,
    NETWORK_SPEED,
    NVLINK_SPEED,
    PRODUCT_TIME,
    LinearCpMode,
    map_exchange_traffic,
    price,
    transfer_time,
)
from tests.gdn_mixer import gdn_dims

QWEN = gdn_dims(2048, 16, 32, 128, 128)
MAP = 32 * 128 * 256 * 4  # 4.19 MB: one map of 32 heads


def priced(cp, tokens, rows=1, lengths=None, layout="zigzag", dims=QWEN, n=None):
    inside = dims.layout.share(cp)
    layout = SequenceLayout.parse(layout)
    return price(
        dims.heads.state_shape, inside, cp, layout, tokens, rows, lengths, 2, n or cp
    )


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
    exchange = (
        1.5 * (cp - 1) / cp * per_rank * MAP / NVLINK_SPEED
        + 2 * COLLECTIVE_TIME
        + nodes * PRODUCT_TIME
    )
    local = 16384 // cp * case.get("rows", 1)
    total = exchange + MAP * MAP_TIME * local + FIXED_TIME
    assert priced(cp, 16384, **case).chunkwise == pytest.approx(total, rel=1e-12)


def test_a_map_of_a_rule_that_mixes_no_rows_has_one_column_beside_the_state():
    decays = QWEN.heads.state_shape._replace(diagonal=True)
    b = 2 * 32 * 128 * (128 + 1) * 4
    received, steps = map_exchange_traffic(decays, 4, SequenceLayout.ZIGZAG, 1, None)
    assert (
        received == pytest.approx((1 + 128 / 129) * 3 / 4 * b, rel=1e-12) and steps == 8
    )


def test_long_sequences_go_chunkwise_and_many_short_documents_headwise():
    assert priced(4, 131072).cheaper_mode is LinearCpMode.CHUNKWISE
    assert priced(4, 2048).cheaper_mode is LinearCpMode.HEADWISE
    assert (
        priced(4, 131072, lengths=(1024,) * 128).cheaper_mode is LinearCpMode.HEADWISE
    )


@pytest.mark.parametrize("n", [1, 2, 4, 8])
def test_the_slower_of_the_two_wires_is_waited_for(n):
    """NVLink too, where it is as slow as the network: each has its own peers."""
    per_peer = 5e6
    found = transfer_time(7 * per_peer, 8, n, nvlink_speed=NETWORK_SPEED)
    assert found == pytest.approx(max(n - 1, 8 - n) * per_peer / NETWORK_SPEED)


def by_hand(s, cp, n, heads, layout):
    """Milliseconds of a forward, headwise and chunkwise; bytes come over both wires."""
    key_heads, value_heads = heads
    outside = (cp - n) / (cp - 1)

    def wire(received):
        return max(
            received * (1 - outside) / NVLINK_SPEED, received * outside / NETWORK_SPEED
        )

    # q, k, v, z, b, a of one rank; ranks share a key head if there are more ranks than
    # key heads.
    row = 2 * 128 * max(key_heads // cp, 1) + (2 * 128 + 2) * value_heads // cp
    headwise = wire((cp - 1) * s * (row + 128 * value_heads // cp) * 2)
    one_map = value_heads * 128 * 256 * 4
    per_rank = 1 if layout == "contiguous" else 2
    own = per_rank * one_map
    steps = per_rank * cp
    exchange = (
        wire(1.5 * own * (cp - 1) / cp) + 2 * COLLECTIVE_TIME + steps * PRODUCT_TIME
    )
    fixed = FIXED_TIME if n == cp else FIXED_TIME_ACROSS_MACHINES
    return headwise, exchange + one_map * s * MAP_TIME + fixed


@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
@pytest.mark.parametrize("cp", [8, 16, 32, 64])
def test_auto_takes_the_cheaper_over_machines_of_eight(cp, layout):
    taken = set()
    for heads in ((64, 64), (16, 64), (16, 32), (8, 32), (4, 12), (4, 8), (2, 4)):
        if heads[1] % cp:
            continue  # headwise cannot split them
        dims = replace(QWEN, num_key_heads=heads[0], num_value_heads=heads[1])
        for s in (128, 512, 1024, 2048, 3072, 4096, 6144, 8192, 16384, 32768):
            headwise, chunkwise = by_hand(s, cp, 8, heads, layout)
            found = priced(cp, cp * s, dims=dims, n=8, layout=layout)
            assert found == pytest.approx((headwise, chunkwise), rel=1e-12)
            cheaper = "chunkwise" if chunkwise < headwise else "headwise"
            assert found.cheaper_mode == cheaper, (s, cp, heads, found)
            taken.add(cheaper)
    assert taken == {"headwise", "chunkwise"}


@pytest.mark.parametrize("s", [2048, 4096, 6144, 16384])
@pytest.mark.parametrize("cp", [16, 32])
def test_headwise_is_not_taken_where_a_layer_is_faster_chunkwise(s, cp):
    """By the formula of a whole layer in ``docs/context_parallel.md`` 1.39 times at
    least, over machines of 8."""
    assert priced(cp, cp * s, n=8).cheaper_mode is LinearCpMode.CHUNKWISE


def test_a_mode_comes_from_the_argument_then_the_config_then_is_auto():
    class Config:
        linear_cp_mode = "headwise"

    assert LinearCpMode.of("chunkwise", Config) is LinearCpMode.CHUNKWISE
    assert LinearCpMode.of(None, Config) is LinearCpMode.HEADWISE
    assert LinearCpMode.of(None, object()) is LinearCpMode.AUTO
    with pytest.raises(ValueError, match="'headwise', 'chunkwise', 'auto'"):
        LinearCpMode.of("ring", Config)


META = torch.device("meta")


class Group:
    """Nothing is sent over it: rows on the meta device have no values."""

    def __init__(self, size: int) -> None:
        self.size = lambda: size


@pytest.mark.parametrize(
    ("machines", "ranks"),
    [
        ("aaaa", 4),
        ("aabb", 2),
        ("aaaabb", 2),
        ("aaaaaaaabbbb", 4),
        ("aab", 1),
        ("abab", 1),
    ],
)
def test_no_stretch_of_ranks_is_on_two_machines(machines, ranks):
    assert largest_shared_run(machines) == ranks
    for first in range(0, len(machines), ranks):
        assert len(set(machines[first : first + ranks])) == 1


@pytest.mark.parametrize("size", range(1, 17))
def test_what_is_told_may_be_more_than_the_ranks_and_need_not_divide_them(size):
    for told in range(1, 20):
        expected = size if told >= size else math.gcd(told, size)
        assert ranks_per_machine(Group(size), told, META) == expected


def test_without_values_nothing_is_sent():
    assert ranks_per_machine(Group(6), None, META) == 6
