"""FlashQLA's rule around stand-ins of its kernels in plain torch: what goes where, on a CPU."""

from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch

from megatron_gdn.gdn.flash_qla import plan as flash_qla_plan
from megatron_gdn.gdn.flash_qla import plan as flash_qla_static
from megatron_gdn.gdn.flash_qla import rule as flash_qla
from megatron_gdn.gdn.flash_qla import states as flash_qla_states
from megatron_gdn.gdn.half import HalfOperands
from megatron_gdn.gdn.rule import RuleInputs
from megatron_gdn.ops.state_maps.parts import CHUNK, entering_states, leaving_gradients
from megatron_gdn.ops.static_documents import StaticDocuments
from tests.ops.delta_rule.states import (
    NAMES,
    Oracle,
    assert_rows_equal_one_row,
    backward_of,
    by_key_head,
    documents_of,
    forwards_from,
    run_in_segments,
    run_whole,
)

HEADS, K, V = (2, 4), 3, 5


@dataclass
class StandInCache:
    """What FlashQLA's backward takes from its forward."""

    h0: torch.Tensor
    mark: int


@dataclass
class StandInContext:
    cu_seqlens: torch.Tensor | None = None
    is_intra: bool = False
    intra_cp_cu_seqlens: torch.Tensor | None = None
    seq_map_r2c: torch.Tensor | None = None
    seq_map_c2r: torch.Tensor | None = None
    ht_mask: torch.Tensor | None = None
    ht_mask_bwd: torch.Tensor | None = None


class Entered(NamedTuple):
    """In place of the states at chunks: those that enter, which the backward goes on from."""

    state: torch.Tensor | None


class StandIn:
    """The stages that the rule calls, each by the plain rule over the sequences it is given.

    ``cut`` is what FlashQLA's cost model answers.
    """

    CHUNK_SIZE, mark = CHUNK, 7
    FlashQLACPContext = StandInContext

    def __init__(self, cut=None) -> None:
        self.cut, self.passes = cut, Counter()

    def build_cp_context(self, cu_seqlens=None, **_):
        if cu_seqlens is None or self.cut is None:
            return StandInContext(cu_seqlens)
        return StandInContext(cu_seqlens, True, torch.tensor(self.cut, dtype=torch.int32))

    def chunk_local_cumsum(self, g, chunk_size, cu_seqlens=None, reverse=False, zero_last_chunk=0):
        if reverse:
            return g  # the stand-in of the backward has per-token gradients already
        return g + 1  # to the other stand-ins, which take it away again

    def kkt_solve(self, k, b, cu_seqlens, chunk_size):
        return k.new_zeros(*b.shape, chunk_size)

    def get_warmup_chunks_bidi(self, g, cu_seqlens, ht_mask_fwd, ht_mask_bwd, **_):
        assert not ht_mask_fwd.any() and not ht_mask_bwd.any()
        chunks = ((cu_seqlens.diff() + CHUNK - 1) // CHUNK)[:, None].repeat(1, g.shape[-1])
        short = torch.where(cu_seqlens.diff()[:, None] % CHUNK > 0, 1, chunks)
        return short, chunks, None, None

    def _rule(self, k, v, b, g, cu_seqlens, q=None):
        rows, tokens = k.shape[:2]
        lengths = (tokens,) * rows if cu_seqlens is None else cu_seqlens.diff().tolist()
        return Oracle(RuleInputs(k if q is None else q, k, v, g - 1, b), lengths)

    def fused_gdr_h(self, k, v, a, g, b, initial_state=None, num_warmup_chunks=None,
                    cu_seqlens=None, **_):  # fmt: skip
        oracle = self._rule(k, v, b, g, cu_seqlens)
        if num_warmup_chunks is None:
            self.passes["states alone"] += 1
            return Entered(initial_state), None, None
        assert torch.equal(
            num_warmup_chunks[:, :1], (cu_seqlens.diff()[:, None] + CHUNK - 1) // CHUNK
        )
        return None, oracle.forward()[1].float(), oracle.through().float()

    def fused_gdr_fwd(
        self, q, k, v, a, g, b, cp_seq_map, raw_cu_seqlens, initial_state=None,
        output_final_state=False, cu_seqlens=None, output_h=False, **_,
    ):  # fmt: skip
        o, leaving = self._rule(k, v, b, g, cu_seqlens, q).forward(initial_state)
        if output_h:  # as fused_gdr_h gives them to the stand-in of the backward
            self.passes["states by the forward"] += 1
            return o, Entered(initial_state), None
        if not output_final_state:
            return o, None, None
        # The last part of a sequence writes the state that leaves the sequence.
        last = leaving.new_full((len(raw_cu_seqlens) - 1, *leaving.shape[1:]), float("nan"))
        for part, owner in enumerate(cp_seq_map.tolist()):
            if cu_seqlens[part + 1] == raw_cu_seqlens[owner + 1]:
                last[owner] = leaving[part]
        return o, None, last.float()

    def fused_gdr_dh(self, q, k, a, g, b, do, dht, cu_seqlens, num_warmup_chunks, **_):
        oracle = self._rule(k, torch.zeros_like(do), b, g, cu_seqlens, q)
        return None, oracle.backward(do, d_final=dht)[1].float()

    def fused_gdr_bwd(self, q, k, v, a, g, b, do, dht, h, cu_seqlens=None, **_):
        grads, d_initial = self._rule(k, v, b, g, cu_seqlens, q).backward(do, h.state, dht)
        return *grads, d_initial

    def chunk_gated_delta_rule_fwd(
        self, q, k, v, g, beta, cp_context, cu_seqlens, output_final_state, enable_fwd_cp_cache, **_
    ):
        assert cu_seqlens is cp_context.cu_seqlens
        o, last = self._rule(k, v, beta, g + 1, cu_seqlens, q).forward()
        last, cache = last if output_final_state else None, None
        if cp_context.is_intra and enable_fwd_cp_cache:
            parts = self._parts(cp_context, k.device)
            of_parts = self._rule(k, v, beta, g + 1, parts.offsets)
            entering = entering_states(of_parts.forward()[1], of_parts.through(), parts, None)
            cache = StandInCache(entering, self.mark)
        return g + 1, beta.new_zeros(*beta.shape, CHUNK), o, None, last, cache

    def _parts(self, context, device):
        return flash_qla_plan.Parts.build(
            context.cu_seqlens.tolist(), context.intra_cp_cu_seqlens.tolist(), device
        )

    def cp_preprocess_bwd(
        self, context, q, k, v, a, g, beta, do, dht, initial_state, cp_cache=None, **_
    ):
        if not context.is_intra:
            return initial_state, dht
        parts = self._parts(context, k.device)
        assert cp_cache is None or cp_cache.mark == self.mark
        oracle = self._rule(k, v, beta, g, parts.offsets, q)
        local, through, d_local = oracle.forward()[1], oracle.through(), oracle.backward(do)[1]
        return (
            entering_states(local, through, parts, initial_state),
            leaving_gradients(d_local, through, parts, dht),
        )


@pytest.fixture
def rule(request, monkeypatch):
    """A rule over stand-ins; by parameter: whether it is batch invariant, where the model cuts."""
    invariant, cut = request.param
    stand_in = StandIn(cut)
    for module in (flash_qla, flash_qla_plan, flash_qla_states, flash_qla_static):
        monkeypatch.setattr(module, "stages", lambda: stand_in)
    monkeypatch.setattr(flash_qla_plan, "_remember_chunks", lambda *_: None)
    monkeypatch.setattr(flash_qla_plan, "parts_by_length", lambda *_: cut)
    monkeypatch.setattr(flash_qla_plan, "multiprocessors", lambda: 132)
    forget_plans()
    yield flash_qla.FlashQlaRule(batch_invariant=invariant)
    forget_plans()


def forget_plans() -> None:
    for known in (
        flash_qla_plan.plan_of,
        flash_qla_plan.plan_of_rows,
        flash_qla_plan.plan_of_whole,
    ):
        known.cache_clear()


def random_inputs(S, B=1):
    make = torch.Generator().manual_seed(3)
    G, H = HEADS

    def normal(*shape):
        return torch.randn(B, S, *shape, generator=make, dtype=torch.float64)

    q, k = (torch.nn.functional.normalize(normal(G, K), dim=-1) for _ in range(2))
    inputs = RuleInputs(q, k, normal(H, V), -normal(H).abs() * 0.05, normal(H).sigmoid())
    return inputs, normal(H, V)


def check(got, exact):
    for name, a, b in zip(NAMES[: len(exact)], got, exact, strict=True):
        # fp32 states between the parts; everything else is fp64.
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")


LENGTHS, CUT = (130, 1, 300), [0, 64, 130, 131, 259, 431]
KINDS = {"uncut": (False, None), "cut": (False, CUT), "invariant": (True, CUT)}


@pytest.mark.parametrize("rule", KINDS.values(), ids=KINDS, indirect=True)
def test_documents_with_and_without_states(rule):
    inputs, d_o = random_inputs(sum(LENGTHS))
    documents = documents_of(LENGTHS)
    apart = Oracle(inputs, LENGTHS)
    check(run_whole(rule, inputs, d_o, documents), [apart.forward()[0], *apart.backward(d_o)[0]])
    joined = Oracle(inputs, (sum(LENGTHS),))
    got = run_in_segments(rule, inputs, d_o, documents)
    check(got, [joined.forward()[0], *joined.backward(d_o)[0]])


def check_fixed_buffers(rule, several):
    """States enter documents in one set of buffers, which is filled for one batch after another."""
    tokens = sum(several[0])
    inputs, d_o = random_inputs(tokens)
    joined, static = Oracle(inputs, (tokens,)), StaticDocuments(tokens, 6)
    expected = [joined.forward()[0], *joined.backward(d_o)[0]]
    for lengths in several:
        static.fill(documents_of(lengths).offsets)
        check(run_in_segments(rule, inputs, d_o, static), expected)


FILLS = (LENGTHS, (431,), (64, 64, 64, 64, 64, 111), (0, 130, 0, 301))


@pytest.mark.parametrize("rule", KINDS.values(), ids=KINDS, indirect=True)
def test_states_enter_documents_in_fixed_buffers(rule):
    check_fixed_buffers(rule, FILLS)


def check_fp16_operands(rule, lengths):
    """Powers of two go in and out without a trace, around a rule that computes in fp64.

    With gradients of 10 bits, which fp16 holds even where the last sequence's are 2^8 larger.
    """
    inputs, d_o = random_inputs(sum(lengths))
    d_o = (d_o * 2**6).round() * 2.0**-14
    d_o[:, -lengths[-1] :] *= 2.0**8
    rule, one = HalfOperands(rule), documents_of((sum(lengths),))
    oracle = Oracle(inputs, (sum(lengths),))
    exact = [oracle.forward()[0], *oracle.backward(d_o)[0]]
    for run, documents in ((run_whole, one), (run_in_segments, documents_of(lengths))):
        o, *grads = run(rule, inputs, d_o * 2.0**-40, documents)
        check([o, *(x * 2.0**40 for x in grads)], exact)


@pytest.mark.parametrize("rule", [KINDS["uncut"], KINDS["cut"]], ids=["uncut", "cut"],
                         indirect=True)  # fmt: skip
def test_fp16_operands_leave_no_trace(rule):
    check_fp16_operands(rule, LENGTHS)


ROWS = {"uncut": (False, None), "cut": (False, [0, 64, 100, 164, 200]),
        "invariant": (True, [0, 64, 100, 164, 200])}  # fmt: skip


@pytest.mark.parametrize("rule", [ROWS["cut"]], ids=["cut"], indirect=True)
def test_few_rows_and_heads_run_as_one_cut_row(rule):
    inputs, _ = random_inputs(100, B=2)
    plan = rule.begin(inputs, None).run().saved.plan.plan
    assert plan.context.is_intra and plan.parts.offsets.tolist() == ROWS["cut"][1]


@pytest.mark.parametrize("rule", ROWS.values(), ids=ROWS, indirect=True)
def test_batch_rows_with_and_without_states(rule):
    inputs, d_o = random_inputs(100, B=2)
    oracle = Oracle(inputs, (100, 100))
    check(run_whole(rule, inputs, d_o), [oracle.forward()[0], *oracle.backward(d_o)[0]])

    initial, d_final = (torch.randn(2, HEADS[1], K, V, dtype=torch.float64) for _ in range(2))
    grads, d_initial = oracle.backward(d_o, initial, d_final)
    for maps_first in (True, False):
        forward = rule.begin(inputs, None)
        if maps_first:
            local, through = forward.state_map()
            torch.testing.assert_close(local.double(), oracle.forward()[1], rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(through.double(), oracle.through(), rtol=1e-5, atol=1e-6)
        o, _, saved = forward.run(initial)
        backward = backward_of(rule, inputs, d_o, saved)
        if maps_first:
            d_local = backward.d_initial()
            torch.testing.assert_close(
                d_local + through.double().mT @ d_final, d_initial, rtol=1e-5, atol=1e-6
            )
        got = backward.run(initial, d_final)
        check([o, *by_key_head(got, HEADS[0])], [oracle.forward(initial)[0], *grads])

    saved = rule.begin(inputs, None).run().saved
    backward = backward_of(rule, inputs, d_o, saved)
    d_local = backward.d_initial()
    torch.testing.assert_close(d_local.double(), oracle.backward(d_o)[1], rtol=1e-5, atol=1e-6)


# Lengths of documents, or of two batch rows.
FINALS = {"rows": None, "uncut": (130, 0, 1, 300, 0), "cut": (2500, 0, 2100)}


def check_final_states(rule, lengths):
    """From zero and from given states, after the map was asked for or not."""
    B, S = (2, 100) if lengths is None else (1, sum(lengths))
    inputs, _ = random_inputs(S, B)
    documents = None if lengths is None else documents_of(lengths)
    exact = Oracle(inputs, [n for n in lengths or (S,) * B if n])
    make = torch.Generator().manual_seed(4)
    initial = torch.randn(exact.zeros().shape, generator=make, dtype=torch.float64)
    for start, made in forwards_from(rule, inputs, documents, initial):
        o, final = exact.forward(start)
        check([made.o, made.final.double()], [o, final])


@pytest.mark.parametrize("rule", ROWS.values(), ids=ROWS, indirect=True)
def test_final_states_of_batch_rows(rule):
    check_final_states(rule, FINALS["rows"])


@pytest.mark.parametrize("rule", KINDS.values(), ids=KINDS, indirect=True)
def test_final_states_of_documents(rule):
    check_final_states(rule, (130, 0, 1, 300, 0))


def check_rows_equal_one_row(rule, lengths):
    inputs, d_o = random_inputs(sum(lengths))
    for run in (run_whole, run_in_segments):
        assert_rows_equal_one_row(run, rule, inputs, d_o, documents_of(lengths))


@pytest.mark.parametrize("rule", ROWS.values(), ids=ROWS, indirect=True)
def test_documents_over_batch_rows_equal_one_row(rule):
    check_rows_equal_one_row(rule, (100, 0, 100))


@pytest.mark.parametrize("rule", ROWS.values(), ids=ROWS, indirect=True)
def test_gradients_after_a_forward_from_zero_flow_through_both_ends(rule):
    """A forward that FlashQLA ran itself: its backward still takes d_final and gives d_initial."""
    inputs, d_o = random_inputs(100, B=2)
    oracle = Oracle(inputs, (100, 100))
    d_final = torch.randn(2, HEADS[1], K, V, dtype=torch.float64)
    grads, d_initial = oracle.backward(d_o, None, d_final)
    for documents in (None, documents_of((100, 100))):
        o, _, saved = rule.begin(inputs, documents).run()
        backward = backward_of(rule, inputs, d_o, saved, documents)
        got = backward.d_initial() + oracle.through().mT @ d_final
        torch.testing.assert_close(got, d_initial, rtol=1e-5, atol=1e-6)
        got = backward.run(None, d_final)
        check([o, *by_key_head(got, HEADS[0])], [oracle.forward()[0], *grads])


def run_again(rule, inputs, d_o, documents=None, initial=None, map_first=False):
    """As ``run_whole``, with nothing of the forward kept but what it says."""
    begun = rule.begin(inputs, documents)
    if map_first:
        begun.state_map()
    first = begun.run(initial)
    kept = rule.kept_to_run_again(first.saved)
    again = rule.run_again(inputs, kept, documents, initial)
    assert torch.equal(again.o, first.o)
    grads = backward_of(rule, inputs, d_o, again.saved, documents).run(initial)
    return [again.o, *by_key_head(grads, inputs.k.shape[2])]


@pytest.mark.parametrize("rule", KINDS.values(), ids=KINDS, indirect=True)
def test_a_second_run_of_documents_gives_what_the_backward_needs(rule):
    inputs, d_o = random_inputs(sum(LENGTHS))
    documents, apart = documents_of(LENGTHS), Oracle(inputs, LENGTHS)
    exact = [apart.forward()[0], *apart.backward(d_o)[0]]
    check(run_again(rule, inputs, d_o, documents), exact)
    check(run_again(rule, inputs, d_o, documents, map_first=True), exact)
    initial = torch.randn(len(LENGTHS), HEADS[1], K, V, dtype=torch.float64)
    exact = [apart.forward(initial)[0], *apart.backward(d_o, initial)[0]]
    for map_first in (False, True):
        check(run_again(rule, inputs, d_o, documents, initial, map_first), exact)
    passes = flash_qla.stages().passes
    assert passes["states alone"] == 0 and passes["states by the forward"] == 4


@pytest.mark.parametrize("rule", ROWS.values(), ids=ROWS, indirect=True)
def test_a_second_run_of_batch_rows_gives_what_the_backward_needs(rule):
    inputs, d_o = random_inputs(100, B=2)
    oracle = Oracle(inputs, (100, 100))
    check(run_again(rule, inputs, d_o), [oracle.forward()[0], *oracle.backward(d_o)[0]])
    initial = torch.randn(2, HEADS[1], K, V, dtype=torch.float64)
    exact = [oracle.forward(initial)[0], *oracle.backward(d_o, initial)[0]]
    check(run_again(rule, inputs, d_o, None, initial), exact)


@pytest.mark.parametrize("rule", KINDS.values(), ids=KINDS, indirect=True)
def test_a_second_run_keeps_nothing_per_token(rule):
    inputs, _ = random_inputs(sum(LENGTHS))
    saved = rule.begin(inputs, documents_of(LENGTHS)).run().saved
    kept = rule.kept_to_run_again(saved).tensors
    assert all(x.shape[1] == inputs.k.shape[1] for x in saved.tensors[:2])
    assert not any(torch.is_tensor(x) and x.shape[:2] == inputs.k.shape[:2] for x in kept)
