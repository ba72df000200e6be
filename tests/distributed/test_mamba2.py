"""A Mamba2 mixer equals its recurrence on one rank; its own laws in parallel."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from megatron_gdn.mamba2.layer import GroupedRMSNorm
from tests.distributed.mixer_laws import equals_written_out, parallel_equals_one_rank
from tests.distributed.mixers import MAMBA2
from tests.mamba_mixers import (
    alone,
    build,
    mamba_config,
    share_of,
    whole_mixer,
    written_out,
)
from tests.parallel import groups_of_megatron
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
    "hook": lambda norm: norm.register_forward_hook(lambda _, args, out: out + more(*args)),
}


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
@on_ranks(2, cp=1)
def test_the_mixer_equals_the_recurrence(case):
    lengths, sizes = case.pop("lengths", None), case.pop("sizes", {})
    mixer = whole_mixer(mamba_config(params_dtype=torch.float64, **sizes), **case)
    equals_written_out(mixer, written_out, lengths)


@pytest.mark.parametrize("lengths", [None, UNEQUAL], ids=["batch", "packed"])
@pytest.mark.parametrize("change", ["subclass", "forward", "hook"])
@on_ranks(2, cp=1)
def test_a_changed_norm_counts(change, lengths):
    """What it adds is of the recurrence's output and of the gate, in fp64, with its gradients."""
    mixer = whole_mixer(mamba_config(params_dtype=torch.float64))
    CHANGES[change](mixer.norm)
    equals_written_out(mixer, partial(written_out, added=more), lengths)


def build_changed(*args, **options):
    mixer = build(*args, **options)
    CHANGES["subclass"](mixer.norm)
    return mixer


@pytest.mark.parametrize(
    ("tp", "cp", "mode"),
    [(2, 1, "auto"), (1, 2, "headwise"), (1, 2, "chunkwise"), (1, 4, "headwise")],
    ids=["tensor parallel", "headwise", "chunkwise", "headwise inside a group"],
)
def test_a_changed_norm_counts_in_parallel(pools, tp, cp, mode):
    """It gets the channels of whole groups, whatever an exchange does to their heads."""
    changed = replace(MAMBA2, build=build_changed)
    pools(tp * cp).run(parallel_equals_one_rank, changed, tp, cp, lengths=UNEQUAL, mode=mode)


def test_chunkwise_takes_heads_that_no_exchange_could_share(pools):
    changes = {"mamba_num_heads": 3, "mamba_num_groups": 1}
    pools(4).run(parallel_equals_one_rank, MAMBA2, 1, 4, lengths=UNEQUAL, changes=changes)


@on_ranks(tp=2)
def test_the_same_model_starts_at_every_tensor_parallel_size():
    """Tensor-parallel ranks start with their shares of what one rank starts with."""
    torch.manual_seed(3)
    one = build(mamba_config(), alone())
    torch.manual_seed(3)
    mixer = build(mamba_config(tensor_model_parallel_size=2), groups_of_megatron())
    for name, parameter in mixer.named_parameters():
        assert torch.equal(parameter, share_of(name, one.get_parameter(name), mixer)), name
