"""The plain delta rule: rows as documents, and the dtype of states."""

import torch

from megatron_gdn.ops.delta_rule.base import RuleInputs
from megatron_gdn.ops.delta_rule.plain import PlainRule
from tests.ops.test_plain_rules import DELTA, delta_inputs, states

from .states import backward_of, documents_of

rule = PlainRule()


def test_batch_rows_as_documents_equal_them_as_rows():
    inputs, initial = delta_inputs(1.0, 2, 70), states(DELTA, 2)
    as_rows = rule.begin(inputs, None).run(initial, final=True)
    as_documents = rule.begin(inputs, documents_of((70, 70))).run(initial, final=True)
    torch.testing.assert_close(as_documents.o, as_rows.o, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(as_documents.final, as_rows.final, rtol=1e-10, atol=1e-10)


def test_states_of_half_precision_inputs_are_fp32():
    inputs, documents = delta_inputs(1.0, 1, 20), documents_of((13, 7))
    half = RuleInputs(*(x.half() for x in inputs[:3]), *(x.float() for x in inputs[3:]))
    forward = rule.begin(half, documents)
    local, through = forward.state_map()
    assert local.dtype == through.dtype == torch.float32
    o, final, saved = forward.run(states(DELTA, 2).float(), final=True)
    assert o.dtype == torch.float16 and final.dtype == torch.float32
    d_local = backward_of(rule, half, o, saved, documents).d_initial()
    assert d_local.dtype == torch.float32
