"""What a layer in FP8 refuses, and what it computes again."""

import pytest
import torch
from megatron.core.enums import Fp8Recipe
from megatron.core.tensor_parallel.layers import RowParallelLinear
from megatron.core.transformer.spec_utils import build_module

from megatron_gdn.specs import gated_delta_net_spec
from tests.fp8_twin import Fp8Column, fp8_on
from tests.parallel import make_config

pytestmark = pytest.mark.usefixtures("one_rank")


class Row(RowParallelLinear):
    """With the attributes of ``TERowParallelLinear``."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.fp8_meta, self.save_original_input = {}, False


def layer_of(recipe="tensorwise", settings=(), **options):
    config = make_config(fp8="hybrid", fp8_recipe=Fp8Recipe[recipe])
    vars(config).update(settings)
    spec = gated_delta_net_spec("local", **options)
    spec.submodules.in_proj, spec.submodules.out_proj = Fp8Column, Row
    return build_module(spec, config, layer_number=1)


@pytest.mark.parametrize(("recipe", "drops"), [("tensorwise", True), ("delayed", False)])
def test_out_proj_keeps_the_input_that_is_computed_again(recipe, drops):
    """Else it would keep an FP8 copy, and nobody would read what was computed again."""
    layer = layer_of(recipe, recompute="light")
    assert layer.recompute_norm_out == layer.out_proj.save_original_input == drops
    assert not layer_of(recipe).out_proj.save_original_input


def test_delayed_weight_gradients_are_refused():
    with pytest.raises(NotImplementedError, match="delay_wgrad_compute with FP8: .* Switch one"):
        layer_of(settings={"delay_wgrad_compute": True})


def test_megatron_fsdp_is_refused_before_it_loses_a_gradient():
    layer = layer_of()
    layer.in_proj.weight.__fsdp_param__ = True
    with fp8_on(), pytest.raises(NotImplementedError, match="FP8 under Megatron-FSDP: .* or keep"):
        layer(torch.randn(16, 1, 24))


def test_a_copied_layer_computes_the_same():
    import copy

    layer = layer_of()
    x = torch.randn(16, 1, 24)
    with fp8_on():
        assert torch.equal(copy.deepcopy(layer)(x)[0], layer(x)[0])


def test_a_checkpoint_of_the_whole_layer_is_refused():
    """Megatron's checkpoint runs it again outside of its FP8 context."""
    settings = {"recompute_granularity": "selective", "recompute_modules": ["gdn"]}
    with pytest.raises(NotImplementedError, match="gdn with fp8: .* Take 'gdn' out"):
        layer_of(settings=settings)


def test_fp4_is_refused():
    with pytest.raises(NotImplementedError, match="fp4='e2m1': the gates of GatedDeltaNet"):
        layer_of(settings={"fp8": None, "fp4": "e2m1"})


def test_tokens_that_were_padded_for_fp8_leave_no_gates_behind():
    """Megatron's padding for inference crops the first tensor of a linear alone."""
    layer = layer_of()
    x = torch.randn(12, 2, 24)
    with fp8_on():
        expected, _ = layer(x)
        rows, gates = layer.in_proj(x, together=False)
        longer = torch.cat([gates, torch.ones(4, *gates.shape[1:])])
        layer.in_proj.forward = lambda *_, **__: (rows, longer)
        assert torch.equal(layer(x)[0], expected)
