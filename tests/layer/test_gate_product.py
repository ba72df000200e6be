"""The gates' product beside a linear: every gradient, and where the linear's is added
to."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_gdn.mixers.gate_product import GateProduct, SplitRows
from tests.parallel import group_of_one

pytestmark = pytest.mark.usefixtures("one_rank")

S = 7
B = 3
D = 13
GATES = 5
MAIN = 11
EPS = 1e-3


def drawn(dtype):
    torch.manual_seed(3)
    shapes = {"x": (S, B, D), "gates": (GATES, D), "main": (MAIN, D), "gamma": (D,)}
    return {n: torch.randn(s, dtype=torch.float64).to(dtype) for n, s in shapes.items()}


def gradients(tensors, normed, frozen=(), split=True, read=("gates", "main")):
    """Of those products of ``x`` that are ``read``; ``split``: as FP8 computes them."""
    leaves = {n: t.clone().requires_grad_(n not in frozen) for n, t in tensors.items()}
    x = leaves["x"]
    gamma = leaves["gamma"] if normed else None

    def normalised(rows):
        return F.rms_norm(rows, (D,), gamma, EPS) if normed else rows

    if split:
        gates, handed = GateProduct.apply(
            x, leaves["gates"], gamma, EPS, group_of_one(), False
        )
        assert handed.requires_grad == x.requires_grad
        assert handed.data_ptr() == x.data_ptr()
    else:
        gates = normalised(x) @ leaves["gates"].t()
        handed = x
    made = {"gates": gates, "main": normalised(handed) @ leaves["main"].t()}
    products = [made[name] for name in read]
    torch.manual_seed(4)
    weights = [torch.randn(t.shape, dtype=torch.float64).to(t.dtype) for t in products]
    torch.autograd.backward(products, weights)
    return {n: leaf.grad for n, leaf in leaves.items() if leaf.grad is not None}


@pytest.mark.parametrize("read", [("gates", "main"), ("gates",), ("main",)], ids=str)
@pytest.mark.parametrize("frozen", ["", "x", "gates", "main"])
@pytest.mark.parametrize("normed", [False, True], ids=["linear", "norm+linear"])
def test_gradients_are_those_of_two_products(normed, frozen, read):
    """In fp64, whose rounding of sums of 13 products is below 1e-14."""
    tensors = drawn(torch.float64)
    found = gradients(tensors, normed, frozen, read=read)
    exact = gradients(tensors, normed, frozen, split=False, read=read)
    assert exact
    assert found.keys() == exact.keys()
    for name, gradient in exact.items():
        torch.testing.assert_close(
            found[name], gradient, rtol=1e-12, atol=1e-12, msg=name
        )


@pytest.mark.parametrize("normed", [False, True], ids=["linear", "norm+linear"])
def test_a_bf16_gradient_of_the_input_is_rounded_three_times_at_most(normed):
    """By the linear, and by each of two sums; the second of these has another factor
    rounded."""
    tensors = drawn(torch.bfloat16)
    found = gradients(tensors, normed)["x"].double()
    exact = gradients({n: t.double() for n, t in tensors.items()}, normed, split=False)[
        "x"
    ]
    # In the norm's backward of the linear as many roundings again, of terms as large as
    # the sum.
    assert (found - exact).norm() < 6 * 2.0**-9 * exact.norm()


@pytest.mark.parametrize(
    ("of_gates", "of_linear"), [(True, False), (False, True), (True, True)]
)
def test_what_nobody_reads_has_no_part_in_the_gradient(of_gates, of_linear):
    """The linear's gradient is an expanded one, which is not written."""
    tensors = drawn(torch.float64)
    x = tensors["x"].requires_grad_()
    weight = tensors["gates"].requires_grad_()
    gates, handed = GateProduct.apply(x, weight, None, EPS, group_of_one(), False)
    read = [
        part for part, is_read in ((gates, of_gates), (handed, of_linear)) if is_read
    ]
    sum(part.sum() for part in read).backward()
    expected = of_gates * weight.detach().sum(0) + of_linear
    torch.testing.assert_close(x.grad, expected.expand_as(x))
    assert (weight.grad is not None) == of_gates


class Made(TorchDispatchMode):
    """Counts the tensors of these sizes (by default [T, D]) that operators return and
    did not get."""

    def __init__(self, *sizes):
        super().__init__()
        self.sizes = sizes or (S * B * D,)
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.numel() in self.sizes:
            given = [
                a.untyped_storage().data_ptr()
                for a in args
                if isinstance(a, torch.Tensor)
            ]
            self.count += out.untyped_storage().data_ptr() not in given
        return out


class Gives(torch.autograd.Function):
    """A linear whose gradient of its input is ``gradient``."""

    @staticmethod
    def forward(ctx, x, gradient):
        ctx.gradient = gradient
        return x.new_zeros(())

    @staticmethod
    def backward(ctx, d_y):
        return ctx.gradient, None


def test_the_gates_share_is_added_where_the_linears_gradient_lies():
    tensors = drawn(torch.float32)
    x = tensors["x"].requires_grad_()
    gamma = tensors["gamma"]
    gates, handed = GateProduct.apply(
        x, tensors["gates"], gamma, EPS, group_of_one(), False
    )
    of_linear = torch.randn(S, B, D)
    losses = [gates, Gives.apply(handed, of_linear)]
    weights = [torch.randn(S, B, GATES), x.sum()]
    before = of_linear.clone()
    with Made() as made:
        (d_x,) = torch.autograd.grad(losses, x, [weight.detach() for weight in weights])
    assert made.count == 0
    assert d_x.data_ptr() == of_linear.data_ptr() and not torch.equal(d_x, before)


def test_no_gradient_is_made_of_rows_whose_products_add_theirs_elsewhere():
    weight = torch.randn(GATES + MAIN, D, requires_grad=True)
    views = SplitRows.apply(weight, (MAIN,), True)
    losses = [Gives.apply(view, None) for view in views]
    with Made(GATES * D, MAIN * D, weight.numel()) as made:
        torch.autograd.backward(losses)
    assert made.count == 0 and weight.grad is None


@pytest.mark.parametrize("read", [0, 1, 2])
def test_rows_that_nobody_reads_have_the_gradient_zero(read):
    weight = torch.randn(GATES + MAIN, D, requires_grad=True)
    views = SplitRows.apply(weight, (2, GATES), False)
    rows = slice(*((0, 2, GATES, None)[read : read + 2]))
    expected = torch.zeros(weight.shape)
    expected[rows] = torch.randn(expected[rows].shape)
    views[read].backward(expected[rows])
    assert torch.equal(weight.grad, expected)


@pytest.mark.parametrize("zeros", [False, True])
def test_megatron_is_told_of_gradients_that_lie_elsewhere(zeros):
    """It asks for a gradient that nobody reads, of zeros or of anything."""
    weight = torch.randn(GATES + MAIN, D, requires_grad=True)
    vars(weight).update(grad_added_to_main_grad=False, zero_out_wgrad=zeros)
    views = SplitRows.apply(weight, (MAIN,), True)
    torch.autograd.backward([Gives.apply(view, None) for view in views])
    assert weight.grad_added_to_main_grad
    # new memory holds NaN in these tests
    assert (weight.grad == 0).all() if zeros else weight.grad.isnan().all()
