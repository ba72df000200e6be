"""Sizes and arguments of a Mamba2 mixer that cannot work, refused with what can."""

import math
from types import SimpleNamespace

import pytest

from megatron_gdn.mamba2.sizes import Mamba2Dims, check_ranges, refuse_unsupported_arguments

SIZES = {"num_heads": 8, "num_groups": 4, "head_dim": 3, "state_dim": 5}


def dims(**changes):
    return Mamba2Dims(**{**SIZES, "hidden_size": 6, "conv_kernel_dim": 4, **changes})


def config(**changes):
    named = {f"mamba_{name}": value for name, value in SIZES.items()}
    return SimpleNamespace(**{**named, **changes})


def test_sizes_come_from_the_config_or_from_expand():
    assert Mamba2Dims.from_config(config(), 6, 4, 2) == dims()
    assert Mamba2Dims.from_config(config(mamba_num_heads=None), 6, 4, 2).num_heads == 4
    with pytest.raises(ValueError, match="gives 14 channels, which do not divide into heads of"):
        Mamba2Dims.from_config(config(mamba_num_heads=None), 7, 4, 2)


def test_sizes_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="num_heads=6 is not a multiple of num_groups=4"):
        dims(num_heads=6)
    with pytest.raises(ValueError, match="head_dim=None is not a size"):
        dims(head_dim=None)
    with pytest.raises(ValueError, match="size=8 cannot split 4 groups of 8 .* use one of 1, 2, 4"):
        dims().shard(8)
    dims().layout.check_fp8(8)  # 24 + 24 + 20 + 20 = 88 columns before dt
    with pytest.raises(ValueError, match="multiples of 16, but in_proj .* 88 columns"):
        dims().layout.check_fp8(16)


def test_arguments_that_would_be_ignored_are_refused():
    refuse_unsupported_arguments(False, "random", 1.0, False)
    with pytest.raises(ValueError, match="takes norm_before_gate=False only, got True"):
        refuse_unsupported_arguments(True, "random", 1.0, False)
    with pytest.raises(ValueError, match="takes dt_init='random' only, got 'constant'"):
        refuse_unsupported_arguments(False, "constant", 1.0, False)


def test_ranges_must_be_drawable():
    good = {"A_init_range": (1, 16), "dt_init_range": (0.001, 0.1), "dt_init_floor": 1e-4}
    check_ranges(**good, dt_limit=(0.0, math.inf))
    bad = (
        ({"A_init_range": (0, 16)}, r"A_init_range = \(0, 16\) must be"),
        ({"dt_init_range": (0.2, 0.1)}, "dt_min, dt_max = .* must be"),
        ({"dt_init_floor": 0.0}, "dt_init_floor=0.0 must be above 0"),
        ({"dt_limit": (2.0, 1.0)}, "must be .least, greatest."),
    )
    for change, said in bad:
        with pytest.raises(ValueError, match=said):
            check_ranges(**{**good, "dt_limit": (0.0, math.inf), **change})
