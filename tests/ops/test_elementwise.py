"""Elementwise functions, norms and gates: their equations, and bits of an element
alone."""

import pytest
import torch
import torch.nn.functional as F

from megatron_gdn.ops import l2norm, rms_norm
from megatron_gdn.ops.elementwise import (
    largest_A_log,
    least_log_decay,
    sigmoid,
    silu,
    softplus,
)

NAMES = {silu: F.silu, sigmoid: torch.sigmoid, softplus: F.softplus}


@pytest.fixture
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
def test_bits_do_not_depend_on_where_an_element_stands(one_thread, function, dtype):
    x = torch.randn(4096, generator=torch.Generator().manual_seed(0), dtype=dtype) * 4
    y, dx = value_and_gradient(function, x)
    assert torch.allclose(y, NAMES[function](x))
    for start, end in ((0, 1), (0, 31), (5, 82), (3, 4000), (63, 127)):
        part, d_part = value_and_gradient(function, x[start:end])
        assert torch.equal(part, y[start:end]) and torch.equal(d_part, dx[start:end])


@pytest.mark.parametrize("function", NAMES)
def test_shapes_and_strides_are_kept(one_thread, function):
    x = torch.randn(3, 5, 7)
    assert torch.equal(function(x.mT), function(x).mT)
    assert function(x[:0]).shape == (0, 5, 7)


def test_l2norm_gives_unit_rows_and_finite_gradients_for_zero_rows():
    x = torch.randn(3, 5, 8, dtype=torch.float64)
    x[0, 0] = 0
    x.requires_grad_()
    y = l2norm(x)
    torch.testing.assert_close(
        y[1].norm(dim=-1), torch.ones(5, dtype=torch.float64), atol=1e-5, rtol=0
    )
    y.sum().backward()
    assert torch.equal(y[0, 0], torch.zeros(8, dtype=torch.float64))
    assert torch.isfinite(x.grad).all()


def test_rms_norm_equals_torchs_with_both_forms_of_gamma():
    x = torch.randn(3, 8, dtype=torch.float64)
    weight = torch.randn(8, dtype=torch.float64)
    torch.testing.assert_close(
        rms_norm(x, weight, 1e-5), F.rms_norm(x, (8,), weight, 1e-5)
    )
    torch.testing.assert_close(
        rms_norm(x, weight, 1e-5, zero_centered=True),
        F.rms_norm(x, (8,), 1 + weight, 1e-5),
    )


@pytest.mark.parametrize(
    ("dtype", "limits"), [(torch.float32, (-104, 66)), (torch.float64, (-746, 532))]
)
def test_gates_are_clamped_to_the_numbers_that_are_said(dtype, limits):
    assert (least_log_decay(dtype), largest_A_log(dtype)) == limits
