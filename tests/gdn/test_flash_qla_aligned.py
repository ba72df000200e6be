"""FlashQLA on the grid: no sequence is cut, so a call may begin at any chunk. On a CPU, stand-ins;
the bits are :mod:`.test_gpu_aligned`'s."""

import random

import pytest
import torch

from megatron_gdn.gdn.rule import RuleInputs
from megatron_gdn.ops.rules.base import kept_to_run_again, run_again
from tests.ops.delta_rule.states import (
    NAMES,
    Oracle,
    backward_of,
    by_key_head,
    documents_of,
    run_whole,
)

from .stand_ins import flash_qla_rule, forget_plans
from .test_wiring import HEADS, exact_run, random_inputs, random_states


@pytest.fixture
def rule(request, monkeypatch):
    yield flash_qla_rule(monkeypatch, cut=request.param, aligned=True)
    forget_plans()


aligned = pytest.mark.parametrize("rule", [(0, 64, 128)], indirect=True)


def check(got, exact, names=NAMES):
    for name, a, b in zip(names, got, exact, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5, msg=name)  # states are fp32


@aligned
def test_the_plan_of_a_sequence_is_the_sequence_whatever_lies_beside_it(rule):
    draw = random.Random(0)
    for heads in (1, 4, 32):
        for _ in range(20):
            lengths = [draw.randint(0, 9000) for _ in range(draw.randint(1, 9))]
            x = torch.zeros(1).expand(1, sum(lengths), heads, 1)
            inputs = RuleInputs(x, x, x, x[..., 0], x[..., 0])
            for states in (False, True):
                plan = rule.plan(inputs, documents_of(lengths), states)
                expected = [0, *torch.tensor([n for n in lengths if n]).cumsum(0).tolist()]
                assert plan.cut.offsets.tolist() == plan.cut.sequences.tolist() == expected
                assert plan.cut.are_sequences and not plan.context.is_intra


CUTS = {(300,): (0, 64, 192, 300), (64, 1, 130): (0, 64, 65, 129, 195), (50,): (0, 50)}


@pytest.mark.parametrize(
    ("rule", "lengths"), [(c, n) for n, c in CUTS.items()], ids=str, indirect=["rule"]
)
def test_the_rule_and_its_backward_in_parts_are_those_of_the_definition(rule, lengths):
    inputs, d_o = random_inputs(sum(lengths))
    exact = exact_run(Oracle(inputs, lengths), d_o)
    documents = None if len(lengths) == 1 else documents_of(lengths)
    check(run_whole(rule, inputs, d_o, documents), exact)
    o, _, saved = rule.begin(inputs, documents).run()
    again = run_again(rule, inputs, kept_to_run_again(rule, saved), documents, None)
    grads = backward_of(rule, inputs, d_o, again.saved, documents).run()
    assert torch.equal(again.o, o)
    check(by_key_head(grads, HEADS[0]), exact[1:], NAMES[1:])


@pytest.mark.parametrize("rule", [(0, 64, 192, 300)], indirect=True)
def test_the_backward_in_parts_begins_from_the_states_that_entered(rule):
    inputs, d_o = random_inputs(300)
    oracle, (initial, d_final) = Oracle(inputs, (300,)), random_states(1)
    _, _, saved = rule.begin(inputs, None).run(initial)
    begun = backward_of(rule, inputs, d_o, saved)
    d_initial = oracle.backward(d_o, initial)[1]
    torch.testing.assert_close(begun.d_initial().double(), d_initial, rtol=1e-5, atol=1e-5)
    grads = by_key_head(begun.run(initial, d_final), HEADS[0])
    check(grads, exact_run(oracle, d_o, initial, d_final)[1:], NAMES[1:])


@aligned
def test_a_sequence_goes_on_from_the_state_of_any_chunk(rule):
    inputs, _ = random_inputs(300)
    exact, final = Oracle(inputs, (300,)).forward()
    state, made = None, []
    for start, end in ((0, 64), (64, 256), (256, 300)):
        piece = RuleInputs(*(x[:, start:end] for x in inputs))
        o, state, saved = rule.begin(piece, None).run(state, keep=False, final=True)
        assert not saved.tensors
        made.append(o)
    torch.testing.assert_close(torch.cat(made, 1), exact, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(state.to(final.dtype), final, rtol=1e-6, atol=1e-6)
