"""Kimi Delta Attention and Gated DeltaNet-2 on one rank: options, first values, what is
refused."""

import pytest
import torch
import torch.nn.functional as F

from megatron_gdn.gdn2.rule import FlaGDN2, PlainGDN2, _repeat_key_heads, choose_gdn2
from megatron_gdn.ops.delta_rule.plain import PlainRule
from megatron_gdn.ops.rules.base import Bits
from megatron_gdn.ops.state_maps.state_map import StateShape
from tests.distributed.mixers import GDN2_FP32, KDA_FP32, whole
from tests.gdn2.oracle import random_inputs
from tests.parallel import alone

pytestmark = pytest.mark.usefixtures("one_rank")

DETERMINISTIC = {"deterministic_mode": True}


@pytest.mark.parametrize(
    ("kind", "options", "changes", "said"),
    [
        ("kda", {"gate_lower_bound": 5.0}, {}, "gate_lower_bound=5.0 must be below 0"),
        ("kda", {"A_init_range": (0, 1)}, {}, "0 < low <= high"),
        (
            "kda",
            {"forget_rank": -1},
            {},
            "forget_rank=-1 is not a size; it must be an integer",
        ),
        (
            "kda",
            {"backend": "flash_qla"},
            {},
            "unknown backend 'flash_qla' of Kimi Delta Attent",
        ),
        (
            "gdn2",
            {"backend": "flash_qla"},
            {},
            "unknown backend 'flash_qla' of Gated DeltaNet-2",
        ),
        *(
            (kind, {"backend": "fla"}, *more)
            for kind in ("kda", "gdn2")
            for more in (
                ({}, "fla runs on a GPU"),
                (DETERMINISTIC, "in deterministic mode use 'auto'"),
            )
        ),
        *(
            (
                kind,
                {},
                {"linear_num_key_heads": 3},
                "is not a multiple of num_key_heads=3",
            )
            for kind in ("kda", "gdn2")
        ),
    ],
)
def test_what_cannot_be_is_refused_in_words(kind, options, changes, said):
    with pytest.raises(ValueError, match=said):
        whole(kind, changes, **options)


def test_narrow_halves_that_ranks_cannot_share_are_refused():
    dims = whole("kda", forget_rank=6, output_rank=0).global_dims
    assert dims.shard(2).in_proj_layout.widths == (5, 5, 12, 3, 12, 2)
    with pytest.raises(ValueError, match="use one of 1, 2"):
        dims.shard(4)


# As Megatron's config is after --tensor-parallel-num-weight-shards 2.
GTP = {"tensor_parallel_num_weight_shards": 2, "gtp_weight_remat_size": 2}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"fp8": "hybrid"}, "KimiDeltaAttention under fp8"),
        ({"fp4": "e2m1"}, "the gates of KimiDeltaAttention"),
        (
            {"linear_allow_neg_eigval": True},
            "allow_neg_eigval to the GatedDeltaNet layers alone",
        ),
        ({"delay_wgrad_compute": True}, "the gradients of its gates' weights at once"),
        (
            GTP,
            "--tensor-parallel-num-weight-shards 2 .*sections of in_proj of KimiDelta",
        ),
    ],
)
def test_settings_that_other_layers_take_are_refused(changes, said):
    config = KDA_FP32.config()
    vars(config).update(changes)
    with pytest.raises(NotImplementedError, match=said):
        KDA_FP32.whole(config)


def test_what_it_does_not_read_is_named(log):
    config = KDA_FP32.config()
    vars(config).update(linear_something_new=3)
    KDA_FP32.whole(config)
    assert "KimiDeltaAttention: config.linear_something_new=3 has no effect" in log.text


def test_first_values_of_gdn2_are_those_of_megatrons_layer():
    config = GDN2_FP32.config(bf16=True, params_dtype=torch.bfloat16)
    mixer = GDN2_FP32.build(config, alone())
    assert mixer.A_log.dtype == mixer.dt_bias.dtype == torch.float32
    rates = mixer.A_log.exp()
    steps = F.softplus(mixer.dt_bias)
    assert rates.shape == (2,) and rates.min() >= 1 and rates.max() <= 16
    assert (
        steps.shape == (10,) and steps.min() * 1.001 >= 1e-3 and steps.max() <= 0.1001
    )
    assert list(dict(mixer.named_parameters())) == [
        "dt_bias",
        "A_log",
        "in_proj.weight",
        "conv1d.weight",
        "out_norm.weight",
        "out_proj.weight",
    ]


def test_auto_of_gdn2_takes_fla_on_a_gpu_unless_bits_must_repeat(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (8, 0))
    given = StateShape(2, 128, 128), torch.device("cuda"), torch.bfloat16
    assert type(choose_gdn2("auto", *given).rule) is FlaGDN2
    assert type(choose_gdn2("auto", *given, Bits.DETERMINISTIC).rule) is PlainGDN2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_16_bit_layer_gives_its_rule_log_decays_in_fp32(dtype, monkeypatch):
    """cuDNN computes 16-bit ones wrong, and `CudnnKDA` refuses them."""
    seen = []
    begin = PlainRule.begin

    def watch(rule, inputs, documents):
        seen.append(inputs.g.dtype)
        return begin(rule, inputs, documents)

    monkeypatch.setattr(PlainRule, "begin", watch)
    layer = whole("kda", {"params_dtype": dtype})
    layer(torch.randn(5, 1, layer.config.hidden_size, dtype=dtype), None)
    assert seen == [torch.float32]


@pytest.mark.parametrize("ratio", [1, 2, 3, 4])
def test_every_value_head_of_gdn2_gets_its_key_heads_tensors(ratio):
    """For fla, whose kernels have as many key heads as value heads."""
    inputs = random_inputs("usual", rows=1, tokens=3, G=2, H=2 * ratio)
    found = _repeat_key_heads(inputs)
    for name in ("q", "k", "g", "b"):
        given = getattr(inputs, name)
        repeated = getattr(found, name)
        assert repeated.shape == (1, 3, 2 * ratio, 5)
        for head in range(2 * ratio):
            assert torch.equal(repeated[:, :, head], given[:, :, head // ratio]), (
                name,
                head,
            )
    assert torch.equal(found.v, inputs.v) and torch.equal(found.w, inputs.w)
