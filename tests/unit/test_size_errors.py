"""Sizes that Megatron's mixers and Automodel's assert are refused with an error that is both."""

from types import SimpleNamespace

import pytest

from megatron_gdn import GDNDims, SequenceLayout
from megatron_gdn.context_parallel import MambaContextParallel, local_indices
from megatron_gdn.mamba2.sizes import Mamba2Dims
from megatron_gdn.ops.delta_rule.base import require_even_groups


def gdn(key_heads=4):
    return GDNDims(
        hidden_size=24, num_key_heads=key_heads, num_value_heads=8, key_head_dim=8,
        value_head_dim=12, conv_kernel_dim=4,
    )  # fmt: skip


def mamba(heads=8):
    return Mamba2Dims(
        hidden_size=24, num_heads=heads, num_groups=2, head_dim=6, state_dim=5, conv_kernel_dim=4
    )


def exchange(cp_size, num_heads, n_groups):
    group = SimpleNamespace(size=lambda: cp_size, rank=lambda: 0)
    return MambaContextParallel(group, num_heads, 4, n_groups, 5, mixer=None)


REFUSED = {
    "value heads per key head": lambda: gdn(key_heads=3),
    "likewise of an op": lambda: require_even_groups(3, 8),
    "tensor parallel": lambda: gdn().shard(3),
    "context parallel": lambda: gdn().layout.share(3),
    "FP8": lambda: gdn().layout.check_fp8(24),
    "FP8 of Mamba2": lambda: mamba().layout.check_fp8(32),
    "heads per group": lambda: mamba(heads=7),
    "groups per rank": lambda: mamba().shard(3),
    "lengths in zigzag": lambda: local_indices([10], 2, 0, SequenceLayout.ZIGZAG),
    "heads of an exchange": lambda: exchange(2, 7, 2),
    "ranks of an exchange": lambda: exchange(3, 8, 2),
}


@pytest.mark.parametrize("error", [AssertionError, ValueError])
@pytest.mark.parametrize("name", REFUSED)
def test_a_caller_of_either_kind_catches_it(name, error):
    with pytest.raises(error):
        REFUSED[name]()
