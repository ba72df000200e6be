from types import SimpleNamespace

import pytest

from megatron_gdn import GDNDims

QWEN3_NEXT = SimpleNamespace(
    hidden_size=2048,
    linear_num_key_heads=16,
    linear_num_value_heads=32,
    linear_key_head_dim=128,
    linear_value_head_dim=128,
    linear_conv_kernel_dim=4,
)


def test_sizes_of_qwen3_next():
    dims = GDNDims.from_config(QWEN3_NEXT)
    assert dims.layout.widths == (2048, 2048, 4096, 4096, 32, 32)
    assert dims.layout.names == ("query", "key", "value", "z", "beta", "alpha")
    assert dims.layout.width == 12352 and dims.layout.conv_width == 8192
    assert dims.value_heads_per_key_head == 2


def test_shards_add_up_to_the_whole():
    dims = GDNDims.from_config(QWEN3_NEXT)
    for ranks in (1, 2, 4, 8, 16):
        share = dims.shard(ranks)
        assert [n * ranks for n in share.layout.widths] == list(dims.layout.widths)
        assert share.hidden_size == dims.hidden_size


def test_a_size_that_does_not_divide_is_refused_with_the_ones_that_do():
    dims = GDNDims.from_config(QWEN3_NEXT).shard(2)
    with pytest.raises(
        ValueError, match=r"tensor_model_parallel_size=3 .* 8 key heads .* 1, 2, 4, 8\."
    ):
        dims.shard(3)


def test_ranks_up_to_the_number_of_value_heads_can_share_them():
    dims = GDNDims.from_config(QWEN3_NEXT)
    for tp in (1, 2, 4, 8, 16):
        for cp in (1, 2, 4, 8, 16, 32):
            if tp * cp > 32:
                continue
            share = dims.shard(tp).share_heads(cp)
            assert share.num_value_heads * tp * cp == 32
            assert share.num_key_heads == max(1, 16 // (tp * cp))
            if tp * cp <= 16:
                assert share == dims.shard(tp * cp)


@pytest.mark.parametrize(
    ("key_heads", "value_heads", "legal"),
    [
        (16, 32, "1, 2, 4, 8, 16, 32"),
        (2, 8, "1, 2, 4, 8"),
        (4, 24, "1, 2, 4, 8, 12, 24"),
        (3, 6, "1, 3, 6"),
    ],
)
def test_head_counts_that_cannot_be_shared_list_those_that_can(key_heads, value_heads, legal):
    config = {
        **vars(QWEN3_NEXT), "linear_num_key_heads": key_heads,
        "linear_num_value_heads": value_heads,
    }  # fmt: skip
    dims = GDNDims.from_config(SimpleNamespace(**config))
    legal_sizes = [int(size) for size in legal.split(", ")]
    for ranks in range(1, 2 * value_heads):
        if ranks in legal_sizes:
            # Every rank's value heads use the same key heads in equal numbers.
            share = dims.share_heads(ranks)
            per_key_head = value_heads // key_heads
            for rank in range(ranks):
                heads = range(value_heads)[rank * share.num_value_heads :][: share.num_value_heads]
                assert len({head // per_key_head for head in heads}) == share.num_key_heads
        else:
            with pytest.raises(ValueError, match=f"context_parallel_size={ranks} .*of {legal}\\."):
                dims.share_heads(ranks)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"linear_num_value_heads": 24}, "num_value_heads=24 is not a multiple"),
        ({"linear_key_head_dim": None}, "key_head_dim=None is not a size"),
        ({"linear_conv_kernel_dim": 0}, "conv_kernel_dim=0 is not a size"),
        ({"linear_num_key_heads": True}, "num_key_heads=True is not a size"),
    ],
)
def test_impossible_sizes_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        GDNDims.from_config(SimpleNamespace(**{**vars(QWEN3_NEXT), **changes}))


def test_fp8_alignment_is_checked_on_the_local_width_without_the_gates():
    """12352 rows have 64 of the gates: 12352 / 8 is no multiple of 16, 12288 / 8 is."""
    dims = GDNDims.from_config(QWEN3_NEXT)
    assert dims.shard(8).layout.width % 16 and not dims.shard(8).layout.main_width % 16
    for ranks in (1, 4, 8, 16):
        dims.shard(ranks).layout.check_fp8(16)
    with pytest.raises(ValueError, match=r"multiples of 1000, but in_proj .* has 1536 columns"):
        dims.shard(8).layout.check_fp8(1000)
    with pytest.raises(ValueError, match=r"the input of out_proj has 512 columns .*remainder 512"):
        dims.shard(8).layout.check_fp8(768)
