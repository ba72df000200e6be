"""Gated DeltaNet-2, one layer on one rank: its recurrence written out, first values, its rules."""

import pytest
import torch
import torch.nn.functional as F

from megatron_gdn.gdn2.rule import FlaGDN2, PlainGDN2, choose_gdn2
from megatron_gdn.ops.rules.base import Bits
from megatron_gdn.ops.state_maps.state_map import StateShape
from tests.distributed.mixer_laws import equals_written_out
from tests.gdn2.mixers import build, gdn2_config, whole_mixer, written_out
from tests.parallel import alone

pytestmark = pytest.mark.usefixtures("one_rank")


@pytest.mark.parametrize("lengths", [None, (70, 0, 1, 66)], ids=["batch", "packed"])
@pytest.mark.parametrize(
    "options",
    [{}, {"conv_bias": True, "use_qk_l2norm": False}, {"recompute": "light"},
     {"recompute": "full"}],
    ids=["default", "options", "light", "full"],
)  # fmt: skip
def test_output_and_every_gradient_are_those_of_the_recurrence(options, lengths):
    mixer = whole_mixer(gdn2_config(params_dtype=torch.float64), **options)
    equals_written_out(mixer, written_out, lengths, tokens=40)


def test_first_values_are_those_of_megatrons_layer():
    mixer = build(gdn2_config(bf16=True, params_dtype=torch.bfloat16), alone())
    assert mixer.A_log.dtype == mixer.dt_bias.dtype == torch.float32
    rates, steps = mixer.A_log.exp(), F.softplus(mixer.dt_bias)
    assert rates.shape == (2,) and rates.min() >= 1 and rates.max() <= 16
    assert steps.shape == (10,) and steps.min() * 1.001 >= 1e-3 and steps.max() <= 0.1001
    assert list(dict(mixer.named_parameters())) == [
        "dt_bias", "A_log", "in_proj.weight", "conv1d.weight", "out_norm.weight", "out_proj.weight",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("options", "changes", "said"),
    [
        ({"backend": "flash_qla"}, {}, "unknown backend 'flash_qla' of Gated DeltaNet-2"),
        ({"backend": "fla"}, {}, "fla runs on a GPU"),
        ({"backend": "fla"}, {"deterministic_mode": True}, "in deterministic mode use 'auto'"),
        ({}, {"linear_num_key_heads": 3}, "num_value_heads=4 is not a multiple"),
    ],
)
def test_what_cannot_be_is_refused_in_words(options, changes, said):
    with pytest.raises(ValueError, match=said):
        whole_mixer(gdn2_config(**changes), **options)


def test_auto_takes_fla_on_a_gpu_unless_bits_must_repeat(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (8, 0))
    given = StateShape(2, 128, 128), torch.device("cuda"), torch.bfloat16
    assert type(choose_gdn2("auto", *given).rule) is FlaGDN2
    assert type(choose_gdn2("auto", *given, Bits.DETERMINISTIC).rule) is PlainGDN2
