"""How FlashQLA's rule cuts rows and, on the grid, no sequence. On a CPU, with
stand-ins."""

import random
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

from megatron_gdn.gdn.flash_qla import plan as flash_qla_plan
from megatron_gdn.gdn.flash_qla import rule as flash_qla
from megatron_gdn.gdn.flash_qla import states as flash_qla_states
from megatron_gdn.ops import Documents
from megatron_gdn.ops.delta_rule.base import RuleInputs
from megatron_gdn.ops.rules.base import Bits
from megatron_gdn.ops.state_maps.segments import CHUNK, cut_by_length
from megatron_gdn.ops.static_documents import StaticDocuments
from tests.ops.delta_rule.states import (
    Oracle,
    backward_of,
    by_key_head,
    documents_of,
    random_inputs,
)

from .stand_ins import FlashQlaStandIn, StandInContext, flash_qla_rule, forget_plans
from .test_wiring import HEADS, check, exact_run, random_states

FEWEST = 4  # chunks of a segment, as in FlashQLA's cost model


class OneWave(FlashQlaStandIn):
    """A cost model that cuts sequences so that segments times heads are one wave of the
    GPU."""

    def __init__(self, multiprocessors: int) -> None:
        super().__init__()
        self.multiprocessors = multiprocessors

    def build_cp_context(self, cu_seqlens, num_v_heads=0, **_):
        chunks = [-(-n // CHUNK) for n in cu_seqlens.diff().tolist()]
        step = max(FEWEST, -(-sum(chunks) * num_v_heads // self.multiprocessors))
        if step >= max(chunks):
            return StandInContext()
        offsets = [
            at
            for start, end in pairwise(cu_seqlens.tolist())
            for at in range(start, end, step * CHUNK)
        ]
        offsets = torch.tensor([*offsets, int(cu_seqlens[-1])], dtype=torch.int32)
        return StandInContext(True, offsets)


def empty(rows, tokens, heads):
    x = torch.zeros(1).expand(rows, tokens, heads, 1)
    return RuleInputs(x, x, x, x[..., 0], x[..., 0])


@pytest.fixture
def planned(monkeypatch):
    def plan(rows, tokens, heads, multiprocessors, *, invariant=False, states=False):
        stand_in = OneWave(multiprocessors)
        for module in (flash_qla, flash_qla_plan):
            monkeypatch.setattr(module, "kernels", lambda: stand_in)
        monkeypatch.setattr(flash_qla_plan, "multiprocessors", lambda: multiprocessors)
        forget_plans()
        return flash_qla.FlashQlaRule(Bits(invariant)).plan(
            empty(rows, tokens, heads), None, states
        )

    yield plan
    forget_plans()


GRID = [
    (rows, tokens, heads, multiprocessors)
    for rows in (1, 2, 3, 4, 8, 16)
    for tokens in (1, 63, 64, 300, 1024, 4096, 4100)
    for heads in (2, 4, 8, 12, 32)
    for multiprocessors in (78, 132)
]
GRID += [(4, 4096, 8, 32), (4, 4096, 8, 33)]  # 32 blocks fill a GPU of 32


def test_every_token_lies_in_one_segment_and_every_row_begins_one(planned):
    for rows, tokens, heads, multiprocessors in GRID:
        plan = planned(rows, tokens, heads, multiprocessors)
        if plan is None:
            continue
        offsets = plan.offsets.tolist()
        assert offsets[0] == 0 and offsets[-1] == rows * tokens
        # so every token is in exactly one segment
        assert all(a < b for a, b in pairwise(offsets))
        starts = [row * tokens for row in range(rows + 1)]
        assert plan.sequence_offsets.tolist() == starts
        assert set(starts) <= set(offsets)
        assert plan.sequence_of_segment.tolist() == [
            at // tokens for at in offsets[:-1]
        ]


def test_rows_are_cut_to_one_wave_where_they_leave_multiprocessors_idle(planned):
    cut = 0
    for rows, tokens, heads, multiprocessors in GRID:
        plan = planned(rows, tokens, heads, multiprocessors)
        chunks = -(-tokens // CHUNK)
        step = max(FEWEST, -(-rows * chunks * heads // multiprocessors))
        if rows * heads >= multiprocessors or step >= chunks:
            # A single row is a sequence of its own kernels; several lie side by side.
            assert plan is None if rows > 1 else plan.are_sequences
            continue
        cut += 1
        assert not plan.are_sequences
        assert len(plan.sequence_of_segment) == rows * -(-chunks // step)
        assert len(plan.first_segment) == rows + 1
    assert cut > len(GRID) / 6  # the grid is worth its name


def test_deterministic_mode_and_states_keep_their_own_cut(planned):
    for rows, tokens, heads, multiprocessors in GRID:
        sequences = tuple(row * tokens for row in range(rows + 1))
        plan = planned(rows, tokens, heads, multiprocessors, invariant=True)
        assert (
            plan.offsets.tolist()
            == cut_by_length(
                Documents(sequences, torch.device("cpu")), heads
            ).offsets.tolist()
        )
        plan = planned(rows, tokens, heads, multiprocessors, states=True)
        assert plan.sequence_offsets.tolist() == list(sequences)


@pytest.mark.parametrize("bits", [Bits.FREE, Bits.DETERMINISTIC])
def test_a_sequence_in_fixed_buffers_is_cut_by_its_length_and_not_with_a_state(bits):
    rule = flash_qla.FlashQlaRule(bits)

    def planned_for(tokens, offsets, states):
        static = StaticDocuments(tokens, 3)
        static.fill(offsets)
        return rule.plan(empty(1, tokens, 4), static, states)

    offsets = (0, 5000, 5010, 8192)
    assert planned_for(8192, offsets, states=True).are_sequences
    cut = planned_for(8192, offsets, states=False)
    exact = cut_by_length(Documents(offsets, torch.device("cpu")), 4).offsets
    assert not cut.are_sequences and len(exact) > len(offsets)
    assert cut.offsets.unique().tolist() == exact.tolist()
    assert planned_for(448, (0, 400, 448), states=False).are_sequences  # all too short
    with pytest.raises(
        NotImplementedError, match="at least 64 tokens per rank, not 63"
    ):
        planned_for(63, (0, 63), states=True)
    forget_plans()


def test_one_plan_serves_every_layer_and_the_backward(planned):
    planned(4, 4096, 8, 132)
    rule = flash_qla.FlashQlaRule()
    inputs = empty(4, 4096, 8)
    assert rule.plan(inputs, None, False) is rule.plan(inputs, None, False)


@pytest.fixture
def rule(request, monkeypatch):
    yield flash_qla_rule(monkeypatch, cut=request.param, bits=Bits.ON_GRID)
    forget_plans()


aligned = pytest.mark.parametrize("rule", [(0, 64, 128)], indirect=True)


@aligned
def test_the_plan_of_a_sequence_is_the_sequence_whatever_lies_beside_it(rule):
    draw = random.Random(0)
    for heads in (1, 4, 32):
        for _ in range(20):
            lengths = [draw.randint(0, 9000) for _ in range(draw.randint(1, 9))]
            for states in (False, True):
                plan = rule.plan(
                    empty(1, sum(lengths), heads), documents_of(lengths), states
                )
                expected = [
                    0,
                    *torch.tensor([n for n in lengths if n]).cumsum(0).tolist(),
                ]
                assert (
                    plan.offsets.tolist() == plan.sequence_offsets.tolist() == expected
                )
                assert plan.are_sequences


@pytest.mark.parametrize("rule", [(0, 64, 192, 300)], indirect=True)
def test_the_backward_in_segments_begins_from_the_states_that_entered(rule):
    inputs, d_o = random_inputs(300)
    oracle = Oracle(inputs, (300,))
    initial, d_final = random_states(1)
    o, _, saved = rule.begin(inputs, None).run(initial)
    begun = backward_of(rule, inputs, d_o, saved)
    d_initial = oracle.backward(d_o, initial)[1]
    torch.testing.assert_close(
        begun.d_initial().double(), d_initial, rtol=1e-5, atol=1e-5
    )
    grads = by_key_head(begun.run(initial, d_final), HEADS[0])
    check([o, *grads], exact_run(oracle, d_o, initial, d_final))


@aligned
def test_a_sequence_goes_on_from_the_state_of_any_chunk(rule):
    inputs, _ = random_inputs(300)
    exact, final = Oracle(inputs, (300,)).forward()
    state = None
    made = []
    for start, end in ((0, 64), (64, 256), (256, 300)):
        piece = RuleInputs(*(x[:, start:end] for x in inputs))
        o, state, saved = rule.begin(piece, None).run(state, keep=False, final=True)
        assert not saved.tensors
        made.append(o)
    torch.testing.assert_close(torch.cat(made, 1), exact, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(state.to(final.dtype), final, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("rule", [(0, 64, 192, 300)], indirect=True)
def test_the_backward_is_cut_for_the_value_heads(rule, monkeypatch):
    """Also where it cuts again, since the forward had no initial states."""
    heads = []
    cut = flash_qla.plan_of
    monkeypatch.setattr(
        flash_qla,
        "plan_of",
        lambda documents, H, *more: heads.append(H) or cut(documents, H, *more),
    )
    inputs, d_o = random_inputs(300)
    _, _, saved = rule.begin(inputs, None).run()
    backward_of(rule, inputs, d_o, saved).d_initial()
    assert set(heads) == {HEADS[1]}


@pytest.mark.parametrize("rule", [(0, 64, 192, 300)], indirect=True)
@pytest.mark.parametrize("begun_first", [False, True])
def test_gradients_follow_a_d_o_that_was_scaled(rule, begun_first):
    inputs, d_o = random_inputs(300)
    initial, d_final = random_states(1)
    _, _, saved = rule.begin(inputs, None).run(initial)
    factor = torch.tensor([2.0, 4.0, 0.5, 1.0][: HEADS[1]]).view(-1, 1, 1)
    expected = backward_of(rule, inputs, d_o * factor[..., 0], saved)
    expected = expected.run(initial, d_final)
    backward = backward_of(rule, inputs, d_o, saved)
    if begun_first:
        backward.d_initial()
    backward.d_o = backward.d_o * factor[..., 0]
    backward.scale_with_d_o(factor)
    for got, exact in zip(backward.run(initial, d_final), expected, strict=True):
        if exact is not None:
            torch.testing.assert_close(got, exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rule", [(0, 64, 192, 300)], indirect=True)
def test_saved_tensors_are_free_while_the_backwards_kernel_runs(rule, monkeypatch):
    inputs, d_o = random_inputs(300)
    initial, d_final = random_states(1)
    _, _, saved = rule.begin(inputs, None).run(initial)
    backward = backward_of(rule, inputs, d_o, saved)
    backward.d_initial()
    kernel = flash_qla.gradients
    held = []

    def noted(*args, **more):
        held.extend(name for name, x in vars(backward).items() if "saved" in name and x)
        return kernel(*args, **more)

    monkeypatch.setattr(flash_qla, "gradients", noted)
    backward.run(initial, d_final)
    assert held == []


def test_generation_starts_its_kernel_from_zeros():
    """So that training and generation run the same kernel."""
    inputs = empty(1, 5, 3)
    segments = SimpleNamespace(sequence_of_segment=torch.zeros(2))
    made = flash_qla_states.initial_or_zero(None, inputs, segments)
    assert torch.equal(made, torch.zeros(2, 3, 1, 1)) and made.dtype == torch.float32
    given = torch.ones(2, 3, 1, 1)
    assert flash_qla_states.initial_or_zero(given, inputs, None) is given
