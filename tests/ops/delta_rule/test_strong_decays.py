"""A decay per channel that leaves nothing, and tokens that are not finite, in the chunk rule with
an erase key and a written value of their own."""

import pytest
import torch

from megatron_gdn.gdn2.rule import GDN2Inputs, PlainGDN2
from tests.gdn2.oracle import random_inputs, recurrent_gdn2

from .states import run_everything

STATES = (2, 4, 5, 7)


@pytest.mark.parametrize("decay", [100.0, 1e4])
def test_strong_decays_stay_finite_and_exact_in_fp32(decay):
    inputs = random_inputs("none", 2, 130)
    uneven = -decay * torch.rand(inputs.g.shape, dtype=torch.float64) ** 8
    narrow = GDN2Inputs(*(x.float() for x in inputs._replace(g=uneven)))
    d_o, (initial, d_final) = torch.randn_like(narrow.v), torch.randn(2, *STATES)
    found = run_everything(PlainGDN2(), narrow, d_o, None, initial, d_final)

    leaves = [x.double().requires_grad_() for x in (*narrow, initial)]
    o, final = recurrent_gdn2(GDN2Inputs(*leaves[:-1]), None, leaves[-1])
    *grads, d_initial = torch.autograd.grad((o, final), leaves, (d_o.double(), d_final.double()))
    exact = {"o": o, "final": final, "final by the map": final, "d_initial": d_initial}
    for name, expected in {**exact, **GDN2Inputs(*grads)._asdict()}.items():
        assert found[name].isfinite().all(), name
        assert (found[name] - expected).norm() <= 1e-5 * expected.norm(), name


def test_a_token_that_is_not_finite_reaches_no_earlier_output():
    inputs = random_inputs("usual", 1, 70)
    o = PlainGDN2().begin(inputs, None).run().o
    for name in ("k", "v", "g", "b", "w"):
        broken = getattr(inputs, name).clone()
        broken[0, 40, 0, 0] = float("nan")
        got = PlainGDN2().begin(inputs._replace(**{name: broken}), None).run().o
        heads = 4 // broken.shape[2]  # those that it belongs to
        assert torch.equal(got[:, :40], o[:, :40]), name
        assert got[:, 40:, :heads].isnan().all(), name
        assert torch.equal(got[:, 40:, heads:], o[:, 40:, heads:]), name
