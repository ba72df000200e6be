"""Write strengths up to 2: the transition I - beta k k^T then has eigenvalues down to -1."""

import pytest
import torch
from megatron.core.inference.contexts import StaticInferenceContext

from tests.distributed.layer_laws import build, randomise_
from tests.distributed.mixers import GDN, OLMO_HYBRID
from tests.layer.test_generation import CLOSE, run
from tests.layer.test_layer import require_its_equation
from tests.parallel import make_config

pytestmark = pytest.mark.usefixtures("one_rank")


def strong(config=None, **options):
    """A layer most of whose write strengths are above 1."""
    layer = build(config, **options)
    randomise_(layer)
    with torch.no_grad():
        beta = layer.dims.layout.columns("beta")
        layer.in_proj.weight[beta] *= 3
    return layer


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_the_layer_computes_its_equation(recompute):
    layer = strong(allow_neg_eigval=True, recompute=recompute)
    require_its_equation(layer, torch.randn(70, 2, 24))


def test_the_option_or_else_the_configs_field_decides():
    """The field has the name that OLMo Hybrid's config gives it; Megatron's has none."""
    config = make_config()
    assert not build(config).allow_neg_eigval
    config.linear_allow_neg_eigval = True
    assert build(config).allow_neg_eigval
    assert not build(config, allow_neg_eigval=False).allow_neg_eigval


def test_the_step_under_upstreams_name_gives_the_write_strength_of_the_forward():
    layers, (a, b) = [build(), build(allow_neg_eigval=True)], torch.randn(2, 2, 5, 8)
    usual, twice = (
        layer._compute_g_and_beta(layer.A_log, layer.dt_bias, a, b)[1] for layer in layers
    )
    assert torch.equal(twice, 2 * usual)


@pytest.mark.parametrize("mixers", [GDN, OLMO_HYBRID], ids=["", "olmo_hybrid"])
@pytest.mark.parametrize("parts", [(80,), (1, 79), (77, 1, 1, 1), (30, 40, 5, 5)])
def test_prefill_chunks_and_steps_give_the_training_forward(parts, mixers):
    layer = strong(mixers.config(), allow_neg_eigval=True).eval()
    x = torch.randn(80, 2, 24)
    with torch.no_grad():
        whole, _ = layer(x)
    found = run(layer, x, StaticInferenceContext(2, 200), parts)
    torch.testing.assert_close(found, whole, **CLOSE)
