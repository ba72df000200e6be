"""One option says what a backward computes again; Megatron's setting maps onto its
parts."""

from __future__ import annotations

import pytest
import torch

from megatron_gdn.mixers.options import RECOMPUTE_LEVELS
from tests.distributed.layer_laws import build, forward_backward, require_same_bits
from tests.distributed.mixers import BY_NAME
from tests.ops.test_second_run import saved_bytes
from tests.parallel import alone, make_config

pytestmark = pytest.mark.usefixtures("one_rank")


def build_with(modules=(), **options):
    config = make_config()
    if modules:
        config.recompute_granularity = "selective"
        config.recompute_modules = [*modules]
    return build(config, **options)


def parts_of(layer) -> set[str]:
    names = ("layer", "qkv", "norm_out", "rule")
    return {name for name in names if getattr(layer, f"recompute_{name}")}


LIGHT = {"qkv", "norm_out"}
FULL = {"qkv", "norm_out", "rule"}
ASKED = {
    "nothing": ({}, (), set()),
    "none": ({"recompute": "none"}, (), set()),
    "light": ({"recompute": "light"}, (), LIGHT),
    "full": ({"recompute": "full"}, (), FULL),
    "core_attn": ({"recompute": "none"}, ("core_attn",), set()),
    "gdn_norm_out": ({}, ("gdn_norm_out",), {"norm_out"}),
    "gdn_norm_out and light": ({"recompute": "light"}, ("gdn_norm_out",), LIGHT),
    "gdn_norm_out and full": ({"recompute": "full"}, ("gdn_norm_out",), FULL),
    "gdn": ({}, ("gdn",), {"layer"}),
    "gdn and full": ({"recompute": "full"}, ("gdn",), {"layer"}),
}


@pytest.mark.parametrize("case", ASKED)
def test_every_way_to_ask_maps_onto_the_same_parts(case):
    options, modules, parts = ASKED[case]
    assert parts_of(build_with(modules, **options)) == parts


# Of each name of `--recompute-modules` the part, and the mixers that have it.
MODULES = {
    "gdn": ("layer", ("gdn", "gdn2", "kda")),
    "gdn_norm_out": ("norm_out", ("gdn", "gdn2", "kda")),
    "gdp_in_proj": ("layer", ("gdp",)),
    "gdp_qkv": ("qkv", ("gdp",)),
}


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("kind", BY_NAME)
def test_a_name_of_megatron_reaches_the_mixers_that_have_its_part(kind, name, log):
    """The layers of a hybrid model share the names: a Mamba2 has no such part."""
    config = BY_NAME[kind].config(recompute_granularity="selective")
    config.recompute_modules = [name]
    part, mixers = MODULES[name]
    found = parts_of(BY_NAME[kind].build(config, alone()))
    assert found == ({part} if kind in mixers else set())
    assert "has no effect" not in log.text


REFUSED = {
    "level": (
        {"recompute": "some"},
        (),
        "recompute='some' is not known; use one of 'none', 'li",
    ),
    "modules": (
        {"recompute": "none"},
        ("gdn_norm_out",),
        "recompute='none' and --recompute-modules gdn_norm_out contradict",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_settings_that_contradict_are_refused_by_name(case):
    options, modules, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        build_with(modules, **options)


def test_no_level_changes_a_bit_of_the_plain_rule_and_each_keeps_less():
    x = torch.randn(64, 2, 24)
    one = build()
    kept = {}
    expected = forward_backward(one, x)
    for level in RECOMPUTE_LEVELS:
        layer = build(recompute=level)
        layer.load_state_dict(one.state_dict())
        require_same_bits(forward_backward(layer, x), expected, level)
        leaf = x.clone().requires_grad_()
        kept[level] = saved_bytes(lambda layer=layer, leaf=leaf: layer(leaf, None)[0])
    # Under hooks nothing is dropped after the forward, so the normed output counts in
    # each.
    tokens = x.shape[0] * x.shape[1]
    sizes = one.dims.heads
    key, value = sizes.layout.widths[1:3]
    assert kept["none"] - kept["light"] == tokens * (key + value) * 4
    of_rule = value + 2 * sizes.value_heads  # the output, the log-decay and beta
    assert kept["light"] - kept["full"] == tokens * of_rule * 4


@pytest.mark.parametrize("level", RECOMPUTE_LEVELS)
def test_evaluation_and_no_tokens_work_at_every_level(level):
    layer = build(recompute=level)
    x = torch.randn(0, 2, 24, requires_grad=True)
    layer(x, None)[0].sum().backward()
    assert x.grad.shape == x.shape
    x = torch.randn(9, 1, 24)
    trained = layer(x, None)[0]
    assert torch.equal(layer.eval()(x, None)[0], trained)
