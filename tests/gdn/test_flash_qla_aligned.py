"""FlashQLA on the grid: no sequence is cut, so a call may begin at any chunk. On a CPU, stand-ins.

The bits are :mod:`.test_gpu_aligned`'s.
"""

import random

import pytest
import torch

from megatron_gdn.gdn.flash_qla.rule import FlashQlaRule
from megatron_gdn.gdn.rule import RuleInputs
from tests.ops.delta_rule.states import (
    NAMES,
    Oracle,
    backward_of,
    by_key_head,
    documents_of,
    run_whole,
)

from . import test_flash_qla_wiring as wiring

stand_ins = wiring.rule  # the fixture
aligned = pytest.mark.parametrize("stand_ins", [(False, (0, 64, 128))], indirect=True)


@aligned
def test_the_plan_of_a_sequence_is_the_sequence_whatever_lies_beside_it(stand_ins):
    rule, draw = FlashQlaRule(aligned=True), random.Random(0)
    for heads in (1, 4, 32):
        for _ in range(20):
            lengths = [draw.randint(0, 9000) for _ in range(draw.randint(1, 9))]
            tokens = sum(lengths)
            x = torch.zeros(1).expand(1, tokens, heads, 1)
            inputs = RuleInputs(x, x, x, x[..., 0], x[..., 0])
            for states in (False, True):
                plan = rule.plan(inputs, documents_of(lengths), states)
                expected = [0, *torch.tensor([n for n in lengths if n]).cumsum(0).tolist()]
                assert plan.cut.offsets.tolist() == plan.cut.sequences.tolist() == expected
                assert plan.cut.are_sequences and not plan.context.is_intra


CUTS = {(300,): (0, 64, 192, 300), (64, 1, 130): (0, 64, 65, 129, 195), (50,): (0, 50)}


@pytest.mark.parametrize(
    ("stand_ins", "lengths"), [((False, c), n) for n, c in CUTS.items()], ids=str,
    indirect=["stand_ins"],
)  # fmt: skip
def test_the_rule_and_its_backward_in_parts_are_those_of_the_definition(stand_ins, lengths):
    rule, S = FlashQlaRule(aligned=True), sum(lengths)
    inputs, d_o = wiring.random_inputs(S)
    oracle = Oracle(inputs, lengths)
    exact = [oracle.forward()[0], *by_key_head(oracle.backward(d_o)[0], wiring.HEADS[0])]
    documents = None if len(lengths) == 1 else documents_of(lengths)
    for name, a, b in zip(NAMES, run_whole(rule, inputs, d_o, documents), exact, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5, msg=name)  # states are fp32
    o, _, saved = rule.begin(inputs, documents).run()
    again = rule.run_again(inputs, rule.kept_to_run_again(saved), documents, None)
    grads = backward_of(rule, inputs, d_o, again.saved, documents).run()
    assert torch.equal(again.o, o)
    for name, a, b in zip(NAMES[1:], by_key_head(grads, wiring.HEADS[0]), exact[1:], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5, msg=name)


@pytest.mark.parametrize("stand_ins", [(False, (0, 64, 192, 300))], indirect=True)
def test_the_backward_in_parts_begins_from_the_states_that_entered(stand_ins):
    rule = FlashQlaRule(aligned=True)
    inputs, d_o = wiring.random_inputs(300)
    oracle = Oracle(inputs, (300,))
    initial, d_final = torch.randn(2, *oracle.zeros().shape)
    exact, _ = oracle.backward(d_o, initial, d_final)
    _, _, saved = rule.begin(inputs, None).run(initial)
    begun = backward_of(rule, inputs, d_o, saved)
    torch.testing.assert_close(
        begun.d_initial(), oracle.backward(d_o, initial)[1], rtol=1e-5, atol=1e-5,
        check_dtype=False,
    )  # fmt: skip
    exact = by_key_head(exact, wiring.HEADS[0])
    grads = by_key_head(begun.run(initial, d_final), wiring.HEADS[0])
    for name, a, b in zip(NAMES[1:], grads, exact, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5, msg=name)


@aligned
def test_a_sequence_goes_on_from_the_state_of_any_chunk(stand_ins):
    rule, state, made = FlashQlaRule(aligned=True), None, []
    inputs, _ = wiring.random_inputs(300)
    exact, final = Oracle(inputs, (300,)).forward()
    for start, end in ((0, 64), (64, 256), (256, 300)):
        piece = RuleInputs(*(x[:, start:end] for x in inputs))
        o, state, saved = rule.begin(piece, None).run(state, keep=False, final=True)
        assert not saved.tensors
        made.append(o)
    torch.testing.assert_close(torch.cat(made, 1), exact, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(state.to(final.dtype), final, rtol=1e-6, atol=1e-6)
