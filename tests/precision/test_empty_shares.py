"""Checkpoints of an optimizer whose fp32 bucket is too small to give every rank a parameter."""

import pytest

from tests.precision import empty_share_laws as laws
from tests.precision.training import DISTRIBUTED

paddings = pytest.mark.parametrize("padded", [False, True], ids=["padded to 128", "padded to 2^16"])


@pytest.mark.slow
@paddings
@pytest.mark.parametrize("kind", DISTRIBUTED)
def test_it_is_saved_and_resumed_at_any_data_parallel_size(pools, tmp_path, kind, padded):
    ddp = {"pad_buckets_for_high_nccl_busbw": padded}
    held = pools(8).run(laws.train_and_save, kind, str(tmp_path), ddp)
    assert held == ([2] + [0] * 7 if padded else [1, 0, 0, 0, 1, 0, 0, 0])
    pools(8).run(laws.resumed_equals_uninterrupted, kind, str(tmp_path), ddp)
    pools(2).run(laws.resumed_equals_uninterrupted, kind, str(tmp_path), ddp)
