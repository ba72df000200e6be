"""A Mamba2 mixer equals its recurrence on one rank; its own laws in parallel."""

import pytest

from tests.distributed.mamba_laws import (
    a_changed_norm_counts,
    a_changed_norm_counts_in_parallel,
    mixer_equals_tokens,
    same_start_at_every_size,
)
from tests.distributed.mixer_laws import parallel_equals_one_rank
from tests.distributed.mixers import MAMBA2

UNEQUAL = (16, 0, 8, 24)


@pytest.mark.parametrize(
    "case",
    [
        {},
        {"lengths": (3, 0, 65, 7, 1)},
        {"lengths": (3, 0, 65), "D_has_hdim": True, "conv_bias": False},
        {"dt_limit": (0.3, 0.9), "rmsnorm": False},
        {"sizes": {"mamba_num_groups": 8}},
        {"sizes": {"mamba_num_groups": 1, "mamba_num_heads": None, "mamba_head_dim": 4},
         "expand": 2, "norm_eps": 1e-2},
    ],
    ids=["batch", "packed", "D of channels", "limits, no norm", "own groups", "one group"],
)  # fmt: skip
def test_the_mixer_equals_the_recurrence(pools, case):
    pools(2).run(mixer_equals_tokens, **case)


@pytest.mark.parametrize("mode", ["headwise", "chunkwise"])
@pytest.mark.parametrize(("tp", "cp"), [(2, 2), (1, 4)])
def test_more_ranks_than_groups_equal_one_rank(pools, tp, cp, mode):
    """Headwise, a group's heads lie on two ranks: the norm runs after the exchange."""
    options = {"D_has_hdim": True} if tp == 1 else {}
    pools(4).run(
        parallel_equals_one_rank, MAMBA2, tp, cp, tp > 1, lengths=UNEQUAL, mode=mode, **options
    )


@pytest.mark.parametrize("lengths", [None, UNEQUAL], ids=["batch", "packed"])
@pytest.mark.parametrize("change", ["subclass", "forward", "hook"])
def test_a_changed_norm_counts(pools, change, lengths):
    pools(2).run(a_changed_norm_counts, change, lengths)


@pytest.mark.parametrize(
    ("size", "tp", "cp", "mode"),
    [
        pytest.param(2, 2, 1, "auto", id="tensor parallel"),
        pytest.param(2, 1, 2, "headwise", id="headwise"),
        pytest.param(2, 1, 2, "chunkwise", id="chunkwise"),
        pytest.param(4, 1, 4, "headwise", id="headwise inside a group"),
    ],
)
def test_a_changed_norm_counts_in_parallel(pools, size, tp, cp, mode):
    pools(size).run(
        a_changed_norm_counts_in_parallel, tp, cp, "subclass", lengths=UNEQUAL, mode=mode
    )


def test_chunkwise_takes_heads_that_no_exchange_could_share(pools):
    changes = {"mamba_num_heads": 3, "mamba_num_groups": 1}
    pools(4).run(parallel_equals_one_rank, MAMBA2, 1, 4, lengths=UNEQUAL, changes=changes)


def test_the_same_model_starts_at_every_tensor_parallel_size(pools):
    pools(2).run(same_start_at_every_size)
