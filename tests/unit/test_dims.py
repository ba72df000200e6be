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
    assert dims.layout.sections == (2048, 2048, 4096, 4096, 32, 32)
    assert dims.layout.names == ("query", "key", "value", "z", "beta", "alpha")
    assert dims.layout.width == 12352 and dims.layout.conv_width == 8192
    assert dims.value_heads_per_key_head == 2


def test_shards_add_up_to_the_whole():
    dims = GDNDims.from_config(QWEN3_NEXT)
    for ranks in (1, 2, 4, 8, 16):
        share = dims.shard(ranks)
        assert [n * ranks for n in share.layout.sections] == list(dims.layout.sections)
        assert share.hidden_size == dims.hidden_size


def test_a_size_that_does_not_divide_is_refused_with_the_ones_that_do():
    dims = GDNDims.from_config(QWEN3_NEXT).shard(2)
    with pytest.raises(ValueError, match=r"context_parallel_size=3 .* 8 key heads .* 1, 2, 4, 8\."):
        dims.shard(3, over="context_parallel_size")


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


def test_fp8_alignment_is_checked_on_the_local_width():
    dims = GDNDims.from_config(QWEN3_NEXT)
    dims.check_fp8_alignment(16)
    dims.shard(4).check_fp8_alignment(16)
    with pytest.raises(ValueError, match=r"multiple of 16, but it is 1544 \(remainder 8\)"):
        dims.shard(8).check_fp8_alignment(16)
