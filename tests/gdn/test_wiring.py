"""FlashQLA's rule around stand-ins of its kernels: what goes where, on a CPU."""

import weakref
from types import SimpleNamespace

import pytest
import torch

from megatron_gdn.gdn import api
from megatron_gdn.gdn.flash_qla import rule as flash_qla
from megatron_gdn.gdn.flash_qla.states import SavedTensors
from megatron_gdn.gdn.half import HalfOperands
from megatron_gdn.gdn.rule import RuleInputs
from megatron_gdn.ops.delta_rule.fla import segments_of
from megatron_gdn.ops.rules.base import Bits
from megatron_gdn.ops.static_documents import StaticDocuments
from tests.ops.delta_rule import states
from tests.ops.delta_rule.states import random_inputs

from .stand_ins import flash_qla_rule, forget_plans

HEADS = (2, 4)
K = 3
V = 5
LENGTHS = (130, 1, 300)
CUT = [0, 64, 130, 131, 259, 431]
CUT_ROWS = [0, 64, 100, 164, 200]
# Whether the rule is batch invariant, and where FlashQLA's cost model cuts.
UNCUT = (Bits.FREE, None)
KINDS = {
    "uncut": UNCUT,
    "cut": (Bits.FREE, CUT),
    "invariant": (Bits.DETERMINISTIC, CUT),
    "on the grid": (Bits.ON_GRID, CUT),
}
ROWS = {
    "uncut": UNCUT,
    "cut": (Bits.FREE, CUT_ROWS),
    "invariant": (Bits.DETERMINISTIC, CUT_ROWS),
    "on the grid": (Bits.ON_GRID, CUT_ROWS),
}


@pytest.fixture
def rule(request, monkeypatch):
    yield flash_qla_rule(monkeypatch, *request.param)
    forget_plans()


def of(cases: dict, *names: str):
    """These values for every rule of ``cases``."""
    rows = [value if names else (value,) for value in cases.values()]
    return pytest.mark.parametrize(("rule", *names), rows, ids=cases, indirect=["rule"])


of_kinds = of(KINDS)
of_rows = of(ROWS)


def random_states(count):
    made = torch.randn(2, count, HEADS[1], K, V, dtype=torch.float64)
    return states.transposed_in_memory(made)


def close(got, exact, name="") -> None:
    """fp32 states between the segments; everything else is fp64."""
    torch.testing.assert_close(
        got.double(), exact, rtol=1e-5, atol=1e-6, msg=lambda m: f"{name}: {m}"
    )


def check(got, exact):
    for name, a, b in zip(states.NAMES[: len(exact)], got, exact, strict=True):
        assert a.dtype == b.dtype
        close(a, b, name)


def exact_run(oracle, d_o, initial=None, d_final=None):
    return [oracle.forward(initial)[0], *oracle.backward(d_o, initial, d_final)[0]]


@of_kinds
def test_documents_with_and_without_states(rule):
    inputs, d_o = random_inputs(sum(LENGTHS))
    documents = states.documents_of(LENGTHS)
    apart = states.Oracle(inputs, LENGTHS)
    joined = states.Oracle(inputs, (sum(LENGTHS),))
    check(states.run_whole(rule, inputs, d_o, documents), exact_run(apart, d_o))
    check(states.run_in_segments(rule, inputs, d_o, documents), exact_run(joined, d_o))


@of({"uncut": UNCUT})
def test_documents_of_whole_chunks_with_states(rule):
    inputs, d_o = random_inputs(256)
    documents = states.documents_of((128, 64, 64))
    exact = exact_run(states.Oracle(inputs, (256,)), d_o)
    check(states.run_in_segments(rule, inputs, d_o, documents), exact)


@of_kinds
def test_states_enter_documents_in_fixed_buffers(rule):
    tokens = sum(LENGTHS)
    inputs, d_o = random_inputs(tokens)
    expected = exact_run(states.Oracle(inputs, (tokens,)), d_o)
    static = StaticDocuments(tokens, 6)
    for lengths in (LENGTHS, (431,), (64, 64, 64, 64, 64, 111), (0, 130, 0, 301)):
        static.fill(states.documents_of(lengths).offsets)
        check(states.run_in_segments(rule, inputs, d_o, static), expected)


def test_fixed_buffers_of_more_tokens_than_fla_counts_are_refused():
    inputs = RuleInputs(*[torch.empty(1, 2**20, 32, 128, device="meta")] * 5)
    with pytest.raises(NotImplementedError, match="at most 524288 tokens per rank"):
        segments_of(inputs, StaticDocuments(2**20, 2))


@of({"uncut": UNCUT, "cut": KINDS["cut"]})
def test_fp16_operands_leave_no_trace(rule):
    """Around fp64, with gradients of 10 bits, which fp16 holds at two sizes."""
    inputs, d_o = random_inputs(sum(LENGTHS))
    d_o = (d_o * 2**6).round() * 2.0**-14
    d_o[:, -LENGTHS[-1] :] *= 2.0**8
    rule = HalfOperands(rule)
    whole = (sum(LENGTHS),)
    exact = exact_run(states.Oracle(inputs, whole), d_o)
    for run, lengths in ((states.run_whole, whole), (states.run_in_segments, LENGTHS)):
        documents = states.documents_of(lengths)
        o, *grads = run(rule, inputs, d_o * 2.0**-40, documents)
        check([o, *(x * 2.0**40 for x in grads)], exact)


@of({"cut": ROWS["cut"]})
def test_few_rows_and_heads_run_as_one_cut_row(rule):
    inputs, _ = random_inputs(100, B=2)
    assert (
        rule.begin(inputs, None).run().saved.other_values.offsets.tolist() == CUT_ROWS
    )


@of_rows
def test_batch_rows_with_and_without_states(rule):
    inputs, d_o = random_inputs(100, B=2)
    oracle = states.Oracle(inputs, (100, 100))
    check(states.run_whole(rule, inputs, d_o), exact_run(oracle, d_o))

    initial, d_final = random_states(2)
    exact = exact_run(oracle, d_o, initial, d_final)
    for maps_first in (True, False):
        forward = rule.begin(inputs, None)
        if maps_first:
            local, through = forward.state_map()
            close(local, oracle.forward()[1])
            close(through, oracle.through())
        o, _, saved = forward.run(initial)
        backward = states.backward_of(rule, inputs, d_o, saved)
        if maps_first:
            d_initial = backward.d_initial() + through.double().mT @ d_final
            close(d_initial, oracle.backward(d_o, initial, d_final)[1])
        check([o, *states.by_key_head(backward.run(initial, d_final), HEADS[0])], exact)


# Lengths of documents, or None of two batch rows.
FINALS = {f"rows, {name}": (kind, None) for name, kind in ROWS.items()}
FINALS |= {name: (kind, (130, 0, 1, 300, 0)) for name, kind in KINDS.items()}


@of(FINALS, "lengths")
def test_final_states(rule, lengths):
    B, S = (2, 100) if lengths is None else (1, sum(lengths))
    inputs, _ = random_inputs(S, B)
    documents = None if lengths is None else states.documents_of(lengths)
    exact = states.Oracle(inputs, [n for n in lengths or (S,) * B if n])
    make = torch.Generator().manual_seed(4)
    initial = torch.randn(exact.zeros().shape, generator=make, dtype=torch.float64)
    initial = states.transposed_in_memory(initial)
    from_zero = exact.forward()
    from_initial = exact.forward(initial)
    for start, made in states.forwards_from(rule, inputs, documents, initial):
        o, final = from_initial if start is initial else from_zero
        check([made.o, made.final_states.double()], [o, final])


@of_rows
def test_documents_over_batch_rows_equal_one_row(rule):
    inputs, d_o = random_inputs(200)
    for run in (states.run_whole, states.run_in_segments):
        states.assert_rows_equal_one_row(
            run, rule, inputs, d_o, states.documents_of((100, 0, 100))
        )


@of_rows
def test_gradients_after_a_forward_from_zero_flow_through_both_ends(rule):
    """A forward that a package ran itself: its backward still takes d_final and gives
    d_initial."""
    inputs, d_o = random_inputs(100, B=2)
    oracle = states.Oracle(inputs, (100, 100))
    d_final, _ = random_states(2)
    exact = exact_run(oracle, d_o, None, d_final)
    for documents in (None, states.documents_of((100, 100))):
        o, _, saved = rule.begin(inputs, documents).run()
        backward = states.backward_of(rule, inputs, d_o, saved, documents)
        d_initial = backward.d_initial() + oracle.through().mT @ d_final
        close(d_initial, oracle.backward(d_o, None, d_final)[1])
        check([o, *states.by_key_head(backward.run(None, d_final), HEADS[0])], exact)


@of({"cut": KINDS["cut"]})
def test_what_the_backwards_kernel_does_not_read_is_freed_before_it(rule, monkeypatch):
    inputs, d_o = random_inputs(sum(LENGTHS))
    documents = states.documents_of(LENGTHS)
    initial, d_final = random_states(len(LENGTHS))
    stand_in = flash_qla.kernels()
    kernel = stand_in.fused_gdr_bwd

    def watched(**given):
        alive.update(name for name, ref in kept.items() if ref() is not None)
        return kernel(**given)

    monkeypatch.setattr(stand_in, "fused_gdr_bwd", watched)
    alive = set()
    saved = rule.begin(inputs, documents).run(initial).saved
    named = SavedTensors(*saved.tensors)._asdict()
    kept = {name: weakref.ref(x) for name, x in named.items() if x is not None}
    assert {"through", "chunks_after_S_in"} < kept.keys()
    backward = states.backward_of(rule, inputs, d_o, saved, documents)
    del saved, named
    backward.run(initial, d_final)
    assert alive == {"g_sum", "A", "states_in"}


def recompute(rule, inputs, d_o, documents=None, initial=None, map_first=False):
    """As ``run_whole``, with nothing of the forward kept but what it says."""
    begun = rule.begin(inputs, documents)
    if map_first:
        begun.state_map()
    first = begun.run(initial)
    kept = rule.kept_to_recompute(first.saved)
    again = rule.recompute(inputs, kept, documents, initial)
    assert torch.equal(again.o, first.o)
    grads = states.backward_of(rule, inputs, d_o, again.saved, documents).run(initial)
    return [again.o, *states.by_key_head(grads, inputs.k.shape[2])]


@of_kinds
def test_a_second_run_of_documents_gives_what_the_backward_needs(rule):
    inputs, d_o = random_inputs(sum(LENGTHS))
    documents = states.documents_of(LENGTHS)
    apart = states.Oracle(inputs, LENGTHS)
    for initial in (None, random_states(len(LENGTHS))[0]):
        exact = exact_run(apart, d_o, initial)
        for map_first in (False, True):
            check(recompute(rule, inputs, d_o, documents, initial, map_first), exact)
    # On the grid the forward is uncut: the states of the backward's segments are another
    # pass.
    by = "states alone" if rule.bits is Bits.ON_GRID else "states by the forward"
    passes = flash_qla.kernels().passes
    assert {name: passes[name] for name in passes if name.startswith("states")} == {
        by: 4
    }


@of({"uncut": UNCUT})
def test_the_backward_of_uncut_sequences_is_kept_no_state(rule):
    inputs, _ = random_inputs(sum(LENGTHS))
    documents = states.documents_of(LENGTHS)
    for initial in (None, random_states(len(LENGTHS))[0]):
        *per_token, states_in, through = (
            rule.begin(inputs, documents).run(initial).saved.tensors[:4]
        )
        assert all(x.shape[1] == sum(LENGTHS) for x in per_token)
        assert states_in is through is None


@of(
    {
        "cut": KINDS["cut"],
        "invariant": KINDS["invariant"],
        # as beside a sequence that is cut
        "invariant, uncut": (Bits.DETERMINISTIC, None),
    }
)
def test_flash_qla_itself_composes_what_begins_with_zero_states(rule):
    """It then counts shorter memories and leaves out maps that nobody reads."""
    inputs, d_o = random_inputs(sum(LENGTHS))
    documents = states.documents_of(LENGTHS)
    initial, _ = random_states(len(LENGTHS))
    composed = {"maps from zero": 1, "composed states": 1, "composed gradients": 1}
    for start, map_first, maps in (
        (None, False, composed),
        (initial, False, {"maps": 1}),
        (initial, True, {"maps": 1}),
    ):
        flash_qla.kernels().passes.clear()
        forward = rule.begin(inputs, documents)
        if map_first:
            forward.state_map()
        _, _, saved = forward.run(start)
        states.backward_of(rule, inputs, d_o, saved, documents).run(start)
        assert flash_qla.kernels().passes == {**maps, "states alone": 1}


@of({"cut": KINDS["cut"]})
def test_the_function_runs_the_rule_that_is_chosen(rule, monkeypatch):
    choice = SimpleNamespace(rule=rule)
    monkeypatch.setattr(api, "resolve_rule", lambda *_, **__: choice)
    inputs, _ = random_inputs(sum(LENGTHS))
    o, _ = api.gated_delta_rule(*inputs, cu_seqlens=states.documents_of(LENGTHS))
    close(o, states.Oracle(inputs, LENGTHS).forward()[0])
    assert flash_qla.kernels().passes["maps from zero"] == 1
    documents = states.documents_of(LENGTHS)
    scaled, _ = api.gated_delta_rule(*inputs, cu_seqlens=documents, scale=0.2)
    close(scaled, o * 0.2 * K**0.5)
    with pytest.raises(ValueError, match="chunks of 64 tokens"):
        api.gated_delta_rule(*inputs, chunk_size=32)


@of_rows
def test_a_second_run_of_batch_rows_gives_what_the_backward_needs(rule):
    inputs, d_o = random_inputs(100, B=2)
    oracle = states.Oracle(inputs, (100, 100))
    for initial in (None, random_states(2)[0]):
        check(
            recompute(rule, inputs, d_o, None, initial), exact_run(oracle, d_o, initial)
        )


@of_kinds
def test_a_second_run_keeps_nothing_per_token(rule):
    inputs, _ = random_inputs(sum(LENGTHS))
    saved = rule.begin(inputs, states.documents_of(LENGTHS)).run().saved
    kept = rule.kept_to_recompute(saved).tensors
    assert all(x.shape[1] == inputs.k.shape[1] for x in saved.tensors[:2])
    assert not any(
        torch.is_tensor(x) and x.shape[:2] == inputs.k.shape[:2] for x in kept
    )
