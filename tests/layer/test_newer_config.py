"""What newer Megatrons' configs say about the layer: honoured, named in the log, or refused."""

import logging

import pytest
import torch
from megatron.core.transformer.spec_utils import build_module

from megatron_gdn.compat import observe
from megatron_gdn.specs import gated_delta_net_spec
from tests.parallel import make_config

pytestmark = pytest.mark.usefixtures("one_rank")


def build(**fields):
    """A layer under a config with these fields, which 0.19's constructor does not know."""
    config = make_config()
    vars(config).update(fields)
    return build_module(gated_delta_net_spec("local"), config, layer_number=1)


@pytest.fixture
def log(caplog):
    observe.log_once.cache_clear()
    caplog.set_level(logging.INFO)
    return caplog


def test_another_variant_is_refused_by_name():
    with pytest.raises(ValueError, match="'gdn2' asks for Gated DeltaNet 2.*GatedDeltaNet2"):
        build(experimental_attention_variant="gdn2")


def test_recomputing_the_whole_layer_switches_both_recomputations_on(log):
    one = build()
    layer = build(recompute_granularity="selective", recompute_modules=["gdn"])
    assert layer.recompute_norm_out and layer.recompute_qkv
    assert "in_proj's output is kept" in log.text
    layer.load_state_dict(one.state_dict())
    x = torch.randn(9, 1, 24)
    for each in (one, layer):
        each(x, None)[0].square().sum().backward()
    for name, parameter in layer.named_parameters():
        assert torch.equal(parameter.grad, one.get_parameter(name).grad), name


def test_fields_without_effect_are_named_once(log):
    for _ in range(2):
        build(gdn_pre_gated_delta_rule_fusion=True, gdn_conv_pad_alignment=64)
    assert log.text.count("gdn_pre_gated_delta_rule_fusion=True has no effect") == 1
    assert log.text.count("gdn_conv_pad_alignment=64 has no effect") == 1
    log.clear()
    build(gdn_pre_gated_delta_rule_fusion=False, gdn_conv_pad_alignment=None)
    assert "has no effect" not in log.text
