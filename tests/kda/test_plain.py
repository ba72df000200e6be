"""The plain KDA rule: where it is the gated delta rule, fp32, fixed buffers, what is not finite."""

import pytest
import torch

from megatron_gdn.ops import StaticDocuments
from megatron_gdn.ops.delta_rule.base import RuleInputs
from megatron_gdn.ops.delta_rule.plain import PlainRule
from tests.ops.delta_rule.states import NAMES, backward_of, documents_of
from tests.ops.test_plain_rules import KDA, PACKED, delta_inputs, states
from tests.parallel import assert_close

rule = PlainRule()


def make_inputs(gates, lengths):
    initial = states(KDA, sum(n > 0 for n in lengths))
    return delta_inputs(gates, 1, sum(lengths)), documents_of(lengths), initial


@pytest.mark.parametrize("gates", ["fast", "unequal", "slow"])
def test_fp32_keeps_its_digits_in_output_and_gradients(gates):
    """Within 2e-6, some 16 roundings of 1.2e-7: also of g, whose gradient is small where g is."""
    inputs, documents, initial = make_inputs(gates, PACKED)
    narrow = RuleInputs(*(x.float() for x in inputs))
    exact = RuleInputs(*(x.double() for x in narrow))
    d_o = torch.randn_like(narrow.v)
    found = []
    for these, d in ((narrow, d_o), (exact, d_o.double())):
        made = rule.begin(these, documents).run(initial.to(d.dtype))
        backward = backward_of(rule, these, d, made.saved, documents)
        found.append([made.o, *backward.run(initial.to(d.dtype))[:5]])
    for name, got, wanted in zip(NAMES, *found, strict=True):
        assert_close(name, got.double(), wanted, 2e-6)


def test_documents_in_fixed_buffers_equal_the_others():
    lengths = (70, 1, 65, 14)
    inputs, documents, _ = make_inputs("unequal", lengths)
    static = StaticDocuments(150, 6)
    static.fill(torch.tensor([0, *lengths]).cumsum(0).tolist())
    d_o, found = torch.randn_like(inputs.v), []
    for these in (documents, static):
        made = rule.begin(inputs, these).run()
        backward = backward_of(rule, inputs, d_o, made.saved, these)
        found.append([made.o, *backward.run()[:5]])
    for name, a, b in zip(NAMES, *found, strict=True):  # products of other shapes
        assert_close(name, a, b, 2e-6 if a.dtype == torch.float32 else 1e-11)
