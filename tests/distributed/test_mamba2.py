"""Mamba2: a norm that was changed counts; its own laws in parallel."""

from dataclasses import replace

import pytest
import torch

from megatron_gdn.mixers.mamba_layer import GroupedRMSNorm
from tests.distributed.mixer_laws import equals_written_out, parallel_equals_one_rank
from tests.distributed.mixers import (
    GDP,
    MAMBA2,
    build_mamba2,
    in_fp64,
)
from tests.ranks import on_ranks

UNEQUAL = (16, 0, 8, 24)


class Louder(GroupedRMSNorm):
    """The norm and something more of what it is given."""

    def forward(self, x, gate=None):
        return super().forward(x, gate) + more(x, gate)


def more(x, gate):
    return torch.tanh(x) * torch.cos(gate)


def _replaced(norm) -> None:
    plain = norm.forward
    norm.forward = lambda x, gate=None: plain(x, gate) + more(x, gate)


CHANGES = {
    "subclass": lambda norm: setattr(norm, "__class__", Louder),
    "forward": _replaced,
    "hook": lambda norm: norm.register_forward_hook(
        lambda _, args, out: out + more(*args)
    ),
}


@pytest.mark.each_value
@pytest.mark.parametrize("lengths", [None, UNEQUAL], ids=["batch", "packed"])
@pytest.mark.parametrize("change", ["subclass", "forward", "hook"])
@on_ranks(2, cp=1)
def test_a_changed_norm_counts(change, lengths):
    """What it adds is of the recurrence's output and of the gate, in fp64, with its
    gradients."""
    mixer = in_fp64("mamba2")
    CHANGES[change](mixer.norm)
    equals_written_out(mixer, lengths, added=more)


def build_changed(*args, **options):
    mixer = build_mamba2(*args, **options)
    CHANGES["subclass"](mixer.norm)
    return mixer


@pytest.mark.parametrize(
    ("tp", "cp", "mode"),
    [(2, 1, "auto"), (1, 2, "headwise"), (1, 2, "chunkwise"), (1, 4, "headwise")],
    ids=["tensor parallel", "headwise", "chunkwise", "headwise inside a group"],
)
def test_a_changed_norm_counts_in_parallel(pools, tp, cp, mode):
    """It gets the channels of whole groups, whatever an exchange does to their
    heads."""
    changed = replace(MAMBA2, build=build_changed)
    pools(tp * cp).run(
        parallel_equals_one_rank, changed, tp, cp, lengths=UNEQUAL, mode=mode
    )


@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize("mixers", [GDP, MAMBA2], ids=["gdp", "mamba2"])
def test_a_group_of_heads_on_two_ranks_has_the_norm_of_one(pools, mixers, invariant):
    """The norm runs after the exchange; in batch-invariant mode token by token."""
    changes = {"mamba_num_groups": 1, "batch_invariant_mode": invariant}
    given = {"lengths": UNEQUAL, "mode": "headwise", "changes": changes}
    pools(2).run(parallel_equals_one_rank, mixers, 1, 2, **given)


def test_chunkwise_takes_heads_that_no_exchange_could_share(pools):
    changes = {"mamba_num_heads": 3, "mamba_num_groups": 1}
    pools(4).run(
        parallel_equals_one_rank, MAMBA2, 1, 4, lengths=UNEQUAL, changes=changes
    )
