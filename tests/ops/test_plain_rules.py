"""Every plain rule with states in and out, in fp64, against autograd through its
recurrence."""

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch

from megatron_gdn.gdn.api import recurrent_gated_delta_rule
from megatron_gdn.gdn.half import HalfOperands
from megatron_gdn.gdn2.rule import PlainGDN2
from megatron_gdn.mamba2.rule import PlainSSD
from megatron_gdn.ops.delta_rule.base import RuleInputs
from megatron_gdn.ops.delta_rule.plain import PlainRule
from megatron_gdn.ops.elementwise import l2norm
from megatron_gdn.ops.rules import chunk_table
from megatron_gdn.ops.rules.base import Bits, Rule, SavedForBackward
from megatron_gdn.ops.rules.steps import RuleOfSteps
from megatron_gdn.ops.static_documents import StaticDocuments
from megatron_gdn.ops.trees import RuleByLevel
from tests.gdn2 import oracle as gdn2
from tests.kda.oracle import recurrent_kda
from tests.mamba2 import oracle as ssd
from tests.ops.delta_rule.states import (
    assert_rows_equal_one_row,
    backward_of,
    documents_of,
    forwards_from,
    run_in_segments,
    run_whole,
)
from tests.parallel import assert_close
from tests.trees import Tree
from tests.whole_groups import whole_groups

G = 2
H = 4
K = 5
V = 7
PACKED = (3, 0, 70, 1, 0, 11)
LONG = (1, 63, 64, 0, 130)
# Log-decays of KDA's channels from uniform numbers in (0, 1).
CHANNELS = {
    "none": lambda u: -0.0 * u,
    "slow": lambda u: -1e-4 * u,
    "bounded": lambda u: -5 * u,
    "fast": lambda u: torch.full_like(u, -5.0),
    "faster": lambda u: -50 * u,
    "a decay of 0": lambda u: torch.where(u < 0.1, -torch.inf, -u),
    # Channels of one head that forget at once beside channels that forget nothing.
    "unequal": lambda u: -torch.logspace(-6, 1.5, K, dtype=u.dtype) * u,
}


def delta_inputs(gates, B, T) -> RuleInputs:
    """``gates``: how strong decays of whole heads are, or a name of `CHANNELS`."""
    torch.manual_seed(0)

    def normal(*size):
        return torch.randn(B, T, *size, dtype=torch.float64)

    q = l2norm(normal(G, K))
    k = l2norm(normal(G, K))
    v = normal(H, V)
    beta = normal(H).sigmoid()
    if gates in CHANNELS:
        g = CHANNELS[gates](torch.rand(B, T, H, K, dtype=torch.float64))
    else:
        g = -gates * normal(H).abs()
    return RuleInputs(q, k, v, g, beta)


def delta_recurrence(inputs, documents, initial):
    kept = None if documents is None else documents.cu_seqlens
    return recurrent_gated_delta_rule(*inputs, initial, True, cu_seqlens=kept)


STEPS = 3


def inputs_of_steps(gates, B, T) -> RuleInputs:
    """With keys, values and write strengths of each step, step by step."""
    each = [delta_inputs(gates, B, T)]
    for _ in range(STEPS - 1):
        each.append(type(each[0])(*(x.roll(1, 1) * 0.9 for x in each[-1])))
    k, v, beta = (
        torch.cat([getattr(x, n) for x in each], 2) for n in ("k", "v", "beta")
    )
    return each[0]._replace(k=k, v=v, beta=beta)


def recurrence_of_steps(inputs, documents, initial):
    """Token by token and step by step; a state of each batch row, or document."""
    q, k, v, g, beta = inputs
    B, T = v.shape[:2]
    k = k.unflatten(2, (STEPS, G)).repeat_interleave(H // G, 3)
    q = q.repeat_interleave(H // G, 2) * K**-0.5
    v = v.unflatten(2, (STEPS, H))
    beta = beta.unflatten(2, (STEPS, H))
    spans = [(row, 0, T) for row in range(B)]
    if documents is not None:
        ends = documents.filled_offsets
        spans = [(0, a, b) for a, b in itertools.pairwise(ends)]
    o = {}
    finals = []
    for n, (row, start, end) in enumerate(spans):
        S = v.new_zeros(H, K, V) if initial is None else initial[n]
        for t in range(start, end):
            S = g[row, t].exp()[:, None, None] * S
            for j in range(STEPS):
                key = k[row, t, j]
                read = torch.einsum("hkv,hk->hv", S, key)
                write = beta[row, t, j][:, None] * (v[row, t, j] - read)
                S = S + torch.einsum("hk,hv->hkv", key, write)
            o[row, t] = torch.einsum("hkv,hk->hv", S, q[row, t])
        finals.append(S)
    rows = [torch.stack([o[row, t] for t in range(T)]) for row in range(B)]
    return torch.stack(rows), torch.stack(finals)


def ssd_inputs(per_channel_D, B, T):
    return ssd.random_inputs(T, B, per_channel_D=per_channel_D)[0]


def ssd_recurrence(inputs, documents, initial):
    B, T = inputs.x.shape[:2]
    lengths = (
        (T,) * B if documents is None else tuple(n for n in documents.lengths if n)
    )
    return ssd.token_by_token(inputs, lengths, initial)


class Kind(NamedTuple):
    rule: Any
    inputs: Callable[..., Any]
    recurrence: Callable[..., Any]
    state: tuple[int, int, int] = (H, K, V)
    diagonal: bool = False


DELTA = Kind(PlainRule(), delta_inputs, delta_recurrence)
OF_STEPS = Kind(RuleOfSteps(PlainRule(), STEPS), inputs_of_steps, recurrence_of_steps)
KDA = Kind(PlainRule(), delta_inputs, recurrent_kda)
GDN2 = Kind(PlainGDN2(), gdn2.random_inputs, gdn2.recurrent_gdn2)
SSD = Kind(PlainSSD(), ssd_inputs, ssd_recurrence, (ssd.H, ssd.K, ssd.V), True)
CASES = {
    "delta rule, batch": (DELTA, 1.0, (2, 70), None),
    "delta rule, documents": (DELTA, 1.0, (1, sum(PACKED)), PACKED),
    "delta rule, no decay": (DELTA, 0.0, (1, 66), None),
    "delta rule, strong decay": (DELTA, 40.0, (1, 66), None),
    **{f"KDA, {gates}": (KDA, gates, (1, sum(PACKED)), PACKED) for gates in CHANNELS},
    "KDA, batch": (KDA, "unequal", (2, 70), None),
    **{
        f"GDN-2, {gates}": (GDN2, gates, (1, sum(PACKED)), PACKED)
        for gates in gdn2.GATES
    },
    "GDN-2, batch": (GDN2, "unequal", (2, 70), None),
    "three steps, batch": (OF_STEPS, 1.0, (2, 70), None),
    "three steps, documents": (OF_STEPS, 1.0, (1, sum(PACKED)), PACKED),
    "three steps, strong decay": (OF_STEPS, 40.0, (1, 66), None),
    "SSD, batch": (SSD, False, (2, 70), None),
    "SSD, batch, D of channels": (SSD, True, (2, 70), None),
    "SSD, documents": (SSD, False, (1, sum(LONG)), LONG),
    "SSD, documents, D of channels": (SSD, True, (1, sum(LONG)), LONG),
}


def states(kind, count):
    make = torch.Generator().manual_seed(count)
    return torch.randn(count, *kind.state, generator=make, dtype=torch.float64)


@pytest.fixture(params=CASES)
def case(request):
    """A kind, its inputs, the documents and initial states."""
    kind, gates, (B, T), lengths = CASES[request.param]
    documents = None if lengths is None else documents_of(lengths)
    count = B if lengths is None else sum(n > 0 for n in lengths)
    return kind, kind.inputs(gates, B, T), documents, states(kind, count)


@pytest.fixture(params=[False, True], ids=["one group", "many groups"])
def groups(request, monkeypatch):
    """Many: of two chunks, so that states are carried from group to group."""
    if request.param:
        monkeypatch.setattr(chunk_table, "_PRODUCTS_PER_GROUP", 2 * max(H, ssd.H))


def close(name, got, exact):
    assert got.dtype == exact.dtype
    assert_close(name, got, exact, 1e-11)


@pytest.mark.each_value
def test_output_states_and_maps_are_the_recurrences(case, groups):
    kind, inputs, documents, initial = case
    zeros = torch.zeros_like(initial)
    from_zero = kind.recurrence(inputs, documents, zeros)
    o, final = kind.recurrence(inputs, documents, initial)
    for start, made in forwards_from(kind.rule, inputs, documents, initial):
        exact = (o, final) if start is initial else from_zero
        close("o", made.o, exact[0])
        close("final", made.final_states, exact[1])
    maps = kind.rule.begin(inputs, documents).state_map()
    close("final by the map", maps.apply(initial), final)
    assert maps.is_diagonal == kind.diagonal
    kept = maps.through * initial if kind.diagonal else maps.through @ initial
    close("the map written out", kept + maps.local, final)


@pytest.mark.each_value
def test_gradients_flow_through_both_ends(case, groups):
    kind, inputs, documents, initial = case
    forward = kind.rule.begin(inputs, documents)
    maps = forward.state_map()
    for first, last in ((initial, torch.randn_like(initial)), (None, None)):
        entering = torch.zeros_like(initial) if first is None else first
        leaves = [x.clone().requires_grad_() for x in (*inputs, entering)]
        o, final = kind.recurrence(type(inputs)(*leaves[:-1]), documents, leaves[-1])
        d_o = torch.randn_like(o)
        d_final = torch.zeros_like(final) if last is None else last
        *expected, d_initial = torch.autograd.grad((o, final), leaves, (d_o, d_final))
        for d_initial_first in (True, False):
            saved = forward.run(first).saved
            backward = backward_of(kind.rule, inputs, d_o, saved, documents)
            if d_initial_first:
                found = maps.transposed(backward.d_initial()).apply(d_final)
                close("d_initial", found, d_initial)
            grads = backward.run(first, last)
            for name, got, exact in zip(inputs._fields, grads, expected, strict=False):
                close(name, got, exact)


def output_and_gradients(rule, inputs, d_o, documents):
    o, _, saved = rule.begin(inputs, documents).run()
    return [o, *backward_of(rule, inputs, d_o, saved, documents).run()[: len(inputs)]]


# In the first a document ends where the first of two rows does, in the second it lies
# over both.
@pytest.mark.each_value
@pytest.mark.parametrize(
    "lengths", [(3, 0, 30, 42, 65, 0, 10), (30, 50, 0, 70)], ids=str
)
@pytest.mark.parametrize(
    ("kind", "gates", "run"),
    [
        (DELTA, 1.0, run_whole),
        (DELTA, 1.0, run_in_segments),
        (KDA, "unequal", run_whole),
        (GDN2, "unequal", output_and_gradients),
        (OF_STEPS, 1.0, output_and_gradients),
        (SSD, False, output_and_gradients),
    ],
    ids=["delta rule", "delta rule in segments", "KDA", "GDN-2", "three steps", "SSD"],
)
def test_documents_over_batch_rows_equal_one_row(kind, gates, run, lengths):
    inputs = kind.inputs(gates, 1, 150)
    o, _ = kind.recurrence(inputs, None, states(kind, 1))
    assert_rows_equal_one_row(
        run, kind.rule, inputs, torch.randn_like(o), documents_of(lengths)
    )


def both_ways(rule, inputs, documents, d_o, initial=None):
    """By name the output and every gradient of the inputs."""
    made = rule.begin(inputs, documents).run(initial)
    grads = backward_of(rule, inputs, d_o, made.saved, documents).run(initial)
    return {"o": made.o, **dict(zip(inputs._fields, grads, strict=False))}


def in_dtype(inputs, dtype):
    return type(inputs)(*(x.to(dtype) for x in inputs))


# And the largest error over the largest entry, of some roundings of 1.2e-7 in a row:
# also of g, whose gradient is small where g is.
IN_FP32 = {
    "delta rule": (DELTA, 1.0, 1e-5),
    **{f"KDA, {gates}": (KDA, gates, 2e-6) for gates in ("fast", "unequal", "slow")},
    **{
        f"GDN-2, {gates}": (GDN2, gates, 1e-5)
        for gates in ("unequal", "uneven", "very uneven")
    },
    "SSD": (SSD, True, 1e-5),
}
in_fp32 = pytest.mark.parametrize(
    ("kind", "gates", "most"), IN_FP32.values(), ids=IN_FP32
)


@in_fp32
def test_fp32_keeps_its_digits_in_output_and_gradients(kind, gates, most):
    narrow = in_dtype(kind.inputs(gates, 1, sum(PACKED)), torch.float32)
    documents = documents_of(PACKED)
    initial = states(kind, sum(n > 0 for n in PACKED)).float()
    d_o = torch.randn_like(kind.recurrence(narrow, documents, initial)[0].float())
    found = both_ways(kind.rule, narrow, documents, d_o, initial)
    exact = in_dtype(narrow, torch.float64)
    exact = both_ways(kind.rule, exact, documents, d_o.double(), initial.double())
    for name, wanted in exact.items():
        assert_close(name, found[name].double(), wanted, most)


@whole_groups(8)
@in_fp32
def test_a_documents_bits_depend_neither_on_its_neighbours_nor_on_its_place(
    kind, gates, most
):
    inputs = in_dtype(kind.inputs(gates, 1, 232), torch.float32)
    at = slice(70, 199)
    d_o = torch.randn_like(kind.recurrence(inputs, None, None)[0].float())
    among = both_ways(kind.rule, inputs, documents_of((70, 129, 33)), d_o)
    mine = type(inputs)(*(x[:, at] for x in inputs))
    alone = both_ways(kind.rule, mine, documents_of((129,)), d_o[:, at])
    for name, x in alone.items():
        assert torch.equal(x, among[name][:, at]), name


@pytest.mark.parametrize(
    ("kind", "gates"), [(KDA, "unequal"), (OF_STEPS, 1.0)], ids=["KDA", "three steps"]
)
def test_documents_in_fixed_buffers_equal_the_others(kind, gates):
    inputs = kind.inputs(gates, 1, 150)
    documents = documents_of((70, 1, 65, 14))
    static = StaticDocuments(150, 6)
    static.fill(documents.offsets)
    d_o = torch.randn(1, 150, H, V, dtype=torch.float64)
    found, expected = (
        both_ways(kind.rule, inputs, x, d_o) for x in (static, documents)
    )
    for name, x in expected.items():  # products of other shapes
        close(name, found[name], x)


@pytest.mark.parametrize("kind", [DELTA, KDA, GDN2], ids=["delta", "KDA", "GDN-2"])
def test_a_given_scale_stands_for_one_over_the_root_of_the_key_dim(kind):
    inputs = kind.inputs("unequal" if kind is not DELTA else 1.0, 1, 70)
    rule = type(kind.rule)
    o = rule().begin(inputs, None).run().o
    doubled = rule(scale=2 * K**-0.5).begin(inputs, None).run().o
    close("output", doubled, 2 * o)


def test_a_token_of_gdn2_that_is_not_finite_reaches_no_earlier_output():
    inputs = gdn2.random_inputs("usual", 1, 70)
    o = PlainGDN2().begin(inputs, None).run().o
    for name in ("k", "v", "g", "b", "w"):
        broken = getattr(inputs, name).clone()
        broken[0, 40, 0, 0] = float("nan")
        got = PlainGDN2().begin(inputs._replace(**{name: broken}), None).run().o
        heads = 4 // broken.shape[2]  # those that it belongs to
        assert torch.equal(got[:, :40], o[:, :40]), name
        assert got[:, 40:, :heads].isnan().all(), name
        assert torch.equal(got[:, 40:, heads:], o[:, 40:, heads:]), name


def test_a_wrapped_rule_says_what_the_rule_inside_says():
    class Told(Rule):
        name = "told"
        backward_reads = ("k", "beta")

        def __init__(self, bits):
            self.bits = bits

        def why_not_heads(self, heads):
            return f"not {heads} heads"

        def kept_to_recompute(self, saved):
            return "kept"

    inside = Told(Bits.DETERMINISTIC)
    of_steps = RuleOfSteps(inside, 2)
    for rule in (of_steps, RuleByLevel(inside)):
        assert rule.name == "told" and rule.bits is Bits.DETERMINISTIC
        assert rule.backward_reads == inside.backward_reads
    half = HalfOperands(Told(Bits.FREE))
    assert half.name == "told" and half.backward_reads == inside.backward_reads
    for rule in (of_steps, half):
        assert rule.why_not_heads(3) == "not 3 heads"
        assert rule.kept_to_recompute(None) == "kept"
    assert half.begin == half.rule.begin and half.recompute == half.rule.recompute


class Saving(PlainRule):
    """Saves a tensor for each document, and wants these back."""

    def __init__(self):
        super().__init__()
        self.given_back = []  # the documents of each backward
        self.kept = []  # whether each forward kept tensors

    @staticmethod
    def saved(inputs, documents):
        return SavedForBackward(inputs.v.split(documents.lengths, 1), documents.lengths)

    def begin(self, inputs, documents):
        begun = super().begin(inputs, documents)
        run, saved = begun.run, self.saved(inputs, documents)

        def run_and_save(initial=None, *, keep=True, final=False):
            self.kept.append(keep)
            made = run(initial, keep=keep, final=final)
            return made._replace(saved=saved) if keep else made

        begun.run = run_and_save
        return begun

    def begin_backward(self, d_o, inputs, saved, documents):
        tensors, lengths, _ = self.saved(inputs, documents)
        assert saved.other_values == lengths
        for mine, given in zip(tensors, saved.tensors, strict=True):
            assert torch.equal(mine, given)
        self.given_back.append(lengths)
        return super().begin_backward(d_o, inputs, saved, documents)


def test_a_wrapped_rule_gets_back_what_it_saved():
    tree = Tree((-1, 0, 0, 1), (3, 5, 6, 7)).documents
    for rule, make, documents, of_inside in (
        (RuleByLevel(Saving()), delta_inputs, tree, [(7,), (5, 6), (3,)]),
        (RuleOfSteps(Saving(), STEPS), inputs_of_steps, documents_of((2, 3)), [(6, 9)]),
    ):
        inputs = make(1.0, 1, documents.total_tokens)
        o, _, saved = rule.begin(inputs, documents).run()
        backward_of(rule, inputs, o, saved, documents).run()
        assert rule.rule.given_back == of_inside
        assert not rule.begin(inputs, documents).run(keep=False).saved.tensors
        runs = len(of_inside)
        assert rule.rule.kept == [True] * runs + [False] * runs
