"""Cores that pass states: pieces of a sequence with states between them equal the whole.

fp64 against autograd through the token recurrence; 1e-10 is 6 digits above fp64 rounding of sums of
a few hundred terms.

Legend: N sequences, G key heads, H value heads, K key dim, V value dim.
"""

from __future__ import annotations

import pytest
import torch

from megatron_gdn.ops.delta_rule.base import RuleInputs, can_pass_states
from megatron_gdn.ops.delta_rule.plain import TorchCore
from megatron_gdn.ops.delta_rule.recurrent import recurrent_gated_delta_rule
from megatron_gdn.ops.documents import Documents
from megatron_gdn.ops.norm import l2norm

from .states import NAMES

G, H, K, V = 2, 6, 5, 7
CASES = {
    "batch": ((2, 70), None, 1.0),
    "documents": ((1, 150), (3, 0, 70, 1, 0, 65, 11), 1.0),
    "no decay": ((1, 66), None, 0.0),
    "strong decay": ((1, 66), None, 40.0),
}


def make_inputs(shape, lengths, decay):
    torch.manual_seed(0)
    B, T = shape

    def normal(*size):
        return torch.randn(B, T, *size, dtype=torch.float64)

    inputs = RuleInputs(
        q=l2norm(normal(G, K)),
        k=l2norm(normal(G, K)),
        v=normal(H, V),
        g=-decay * normal(H).abs(),
        beta=normal(H).sigmoid(),
    )
    documents, N = None, B
    if lengths is not None:
        offsets = torch.tensor([0, *lengths]).cumsum(0).tolist()
        documents, N = Documents.from_cu_seqlens(offsets, T), sum(n > 0 for n in lengths)
    initial = torch.randn(N, H, K, V, dtype=torch.float64)
    return inputs, documents, initial


def by_the_recurrence(inputs, documents, initial):
    """Output and final states of the N non-empty sequences, differentiable."""
    kept = None if documents is None else documents.cu_seqlens
    return recurrent_gated_delta_rule(
        *inputs, initial_state=initial, output_final_state=True, cu_seqlens=kept
    )


@pytest.fixture(params=CASES)
def case(request):
    return make_inputs(*CASES[request.param])


core = TorchCore()


def assert_close(got, exact):
    assert got.dtype == exact.dtype
    torch.testing.assert_close(got, exact, rtol=1e-10, atol=1e-10)


def test_transition_is_the_map_from_initial_to_final_states(case):
    inputs, documents, initial = case
    local, through, _ = core.transition(inputs, documents)
    _, final = by_the_recurrence(inputs, documents, initial)
    assert_close(through @ initial + local, final)


def test_forward_starts_from_the_initial_states(case):
    inputs, documents, initial = case
    work = core.transition(inputs, documents).work
    o, *_ = core.forward(inputs, documents, True, initial=initial, work=work)
    assert_close(o, by_the_recurrence(inputs, documents, initial)[0])
    zero, *_ = core.forward(inputs, documents, True)
    assert_close(zero, by_the_recurrence(inputs, documents, torch.zeros_like(initial))[0])


def test_gradients_flow_through_both_ends(case):
    inputs, documents, initial = case
    leaves = [x.clone().requires_grad_() for x in (*inputs, initial)]
    o, final = by_the_recurrence(RuleInputs(*leaves[:5]), documents, leaves[5])
    d_o, d_final = torch.randn_like(o), torch.randn_like(final)
    *expected, expected_initial = torch.autograd.grad((o, final), leaves, (d_o, d_final))

    _, saved, plan = core.forward(inputs, documents, True, initial=initial)
    given = inputs._replace(g=None)
    d_local, work = core.d_initial(d_o, given, saved, plan, documents)
    through = core.transition(inputs, documents).through
    assert_close(through.transpose(-1, -2) @ d_final + d_local, expected_initial)
    grads = core.backward(
        d_o, given, saved, plan, documents, initial=initial, d_final=d_final, work=work
    )
    for name, got, exact in zip(NAMES[1:], grads[:5], expected, strict=True):
        torch.testing.assert_close(got, exact, rtol=1e-9, atol=1e-9, msg=lambda m, n=name: n + m)


def test_states_of_half_precision_inputs_are_fp32():
    inputs, documents, initial = make_inputs((1, 20), (13, 7), 1.0)
    half = RuleInputs(*(x.half() for x in inputs[:3]), *(x.float() for x in inputs[3:]))
    local, through, _ = core.transition(half, documents)
    assert local.dtype == through.dtype == torch.float32
    o, saved, plan = core.forward(half, documents, True, initial=initial.float())
    assert o.dtype == torch.float16
    d_local, _ = core.d_initial(o, half._replace(g=None), saved, plan, documents)
    assert d_local.dtype == torch.float32


def test_a_core_says_whether_it_can():
    class Plain:
        name = "plain"

    assert can_pass_states(core) and not can_pass_states(Plain())
