"""The plain rule with states in and out: pieces of a sequence and the states between them.

fp64 against autograd through the token recurrence; 1e-10 is 6 digits above fp64 rounding of sums of
a few hundred terms.

Legend: N sequences, G key heads, H value heads, K key dim, V value dim.
"""

from __future__ import annotations

import pytest
import torch

from megatron_gdn.gdn.api import recurrent_gated_delta_rule
from megatron_gdn.ops.delta_rule.base import RuleInputs
from megatron_gdn.ops.delta_rule.plain import PlainRule
from megatron_gdn.ops.documents import Documents
from megatron_gdn.ops.elementwise import l2norm

from .states import (
    NAMES,
    assert_rows_equal_one_row,
    backward_of,
    documents_of,
    forwards_from,
    run_in_segments,
    run_whole,
)

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


rule = PlainRule()


def assert_close(got, exact):
    assert got.dtype == exact.dtype
    torch.testing.assert_close(got, exact, rtol=1e-10, atol=1e-10)


def test_the_map_leads_from_initial_to_final_states(case):
    inputs, documents, initial = case
    maps = rule.begin(inputs, documents).state_map()
    _, final = by_the_recurrence(inputs, documents, initial)
    assert_close(maps.through @ initial + maps.local, final)
    assert_close(maps.apply(initial), final)


def test_output_and_final_states_are_the_recurrences(case):
    inputs, documents, initial = case
    for start, made in forwards_from(rule, inputs, documents, initial):
        o, final = by_the_recurrence(inputs, documents, start)
        assert_close(made.o, o)
        assert_close(made.final, final)


def test_gradients_flow_through_both_ends(case):
    inputs, documents, initial = case
    leaves = [x.clone().requires_grad_() for x in (*inputs, initial)]
    o, final = by_the_recurrence(RuleInputs(*leaves[:5]), documents, leaves[5])
    d_o, d_final = torch.randn_like(o), torch.randn_like(final)
    *expected, expected_initial = torch.autograd.grad((o, final), leaves, (d_o, d_final))

    forward = rule.begin(inputs, documents)
    through = forward.state_map().through
    for d_initial_first in (True, False):
        backward = backward_of(rule, inputs, d_o, forward.run(initial).saved, documents)
        if d_initial_first:
            d_local = backward.d_initial()
            assert_close(through.transpose(-1, -2) @ d_final + d_local, expected_initial)
        grads = backward.run(initial, d_final)
        for name, got, exact in zip(NAMES[1:], grads[:5], expected, strict=True):
            torch.testing.assert_close(
                got, exact, rtol=1e-9, atol=1e-9, msg=lambda m, n=name: n + m
            )


@pytest.mark.parametrize("run", [run_whole, run_in_segments])
def test_documents_over_batch_rows_equal_one_row(run):
    lengths = (3, 0, 30, 42, 65, 0, 10)  # a document ends where the first of the rows does
    inputs, documents, _ = make_inputs((1, 150), lengths, 1.0)
    assert documents.offsets[4] == 75
    assert_rows_equal_one_row(run, rule, inputs, torch.randn_like(inputs.v), documents)


def test_batch_rows_as_documents_equal_them_as_rows():
    inputs, _, initial = make_inputs((2, 70), None, 1.0)
    as_rows = rule.begin(inputs, None).run(initial, final=True)
    as_documents = rule.begin(inputs, documents_of((70, 70))).run(initial, final=True)
    assert_close(as_documents.o, as_rows.o)
    assert_close(as_documents.final, as_rows.final)


def test_states_of_half_precision_inputs_are_fp32():
    inputs, documents, initial = make_inputs((1, 20), (13, 7), 1.0)
    half = RuleInputs(*(x.half() for x in inputs[:3]), *(x.float() for x in inputs[3:]))
    forward = rule.begin(half, documents)
    local, through = forward.state_map()
    assert local.dtype == through.dtype == torch.float32
    o, final, saved = forward.run(initial.float(), final=True)
    assert o.dtype == torch.float16 and final.dtype == torch.float32
    d_local = backward_of(rule, half, o, saved, documents).d_initial()
    assert d_local.dtype == torch.float32
