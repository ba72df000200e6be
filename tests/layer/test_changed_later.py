"""What is changed on a built layer counts from its next forward, or is refused by
name."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

from megatron_gdn.ops.rules.base import Bits
from tests.distributed.mixers import whole
from tests.parallel import assert_close

pytestmark = pytest.mark.usefixtures("one_rank")


of_both = pytest.mark.parametrize("kind", ["gdn", "mamba2"])


def rows(layer) -> torch.Tensor:
    return torch.randn(70, 2, layer.config.hidden_size)  # more than a step of 64 tokens


def set_field(layer):
    layer.config.batch_invariant_mode = True


def replace_config(layer):
    layer.config = copy.copy(layer.config)
    layer.config.batch_invariant_mode = True


@of_both
@pytest.mark.parametrize("change", [set_field, replace_config])
def test_a_config_in_batch_invariant_mode_counts(kind, change):
    layer = whole(kind)
    of_the_mode = whole(kind, {"batch_invariant_mode": True})
    x = rows(layer)
    layer(x)
    assert layer.rule.bits is not Bits.ON_GRID
    change(layer)
    invariant, _ = layer(x)
    assert layer.rule.bits is Bits.ON_GRID
    window = of_the_mode.mamba_state_shapes_per_request()
    assert layer.mamba_state_shapes_per_request() == window
    assert torch.equal(invariant, of_the_mode(x)[0])


def test_a_config_in_deterministic_mode_counts():
    layer = whole("gdn")
    modes = []
    choose = layer.micro_batches._choose_rule

    def watched(bits, **options):
        modes.append(bits)
        return choose(bits=bits, **options)

    layer.micro_batches._choose_rule = watched
    layer.config = copy.copy(layer.config)
    layer.config.deterministic_mode = True
    layer(rows(layer))
    assert modes == [True]


@of_both
def test_an_unknown_layout_is_refused_and_the_old_one_stays(kind):
    layer = whole(kind)
    with pytest.raises(ValueError, match="unknown context-parallel layout 'zigzg'"):
        layer.cp_layout = "zigzg"
    assert layer.cp_layout == "auto"


@of_both
@pytest.mark.parametrize("name", ["act_fn", "activation"])
def test_the_activation_is_silu_and_cannot_be_set(kind, name):
    if kind == "mamba2" and name == "act_fn":
        pytest.skip("Megatron's MambaMixer has no such name")
    with pytest.raises(AttributeError, match=name):
        setattr(whole(kind), name, F.gelu)


class Doubled(nn.Conv1d):
    def forward(self, x):
        return 2 * super().forward(x)


class Wrapped(nn.Module):
    """As an adapter wraps a module: its weight is the module's."""

    def __init__(self, module):
        super().__init__()
        self.base_layer = module
        self.bias = module.bias

    @property
    def weight(self):
        return self.base_layer.weight

    def forward(self, x):
        return 2 * self.base_layer(x)


def replace_class(layer):
    layer.conv1d.__class__ = Doubled


def replace_forward(layer):
    forward = layer.conv1d.forward
    layer.conv1d.forward = lambda x: 2 * forward(x)


def wrap(layer):
    layer.conv1d = Wrapped(layer.conv1d)


def dilate(layer):
    layer.conv1d.dilation = (2,)


def stretch(layer):
    layer.conv1d.dilation = layer.conv1d.stride = (2,)


@pytest.mark.parametrize(
    "change", [replace_class, replace_forward, wrap, dilate, stretch]
)
def test_a_convolution_that_computes_something_else_is_refused(change):
    layer = whole("gdn")
    layer(rows(layer))
    change(layer)
    with pytest.raises(NotImplementedError, match=r"conv1d is a .* reads the weight"):
        layer(rows(layer))


def test_accelerates_forward_and_a_parametrised_weight_are_let_through():
    layer = whole("gdn")
    layer.conv1d.forward = layer.conv1d.forward
    layer.conv1d._hf_hook = "moves inputs"
    x = rows(layer)
    plain, _ = layer(x)
    nn.utils.parametrize.register_parametrization(layer.conv1d, "weight", nn.Identity())
    assert torch.equal(layer(x)[0], plain)


def test_a_convolution_patched_for_all_instances_is_refused(monkeypatch):
    layer = whole("gdn")
    forward = nn.Conv1d.forward
    monkeypatch.setattr(nn.Conv1d, "forward", lambda self, x: 2 * forward(self, x))
    with pytest.raises(NotImplementedError, match=r"conv1d is a .* reads the weight"):
        layer(rows(layer))


@of_both
def test_torchs_hooks_of_all_modules_see_the_norm(kind):
    plain = whole(kind)
    layer = whole(kind)
    norm = layer.out_norm if kind == "gdn" else layer.norm
    x = rows(layer)
    hook = register_module_forward_hook(
        lambda module, args, y: 2 * y if module is norm else None
    )
    try:
        doubled, _ = layer(x)
    finally:
        hook.remove()
    assert_close("output", doubled, 2 * plain(x)[0], 1e-6)
    assert torch.equal(layer(x)[0], plain(x)[0])


@of_both
def test_a_copy_of_a_layer_follows_its_own_config_and_layout(kind):
    layer = whole(kind)
    other = copy.deepcopy(layer)
    set_field(other)
    other.cp_layout = "contiguous"
    for one in (layer, other):
        one(rows(layer))
        assert one.micro_batches._loader_layout is one.loader_layout
    assert other.rule.bits is Bits.ON_GRID and layer.rule.bits is not Bits.ON_GRID
    assert (layer.cp_layout, other.cp_layout) == ("auto", "contiguous")
