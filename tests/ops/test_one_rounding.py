"""Plain stages of bf16 rows compute in fp32, so each result is that of fp64, rounded
once; and it lies in memory as kernels read it."""

import pytest
import torch

from megatron_gdn.ops import causal_conv1d, l2norm, rms_norm
from megatron_gdn.ops.readout.base import grouped_rms_norm
from tests.inference.row_mixers import KINDS

BF16 = torch.bfloat16
each_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)


def require_one_rounding(found, exact):
    """Half a unit of the last place, and some roundings of fp32."""
    assert exact.dtype == torch.float64
    rtol = 2e-5 + (2**-8 if found.dtype == BF16 else 0)
    torch.testing.assert_close(found.double(), exact, rtol=rtol, atol=2e-5)


def random(seed, *shape):
    made = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=made).to(BF16)


@each_kind
def test_a_front_rounds_its_inputs_and_gradients_once(kind):
    made = []
    grads = None
    for dtype in (BF16, torch.float64):
        rows = kind.rows(9, 2, BF16).to(dtype)
        parameters = kind.draw(BF16)
        if dtype == torch.float64:
            parameters = parameters.to(dtype)
        front = kind.make(rows, parameters, kind.rule(False)).front
        inputs = front.forward(rows, parameters.own, None)
        of_tokens = inputs if front.table.shared_input is None else inputs[:-1]
        assert all(x.is_contiguous() for x in of_tokens)
        if grads is None:
            grads = [random(n, *x.shape).to(x.dtype) for n, x in enumerate(inputs)]
        else:
            grads = [x.double() for x in grads]
        d_rows = torch.zeros_like(rows)
        found = front.backward(rows, parameters.own, type(inputs)(*grads), d_rows, None)
        made.append([*inputs, d_rows, *found])
    for found, exact in zip(*made, strict=True):
        require_one_rounding(found, exact)


@each_kind
def test_a_readout_rounds_its_rows_and_gradients_once(kind):
    made = []
    for dtype in (BF16, torch.float64):
        rows = kind.rows(9, 2, BF16).to(dtype)
        parameters = kind.draw(BF16)
        if dtype == torch.float64:
            parameters = parameters.to(dtype)
        mixer = kind.make(rows, parameters, kind.rule(False))
        state = mixer.front.table.state_shape
        o = random(1, 2, 9, state.heads, state.columns).to(dtype)
        gamma = parameters.norm.gamma
        out = mixer.readout.forward(o, rows, gamma)
        d_rows = torch.zeros_like(rows)
        d_out = random(2, *out.shape).to(dtype)
        found = mixer.readout.backward(d_out, o, rows, gamma, d_rows)
        assert out.is_contiguous() and found[0].is_contiguous()
        made.append([out, d_rows, *found])
    for found, exact in zip(*made, strict=True):
        require_one_rounding(found, exact)


@each_kind
def test_states_and_maps_lie_in_memory_as_kernels_read_them(kind):
    rows = kind.rows(70, 2)
    parameters = kind.draw(torch.float32)
    rule = kind.rule(False)
    front = kind.make(rows, parameters, rule).front
    inputs = front.forward(rows, parameters.own, None)
    tensors = [*rule.begin(inputs, None).state_map()]
    o, final, saved = rule.begin(inputs, None).run(final=True)
    backward = rule.begin_backward(torch.ones_like(o), inputs, saved, None)
    tensors += [final, backward.d_initial()]
    assert all(x.is_contiguous() for x in tensors)


@pytest.mark.parametrize(
    "function",
    [
        l2norm,
        lambda x: rms_norm(x, torch.full((6,), 0.75, dtype=x.dtype)),
        # 1 + weight would be 1 in bf16
        lambda x: rms_norm(x, x.new_full((6,), 2**-8), zero_centered=True),
        lambda x: grouped_rms_norm(x, torch.full((6,), 0.75, dtype=x.dtype), 2, 1e-6),
        lambda x: causal_conv1d(x, torch.full((6, 4), 0.25, dtype=x.dtype))[0],
    ],
    ids=["l2norm", "rms_norm", "zero-centred", "grouped_rms_norm", "causal_conv1d"],
)
def test_a_function_rounds_once(function):
    x = random(3, 2, 9, 6)
    found = []
    for dtype in (BF16, torch.float64):
        leaf = x.to(dtype).requires_grad_()
        y = function(leaf)
        (d_x,) = torch.autograd.grad(y, leaf, random(4, *y.shape).to(dtype))
        found.append((y.detach(), d_x))
    for narrow, wide in zip(*found, strict=True):
        require_one_rounding(narrow, wide)
