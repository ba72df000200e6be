"""The plain KDA rule with states in and out, against autograd through its token recurrence.

fp64 to 1e-11 of the largest entry: sums of some hundred terms of 1e-16 each, that partly cancel.

Legend: N sequences, G key heads, H heads, K key dim, V value dim.
"""

from __future__ import annotations

import pytest
import torch

from megatron_gdn.gdn.api import recurrent_gated_delta_rule
from megatron_gdn.kda.rule import PlainKDA, recurrent_kda
from megatron_gdn.ops import StaticDocuments
from megatron_gdn.ops.delta_rule.base import RuleInputs
from megatron_gdn.ops.elementwise import l2norm
from tests.ops.delta_rule.states import NAMES, backward_of, documents_of, forwards_from
from tests.parallel import assert_close

G, H, K, V = 2, 4, 5, 7
PACKED = (3, 0, 70, 1, 0, 65, 11)
# Log-decays from uniform numbers in (0, 1), of shape [..., K].
GATES = {
    "none": lambda u: -0.0 * u,
    "slow": lambda u: -1e-4 * u,
    "bounded": lambda u: -5 * u,
    "fast": lambda u: torch.full_like(u, -5.0),
    "faster": lambda u: -50 * u,
    "a decay of 0": lambda u: torch.where(u < 0.1, -torch.inf, -u),
    # Channels of one head that forget at once beside channels that forget nothing.
    "unequal": lambda u: -torch.logspace(-6, 1.5, K, dtype=u.dtype) * u,
}
rule = PlainKDA()


def make_inputs(gates="unequal", shape=(1, 150), lengths=None):
    torch.manual_seed(0)
    B, T = shape

    def normal(*size):
        return torch.randn(B, T, *size, dtype=torch.float64)

    q, k, v, beta = l2norm(normal(G, K)), l2norm(normal(G, K)), normal(H, V), normal(H).sigmoid()
    g = GATES[gates](torch.rand(B, T, H, K, dtype=torch.float64))
    documents = None if lengths is None else documents_of(lengths)
    N = B if lengths is None else sum(n > 0 for n in lengths)
    return RuleInputs(q, k, v, g, beta), documents, torch.randn(N, H, K, V, dtype=torch.float64)


CASES = [(gates, (1, 150), PACKED) for gates in GATES] + [("unequal", (2, 70), None)]


@pytest.fixture(params=CASES, ids=[*GATES, "batch"])
def case(request):
    return make_inputs(*request.param)


def test_output_states_and_maps_are_the_recurrences(case):
    inputs, documents, initial = case
    for start, made in forwards_from(rule, inputs, documents, initial):
        o, final = recurrent_kda(inputs, documents, start)
        assert_close("o", made.o, o, 1e-11)
        assert_close("final", made.final, final, 1e-11)
    maps = rule.begin(inputs, documents).state_map()
    assert_close("map", maps.apply(initial), final, 1e-11)
    assert not maps.is_diagonal


def test_gradients_flow_through_both_ends(case):
    inputs, documents, initial = case
    leaves = [x.clone().requires_grad_() for x in (*inputs, initial)]
    o, final = recurrent_kda(RuleInputs(*leaves[:5]), documents, leaves[5])
    d_o, d_final = torch.randn_like(o), torch.randn_like(final)
    *expected, d_initial = torch.autograd.grad((o, final), leaves, (d_o, d_final))

    forward = rule.begin(inputs, documents)
    through = forward.state_map().through
    backward = backward_of(rule, inputs, d_o, forward.run(initial).saved, documents)
    assert_close("d_initial", through.mT @ d_final + backward.d_initial(), d_initial, 1e-11)
    grads = backward.run(initial, d_final)
    for name, got, exact in zip(NAMES[1:], grads[:5], expected, strict=True):
        assert_close(name, got, exact, 1e-11)


def test_equal_channels_are_the_gated_delta_rule():
    inputs, documents, initial = make_inputs("bounded", lengths=PACKED)
    g = inputs.g[..., :1]
    o, final = recurrent_kda(inputs._replace(g=g.expand(inputs.g.shape)), documents, initial)
    offsets = torch.tensor([0, *(n for n in PACKED if n)]).cumsum(0)
    exact = recurrent_gated_delta_rule(
        *inputs._replace(g=g[..., 0]), initial, True, cu_seqlens=offsets
    )
    assert_close("o", o, exact[0], 1e-14)
    assert_close("final", final, exact[1], 1e-14)


@pytest.mark.parametrize("gates", ["fast", "unequal", "slow"])
def test_fp32_keeps_its_digits_in_output_and_gradients(gates):
    """Within 2e-6, some 16 roundings of 1.2e-7: also of g, whose gradient is small where g is."""
    inputs, documents, initial = make_inputs(gates, lengths=PACKED)
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
    inputs, documents, _ = make_inputs(lengths=lengths)
    static = StaticDocuments(150, 6)
    static.fill(torch.tensor([0, *lengths]).cumsum(0).tolist())
    d_o, found = torch.randn_like(inputs.v), []
    for these in (documents, static):
        made = rule.begin(inputs, these).run()
        backward = backward_of(rule, inputs, d_o, made.saved, these)
        found.append([made.o, *backward.run()[:5]])
    for name, a, b in zip(NAMES, *found, strict=True):  # products of other shapes
        assert_close(name, a, b, 2e-6 if a.dtype == torch.float32 else 1e-11)


@pytest.mark.parametrize("name", ["k", "v", "g", "beta"])
def test_a_token_that_is_not_finite_spoils_what_comes_after_it_alone(name):
    inputs, _, _ = make_inputs("bounded", (1, 70))
    spoiled, reached = getattr(inputs, name).clone(), [2, 3] if name == "k" else [1]
    spoiled[:, 30, 1] = torch.nan
    o = rule.begin(inputs, None).run().o
    got = rule.begin(inputs._replace(**{name: spoiled}), None).run().o
    assert torch.equal(got[:, :30], o[:, :30]) and got[:, 30:, reached].isnan().all()
    others = [h for h in range(H) if h not in reached]
    assert torch.equal(got[:, :, others], o[:, :, others])
