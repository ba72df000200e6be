"""The few columns behind a norm, kernels against the plain twin in fp64, twin against autograd."""

import pytest
import torch

from megatron_gdn.ops import gate_product
from megatron_gdn.ops import gate_product_triton as kernels

from .kernel_cases import assert_close

EPS = 1e-5
CASES = {"1x8x2": (1, 8, 2), "65x40x6": (65, 40, 6), "130x200x18": (130, 200, 18)}


def case(name: str, device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    T, D, P = CASES[name]
    make = torch.Generator().manual_seed(3)
    shapes = (T, D), (P, D), (T, P)
    x, factor, d_y = (torch.randn(*shape, generator=make).to(device) for shape in shapes)
    return 3 * x, factor, d_y


@pytest.mark.parametrize("normed", [True, False], ids=["norm", "bare"])
@pytest.mark.parametrize("name", CASES)
def test_both_directions_equal_the_twin(name, normed, device):
    x, factor, d_y = case(name, device)
    y, r = kernels.forward(x, factor, EPS, normed)
    exact = gate_product.forward(x.double(), factor.double(), EPS, normed)
    assert_close("y", y, exact[0])
    assert (r is None) == (not normed)
    if r is not None:
        assert_close("r", r, exact[1])
    found = kernels.backward(x, factor, d_y, y, r)
    twin = gate_product.backward(
        x.double(), factor.double(), d_y.double(), *(exact if normed else (exact[0], None))
    )
    assert_close("d_x", found[0], twin[0])
    assert_close("outer", found[1], twin[1])


@pytest.mark.parametrize("normed", [True, False], ids=["norm", "bare"])
def test_the_twins_gradients_are_autograds(normed):
    x, factor, d_y = (one.double() for one in case("65x40x6", "cpu"))
    leaf, weight = x.clone().requires_grad_(), factor.clone().requires_grad_()
    rows = torch.nn.functional.rms_norm(leaf, leaf.shape[-1:], eps=EPS) if normed else leaf
    (rows @ weight.t()).backward(d_y)
    y, r = gate_product.forward(x, factor, EPS, normed)
    d_x, outer = gate_product.backward(x, factor, d_y, y, r)
    torch.testing.assert_close(d_x, leaf.grad)
    torch.testing.assert_close(outer, weight.grad)


def test_no_tokens_give_no_rows(device):
    x, factor = torch.empty(0, 16, device=device), torch.ones(4, 16, device=device)
    y, r = kernels.forward(x, factor, EPS, True)
    d_x, outer = kernels.backward(x, factor, y, y, r)
    assert y.shape == (0, 4) and d_x.shape == (0, 16) and not outer.any()
