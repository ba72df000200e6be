"""Decays of exactly 0, and numbers that are not finite, in the gates and the chunk rule."""

import pytest
import torch

from megatron_gdn.ops import (
    decay_and_write_gates,
    recurrent_gated_delta_rule,
    torch_chunk_gated_delta_rule,
)
from megatron_gdn.ops.elementwise import least_log_decay
from tests.ops.delta_rule.test_gated_delta_rule import (
    FP32,
    assert_agree,
    carried,
    make_inputs,
    outputs_and_gradients,
)

BOTH = [torch.float32, torch.float64]


@pytest.mark.parametrize("dtype", BOTH)
@pytest.mark.parametrize("g", [float("-inf"), -1e30, -1e4])
def test_log_decays_without_end_agree_with_the_recurrence(g, dtype):
    """Alone, in a row, at both ends of a chunk, and one head that forgets everything."""
    inputs = [x.float() for x in make_inputs(1, 150, 2, 4, 16, 8, 1.0)]
    inputs[3][:, [0, 5, 6, 7, 63, 64, 100, 149]] = g
    inputs[3][:, :, 2] = g
    expected = outputs_and_gradients(recurrent_gated_delta_rule, [x.double() for x in inputs])
    actual = outputs_and_gradients(torch_chunk_gated_delta_rule, [x.to(dtype) for x in inputs])
    assert_agree(actual, expected, FP32)
    assert (actual["dg"][inputs[3] == g] == 0).all()


@pytest.mark.parametrize("dtype", BOTH)
def test_the_bound_on_log_decays_is_where_the_decay_vanishes(dtype):
    bound = torch.tensor(least_log_decay(dtype), dtype=dtype)
    assert bound.exp() == 0 and (bound + 1).exp() > 0
    assert (bound * 64).isfinite()


@pytest.mark.parametrize("dtype", BOTH)
@pytest.mark.parametrize("A_log", [89.0, 710.0, 1e30])
def test_any_decay_rate_gives_finite_gates_and_gradients(A_log, dtype):
    alpha = torch.tensor([[-200.0, -1000.0], [0.0, 3.0], [3e38, -3e38]], dtype=dtype)
    A_log, dt_bias = torch.full((2,), A_log, dtype=dtype), torch.ones(2, dtype=dtype)
    leaves = [x.requires_grad_() for x in (alpha, torch.zeros_like(alpha), A_log, dt_bias)]
    g, beta = decay_and_write_gates(*leaves)
    assert g.isfinite().all() and (g[1] == least_log_decay(dtype)).all() and g[0, 1] == 0
    # What a rule hands back is not exactly 0 where the decay is: rounding, of sums' differences.
    (g * 1e-7).sum().add(beta.sum()).backward()
    assert all(x.grad.isfinite().all() for x in leaves)
    assert (alpha.grad[1] == 0).all()


def test_ordinary_gates_keep_their_bits():
    alpha, beta, A_log, dt_bias = torch.randn(4, 50, 4)
    A_log, dt_bias = A_log[0] + 2, dt_bias[0]
    g, _ = decay_and_write_gates(alpha, beta, A_log, dt_bias)
    plain = -A_log.exp() * torch.nn.functional.softplus(alpha + dt_bias)
    assert torch.equal(g, plain.clamp(min=-104)) and torch.equal(g.exp(), plain.exp())


def test_gates_do_not_hide_nan():
    nan, zero = torch.full((1, 2), float("nan")), torch.zeros(1, 2)
    for inputs in ((nan, zero, zero[0], zero[0]), (zero, zero, nan[0], zero[0])):
        assert decay_and_write_gates(*inputs)[0].isnan().all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("which", range(5), ids=["q", "k", "v", "g", "beta"])
@pytest.mark.parametrize("token", [0, 20, 63, 64, 130])
@pytest.mark.parametrize("entries", [slice(None), slice(2, 3)], ids=["a head", "one entry"])
def test_what_is_not_finite_reaches_no_earlier_output(token, which, bad, entries):
    """Bit for bit; and NaN or inf stands where the recurrence has it."""
    if which == 3 and bad == -float("inf"):
        pytest.skip("a legal log-decay")
    inputs = [x.float() for x in make_inputs(1, 150, 2, 4, 16, 8, 1.0)]
    clean, _ = carried(torch_chunk_gated_delta_rule, *inputs)
    of_head = inputs[which][:, token, 1]
    (of_head[:, entries] if which < 3 else of_head).fill_(bad)
    o, state = carried(torch_chunk_gated_delta_rule, *inputs)
    expected, expected_state = carried(recurrent_gated_delta_rule, *inputs)
    if which == 2 and entries != slice(None):  # the recurrence keeps the other columns
        assert not (o.isfinite() & ~expected.isfinite()).any()
    else:
        assert torch.equal(o.isfinite(), expected.isfinite())
        assert torch.equal(state.isfinite(), expected_state.isfinite())
    assert torch.equal(o[:, :token], clean[:, :token])
    assert not expected[:, token].isfinite().all() or which == 3 and token == 0
