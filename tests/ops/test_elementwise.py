"""An element's bits depend on the element alone, in values and gradients."""

import pytest
import torch
import torch.nn.functional as F

from megatron_gdn.ops.elementwise import sigmoid, silu, softplus

NAMES = {silu: F.silu, sigmoid: torch.sigmoid, softplus: F.softplus}


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def value_and_gradient(function, x):
    x = x.clone().requires_grad_()
    y = function(x)
    y.sum().backward()
    return y.detach(), x.grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("function", NAMES)
def test_bits_do_not_depend_on_where_an_element_stands(function, dtype):
    x = torch.randn(4096, generator=torch.Generator().manual_seed(0), dtype=dtype) * 4
    y, dx = value_and_gradient(function, x)
    assert torch.allclose(y, NAMES[function](x))
    for start, end in ((0, 1), (0, 31), (5, 82), (3, 4000), (63, 127)):
        part, d_part = value_and_gradient(function, x[start:end])
        assert torch.equal(part, y[start:end]) and torch.equal(d_part, dx[start:end])


@pytest.mark.parametrize("function", NAMES)
def test_shapes_and_strides_are_kept(function):
    x = torch.randn(3, 5, 7)
    assert torch.equal(function(x.mT), function(x).mT)
    assert function(x[:0]).shape == (0, 5, 7)
