"""Layouts and sizes of mixers: how they are shared out, and what is refused, with what
can be."""

import math
from types import SimpleNamespace

import pytest

from megatron_gdn import GDNDims
from megatron_gdn.gdp.sizes import GDPDims
from megatron_gdn.mamba2.sizes import (
    Mamba2Dims,
    refuse_unsupported_arguments,
)
from megatron_gdn.mixers.fp8 import require_fp8_widths, widths_in_fp8
from megatron_gdn.mixers.mamba_layer import check_time_steps
from megatron_gdn.ops.delta_rule.base import require_multiple_of_key_heads
from megatron_gdn.ops.layout import Layout, Section, SizeError
from tests.gdn_mixer import gdn_dims

QWEN3_NEXT = SimpleNamespace(
    hidden_size=2048,
    linear_num_key_heads=16,
    linear_num_value_heads=32,
    linear_key_head_dim=128,
    linear_value_head_dim=128,
    linear_conv_kernel_dim=4,
)


def require_widths(layout: Layout, multiple: int) -> None:
    require_fp8_widths(widths_in_fp8(layout), layout.heads_text, multiple)


def test_sizes_of_qwen3_next():
    dims = GDNDims.from_config(QWEN3_NEXT)
    assert dims.layout.widths == (2048, 2048, 4096, 4096, 32, 32)
    assert dims.layout.names == ("query", "key", "value", "z", "beta", "alpha")
    assert dims.layout.width == 12352 and dims.layout.conv_width == 8192
    assert dims.value_heads_per_key_head == 2


def test_ranks_up_to_the_number_of_value_heads_can_share_them():
    dims = GDNDims.from_config(QWEN3_NEXT)
    for tp in (1, 2, 4, 8, 16):
        for cp in (1, 2, 4, 8, 16, 32):
            if tp * cp > 32:
                continue
            share = dims.shard(tp).layout.share(cp)
            assert share.heads("value") * tp * cp == 32
            assert share.heads("key") == max(1, 16 // (tp * cp))
            if tp * cp <= 16:
                assert share == dims.shard(tp * cp).layout


@pytest.mark.parametrize(
    ("key_heads", "value_heads", "legal"),
    [
        (16, 32, "1, 2, 4, 8, 16, 32"),
        (2, 8, "1, 2, 4, 8"),
        (4, 24, "1, 2, 4, 8, 12, 24"),
        (3, 6, "1, 3, 6"),
    ],
)
def test_head_counts_that_cannot_be_shared_list_those_that_can(
    key_heads, value_heads, legal
):
    config = {
        **vars(QWEN3_NEXT),
        "linear_num_key_heads": key_heads,
        "linear_num_value_heads": value_heads,
    }
    dims = GDNDims.from_config(SimpleNamespace(**config))
    legal_sizes = [int(size) for size in legal.split(", ")]
    for ranks in range(-1, 2 * value_heads):
        if ranks in legal_sizes:
            # Every rank's value heads use the same key heads in equal numbers.
            share = dims.layout.share(ranks)
            per_key_head = value_heads // key_heads
            held = share.heads("value")
            for rank in range(ranks):
                heads = range(value_heads)[rank * held :][:held]
                assert len({head // per_key_head for head in heads}) == share.heads(
                    "key"
                )
        else:
            with pytest.raises(
                SizeError, match=f"context_parallel_size={ranks} .*of {legal}\\."
            ):
                dims.layout.share(ranks)


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
        require_widths(dims.shard(ranks).layout, 16)
    with pytest.raises(
        SizeError, match=r"multiples of 1000, but in_proj .* has 1536 columns"
    ):
        require_widths(dims.shard(8).layout, 1000)
    with pytest.raises(
        ValueError, match=r"the input of out_proj has 512 columns .*remainder 512"
    ):
        require_widths(dims.shard(8).layout, 768)


SIZES = {"num_heads": 8, "num_groups": 4, "head_dim": 3, "state_dim": 5}


def dims(**changes):
    return Mamba2Dims(**{**SIZES, "hidden_size": 6, "conv_kernel_dim": 4, **changes})


def config(**changes):
    named = {f"mamba_{name}": value for name, value in SIZES.items()}
    return SimpleNamespace(**{**named, **changes})


def test_sizes_come_from_the_config_or_from_expand():
    assert Mamba2Dims.from_config(config(), 6, 4, 2) == dims()
    assert Mamba2Dims.from_config(config(mamba_num_heads=None), 6, 4, 2).num_heads == 4
    for head_dim in (3, None, 0):
        said = f"gives 14 channels, which do not divide .* mamba_head_dim={head_dim}"
        with pytest.raises(ValueError, match=said):
            Mamba2Dims.from_config(
                config(mamba_num_heads=None, mamba_head_dim=head_dim), 7, 4, 2
            )


def test_sizes_that_do_not_fit_are_refused():
    with pytest.raises(
        SizeError, match="num_heads=6 is not a multiple of num_groups=4"
    ):
        dims(num_heads=6)
    with pytest.raises(ValueError, match="head_dim=None is not a size"):
        dims(head_dim=None)
    for ranks in (8, 0, -1):
        said = f"size={ranks} cannot split 4 groups of 8 .* use one of 1, 2, 4"
        with pytest.raises(SizeError, match=said):
            dims().shard(ranks)
    require_widths(dims().layout, 8)  # 24 + 24 + 20 + 20 = 88 columns before dt
    with pytest.raises(SizeError, match="multiples of 16, but in_proj .* 88 columns"):
        require_widths(dims().layout, 16)


def test_arguments_that_would_be_ignored_are_refused():
    refuse_unsupported_arguments(False, "random", 1.0, False)
    with pytest.raises(ValueError, match="takes norm_before_gate=False only, got True"):
        refuse_unsupported_arguments(True, "random", 1.0, False)
    with pytest.raises(ValueError, match="takes dt_init='random' only, got 'constant'"):
        refuse_unsupported_arguments(False, "constant", 1.0, False)


def test_ranges_must_be_drawable():
    good = {"dt_init_range": (0.001, 0.1), "dt_init_floor": 1e-4}
    check_time_steps(**good, dt_limit=(0.0, math.inf))
    bad = (
        ({"dt_init_range": (0.2, 0.1)}, "dt_min=0.2, dt_max=0.1 must be"),
        ({"dt_init_range": (0.0, 0.1)}, "dt_min=0.0, dt_max=0.1 must be"),
        ({"dt_init_floor": 0.0}, "dt_init_floor=0.0 must be above 0"),
        ({"dt_limit": (2.0, 1.0)}, "must be .least, greatest."),
        ({"dt_limit": (-1.0, 1.0)}, "must be .least, greatest."),
        ({"dt_limit": (1.0,)}, "must be .least, greatest."),
        ({"dt_limit": (1.0, 2.0, 3.0)}, "must be .least, greatest."),
    )
    for change, said in bad:
        with pytest.raises(ValueError, match=said):
            check_time_steps(**{**good, "dt_limit": (0.0, math.inf), **change})


def test_a_caller_of_either_kind_catches_a_wrong_size():
    """Megatron's mixers raise an AssertionError; the tests of each refusal ask for a
    SizeError."""
    assert issubclass(SizeError, ValueError) and issubclass(SizeError, AssertionError)
    with pytest.raises(SizeError, match="num_value_heads=8 is not a multiple"):
        gdn_dims(24, 3, 8, 8, 12)
    with pytest.raises(SizeError):
        require_multiple_of_key_heads(3, 8)
    with pytest.raises(SizeError, match="=3 cannot split 4 key heads"):
        gdn_dims(24, 4, 8, 8, 12).shard(3)
    product = GDPDims(
        hidden_size=24,
        num_heads=12,
        num_groups=4,
        head_dim=8,
        state_dim=8,
        conv_kernel_dim=4,
        num_householder=2,
    )
    assert product.shard(2).num_groups == 2
    with pytest.raises(SizeError, match="=3 cannot split 4 groups of 12 heads"):
        product.shard(3)


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


@pytest.mark.parametrize(
    ("ranks", "groups", "copies"), [(2, 1, 1), (4, 1, 2), (12, 1, 6)]
)
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
