"""Gated DeltaProduct on one rank: options, first values, what is refused, what is
computed again."""

import pytest
import torch
import torch.nn.functional as F

from megatron_gdn.gdp.layer import choose_gdp
from megatron_gdn.mixers.fp32_parameters import fill_A_log
from megatron_gdn.ops.delta_rule.base import HeadSizes
from megatron_gdn.ops.rules.steps import RuleOfSteps
from tests.distributed.mixers import GDP_FIELDS_OF_MAIN, GDP_FP32, whole
from tests.parallel import alone

pytestmark = pytest.mark.usefixtures("one_rank")


@pytest.mark.parametrize(
    ("options", "changes", "said"),
    [
        ({"rmsnorm": False}, {}, "rmsnorm=False, norm_before_gate=False: a Gated"),
        ({"norm_before_gate": True}, {}, "norm_before_gate=True: a GatedDeltaProduct"),
        ({"num_householder": 0}, {}, "num_householder=0 is not a size"),
        ({"A_init_range": (0, 0)}, {}, "0 <= low <= high"),
        ({"A_init_range": (-1, 2)}, {}, "0 <= low <= high"),
        ({"dt_min": 0.2}, {}, "dt_min=0.2, dt_max=0.1"),
        ({"backend": "cudnn"}, {}, "unknown backend 'cudnn' of Gated DeltaProduct"),
        ({"backend": "fla"}, {}, "fla runs on a GPU"),
        ({}, {"mamba_num_heads": None}, "Set --mamba-num-heads"),
        ({}, {"mamba_num_groups": 3}, "not a multiple of num_groups=3"),
    ],
)
def test_what_cannot_be_is_refused_in_words(options, changes, said):
    with pytest.raises(ValueError, match=said):
        whole("gdp", changes, **options)


def test_its_number_of_updates_is_the_configs_or_megatrons_three():
    config = GDP_FP32.config()
    assert GDP_FP32.build(config, alone(), num_householder=None).num_householder == 3
    config.gdp_num_householder = 4
    layer = GDP_FP32.build(config, alone(), num_householder=None)
    assert layer.num_householder == layer.dims.num_householder == 4
    assert GDP_FP32.build(config, alone(), num_householder=1).num_householder == 1


def test_first_values_are_those_of_megatrons_layer():
    config = GDP_FP32.config(bf16=True, params_dtype=torch.bfloat16)
    torch.manual_seed(0)
    mixer = GDP_FP32.build(config, alone())
    assert mixer.A_log.dtype == mixer.dt_bias.dtype == torch.float32
    rates = mixer.A_log.exp()
    steps = F.softplus(mixer.dt_bias)
    assert rates.shape == (8,) and rates.min() > 0 and rates.max() <= 16
    assert steps.shape == (8,) and steps.min() * 1.001 >= 1e-3 and steps.max() <= 0.1001
    assert torch.equal(mixer.norm.weight, torch.ones_like(mixer.norm.weight))
    assert list(dict(mixer.named_parameters())) == [
        "dt_bias",
        "A_log",
        "in_proj.weight",
        "conv1d.weight",
        "norm.weight",
        "out_proj.weight",
    ]


def test_a_rate_drawn_as_zero_is_no_infinite_parameter(monkeypatch):
    mixer = GDP_FP32.build(GDP_FP32.config(), alone())
    monkeypatch.setattr(torch.Tensor, "uniform_", lambda x, *_: x.zero_())
    A_log = torch.empty(3)
    fill_A_log(mixer, A_log)
    assert A_log.isfinite().all() and A_log.max() < -10


def test_parts_that_megatron_names_are_computed_again(log):
    config = GDP_FP32.config(recompute_granularity="selective")
    for modules, parts in (
        (["gdp_qkv"], (True, False)),
        (["gdp_in_proj", "core_attn"], (False, True)),
        (["gdn"], (False, False)),
    ):
        config.recompute_modules = modules
        layer = GDP_FP32.build(config, alone())
        assert (layer.recompute_qkv, layer.recompute_layer) == parts, modules
    assert "has no effect" not in log.text


def test_fields_of_newer_configs_are_read_or_named(log):
    config = GDP_FP32.config()
    vars(config).update(GDP_FIELDS_OF_MAIN, gdp_something_new=3)
    config.fine_grained_activation_offloading = True
    config.offload_modules = ["gdp_qkv"]
    GDP_FP32.build(config, alone())
    assert "GatedDeltaProduct: config.gdp_cutedsl_kernel=True has no effect" in log.text
    assert "GatedDeltaProduct: config.gdp_something_new=3 has no effect" in log.text
    assert "--offload-modules gdp_qkv has no effect" in log.text


def test_its_rule_is_one_of_a_gated_deltanet_over_rows():
    sizes = HeadSizes(2, 4, 16, 16)
    rule, reason = choose_gdp("reference", sizes, 4, torch.device("cpu"), torch.float32)
    assert type(rule) is RuleOfSteps and rule.steps == 4
    assert rule.name == "reference" and reason == "requested"


@pytest.mark.parametrize("kind", ["gdp", "mamba2"])
def test_sizes_have_the_names_that_megatrons_mixer_gives_them(kind):
    mixer = whole(kind)
    heads, groups = mixer.config.mamba_num_heads, mixer.config.mamba_num_groups
    assert mixer.nheads == mixer.nheads_local_tp == heads
    assert mixer.ngroups == mixer.ngroups_local_tp == groups
    channels = heads * mixer.config.mamba_head_dim
    assert mixer.d_inner == mixer.d_inner_local_tp == channels
