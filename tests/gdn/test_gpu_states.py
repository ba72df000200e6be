"""GPU rules with states, bf16 against fp64; other ratios than 16/32 are minutes of
compiling."""

import pytest
import torch

from megatron_gdn.gdn.half import HalfOperands
from megatron_gdn.gdn.rule import RuleInputs, resolve_rule
from megatron_gdn.ops.delta_rule.base import HeadSizes
from megatron_gdn.ops.rules.base import Bits
from megatron_gdn.ops.static_documents import StaticDocuments
from tests.gdn.test_gpu_mixer import errors
from tests.ops.delta_rule import test_gated_delta_rule as chunks
from tests.ops.delta_rule.states import (
    NAMES,
    Oracle,
    backward_of,
    by_key_head,
    documents_of,
    run_in_segments,
    run_on_ranks,
    run_whole,
)

pytestmark = pytest.mark.gpu

HEADS = (16, 32)
RULES = ("flash_qla", "fla")
# Two roundings to bf16 of 2^-9 each in every product, four products between a chunk's
# input and the state: what a state or its gradient may differ by, relative to its norm.
STATE_TOLERANCE = 4 * 2 * 2**-9
DECAYS = ("strong", "mixed", "none")
SEGMENTS = {
    "short": (1, 63, 64, 65, 700, 1, 130),
    "long": (4096, 2100, 1),
    "halves": (2500, 2500),
}


def rule_named(name: str, **options):
    if name == "flash_qla" and options:
        pytest.importorskip("flash_qla")
        from megatron_gdn.gdn.flash_qla.rule import FlashQlaRule

        return FlashQlaRule(**options)
    sizes = HeadSizes(*HEADS, 128, 128)
    try:
        return resolve_rule(
            name, device="cuda", dtype=torch.bfloat16, sizes=sizes, operands="bf16"
        ).rule
    except ImportError as error:
        pytest.skip(str(error))


def make_inputs(S, B=1, decay="mixed", seed=0):
    """bf16 inputs and d_o; "mixed" decays have half-lives from 10^5 tokens to less than
    one."""
    make = torch.Generator(device="cuda").manual_seed(seed)
    G, H = HEADS

    def normal(*shape):
        return torch.randn(B, S, *shape, generator=make, device="cuda")

    q, k = (
        torch.nn.functional.normalize(normal(G, 128), dim=-1).bfloat16()
        for _ in range(2)
    )
    if decay == "strong":
        g = -16 * torch.nn.functional.softplus(normal(H) + 3)
    elif decay == "none":
        g = normal(H) * 0 - 1e-7
    else:
        rate = torch.logspace(-5, 1, H, device="cuda")
        g = -rate * torch.nn.functional.softplus(normal(H))
    inputs = RuleInputs(q, k, normal(H, 128).bfloat16(), g, normal(H).sigmoid())
    return inputs, normal(H, 128).bfloat16()


def widened(inputs: RuleInputs) -> RuleInputs:
    return RuleInputs(*(x.double() for x in inputs))


def relative(got, exact) -> float:
    return errors([got], [exact])[0]


def assert_as_exact(found, usual, factor=1.2, slack=1e-6) -> None:
    """Errors that are at most ``factor`` times the usual ones, tensor by tensor."""
    lines = [
        f"{n}: {a:.2e}, usual {b:.2e}"
        for n, a, b in zip(NAMES, found, usual, strict=True)
    ]
    print("\n" + "\n".join(lines))
    bad = [
        x
        for x, a, b in zip(lines, found, usual, strict=True)
        if not a <= factor * b + slack
    ]
    assert not bad, "; ".join(bad)


def exact_run(inputs, d_o) -> list[torch.Tensor]:
    oracle = Oracle(widened(inputs), (inputs.k.shape[1],) * inputs.k.shape[0])
    grads, _ = oracle.backward(d_o.double())
    return [oracle.forward()[0], *by_key_head(grads, HEADS[0])]


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("case", SEGMENTS)
def test_a_sequence_in_segments_is_as_exact_as_in_one(case, decay, name):
    rule = rule_named(name)
    lengths = SEGMENTS[case]
    inputs, d_o = make_inputs(sum(lengths), decay=decay)
    exact = exact_run(inputs, d_o)
    whole = errors(run_whole(rule, inputs, d_o), exact)
    pieces = errors(
        run_in_segments(rule, inputs, d_o, documents_of(lengths, "cuda")), exact
    )
    assert_as_exact(pieces, whole)


@pytest.mark.parametrize("name", RULES)
def test_segments_in_fixed_buffers_are_as_exact_as_a_whole_sequence(name):
    rule = rule_named(name)
    tokens = 4096
    inputs, d_o = make_inputs(tokens)
    exact = exact_run(inputs, d_o)
    static = StaticDocuments(tokens, 8, "cuda")
    whole = errors(run_whole(rule, inputs, d_o), exact)
    for lengths in (
        (4096,),
        (1, 63, 64, 65, 700, 1, 3202),
        (2048, 0, 2048),
        (512,) * 8,
    ):
        static.fill(documents_of(lengths).offsets)
        assert_as_exact(
            errors(run_in_segments(rule, inputs, d_o, static), exact), whole
        )


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("decay", DECAYS)
def test_maps_states_and_d_initial_agree_with_the_plain_rule(decay, name):
    rule = rule_named(name)
    lengths = (1, 63, 64, 200, 3000, 129)
    inputs, d_o = make_inputs(sum(lengths), decay=decay)
    documents = documents_of(lengths, "cuda")
    local, through = rule.begin(inputs, documents).state_map()
    exact = Oracle(widened(inputs), lengths)
    exact_local = exact.forward()[1]
    exact_through = exact.through()
    identity = torch.eye(128, device="cuda").norm()
    found = {"local": relative(local, exact_local)}
    # Against the norm of a map that forgets nothing: that is what a rounding of through
    # is multiplied by, however little of it is left.
    drift = (through.double() - exact_through).flatten(2).norm(dim=-1) / identity
    found["through"] = drift.max().item()

    make = torch.Generator(device="cuda").manual_seed(5)
    initial = torch.randn(local.shape, generator=make, device="cuda")
    for label, map_first in (("alone", False), ("after the map", True)):
        forward = rule.begin(inputs, documents)
        if map_first:
            forward.state_map()
        o, final, saved = forward.run(initial, final=True)
        exact_o, exact_final = exact.forward(initial.double())
        found[f"o {label}"] = relative(o, exact_o)
        found[f"final {label}"] = relative(final, exact_final)
        d_local = backward_of(rule, inputs, d_o, saved, documents).d_initial()
        exact_d = exact.backward(d_o.double(), initial.double())[1]
        found[f"d_initial {label}"] = relative(d_local, exact_d)
        forward = rule.begin(inputs, documents)
        if map_first:
            forward.state_map()
        _, final, saved = forward.run(final=True)
        found[f"final from zero {label}"] = relative(final, exact_local)
        d_local = backward_of(rule, inputs, d_o, saved, documents).d_initial()
        found[f"d_initial of a forward from zero {label}"] = relative(d_local, exact_d)
    print("\n" + "\n".join(f"{name}: {error:.2e}" for name, error in found.items()))
    bad = {name: error for name, error in found.items() if not error <= STATE_TOLERANCE}
    assert not bad, bad


@pytest.mark.parametrize("decay", DECAYS)
def test_rows_cut_as_one_are_as_exact_as_rows_side_by_side(decay, monkeypatch):
    """64 blocks leave half of 132 multiprocessors idle: the cost model cuts 2 x 4100
    tokens."""
    from megatron_gdn.gdn.flash_qla import plan as flash_qla_plan

    rule = rule_named("flash_qla", bits=Bits.FREE)
    inputs, d_o = make_inputs(4100, B=2, decay=decay)
    exact = exact_run(inputs, d_o)
    made = {}
    for how, count in (("cut", 132), ("side by side", 1)):
        monkeypatch.setattr(flash_qla_plan, "multiprocessors", lambda n=count: n)
        flash_qla_plan.plan_of_rows.cache_clear()
        assert (rule.plan(inputs, None, states=False) is not None) == (how == "cut")
        made[how] = errors(run_whole(rule, inputs, d_o), exact)
    flash_qla_plan.plan_of_rows.cache_clear()
    assert_as_exact(made["cut"], made["side by side"])


@pytest.mark.parametrize("name", RULES)
def test_states_and_their_gradients_of_batch_rows(name):
    rule = rule_named(name)
    inputs, d_o = make_inputs(333, B=3)
    exact = Oracle(widened(inputs), (333,) * 3)
    forward = rule.begin(inputs, None)
    local, through = forward.state_map()
    make = torch.Generator(device="cuda").manual_seed(5)
    initial, d_final = (
        torch.randn(local.shape, generator=make, device="cuda") for _ in range(2)
    )
    o, final, saved = forward.run(initial, final=True)
    backward = backward_of(rule, inputs, d_o, saved)
    d_local = backward.d_initial()
    grads = backward.run(initial, d_final)
    exact_grads, d_initial = exact.backward(
        d_o.double(), initial.double(), d_final.double()
    )
    got_d = d_local + through.mT @ d_final
    got = [o, *by_key_head(grads, HEADS[0]), local, got_d, final]
    exact_o, exact_final = exact.forward(initial.double())
    wanted = [exact_o, *exact_grads, exact.forward()[1], d_initial, exact_final]
    found = dict(
        zip((*NAMES, "local", "d_initial", "final"), errors(got, wanted), strict=True)
    )
    own = dict(
        zip(
            NAMES,
            errors(run_whole(rule, inputs, d_o), exact_run(inputs, d_o)),
            strict=True,
        )
    )
    print(found, own)
    bad = {
        n: e
        for n, e in found.items()
        if not e <= max(STATE_TOLERANCE, 1.2 * own.get(n, 0))
    }
    assert not bad, bad


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize(
    "way", [run_in_segments, run_on_ranks], ids=["documents", "ranks"]
)
def test_fp16_operands_pass_states_more_exactly(way, name):
    """At most half of what bf16 operands cost for the same values, which have three
    bits less."""
    rule = rule_named(name)
    lengths = [700, 65, 2100]
    inputs, d_o = make_inputs(sum(lengths), decay="none")
    d_o[:, :765] *= 2.0**-8
    exact = exact_run(inputs, d_o)
    segments = lengths if way is run_on_ranks else documents_of(lengths, "cuda")
    bf16 = errors(way(rule, inputs, d_o, segments), exact)
    half = RuleInputs(*(x.half() for x in inputs[:3]), *inputs[3:])
    fp16 = errors(way(HalfOperands(rule), half, d_o, segments), exact)
    assert_as_exact(fp16, bf16, 0.5, 0.0)


@pytest.mark.parametrize("decay", [0.0, 1.0, 16.0])
@pytest.mark.parametrize("precision", ["highest", "high"])
def test_the_plain_rule_is_exact_in_fp32_whatever_precision_the_model_asks_for(
    decay, precision
):
    given = [
        x.cuda()
        for x in chunks.make_inputs(1, 300, 3, 6, 16, 8, decay, 6, torch.float32)
    ]
    torch.set_float32_matmul_precision(precision)
    try:
        chunks.assert_recurrence(given, chunks.OFFSETS)
    finally:
        torch.set_float32_matmul_precision("highest")


def part(inputs: RuleInputs, d_o, start, length):
    cut = slice(start, start + length)
    return RuleInputs(*(x[:, cut].clone() for x in inputs)), d_o[:, cut].clone()


# Neighbours that make the batch just short of, and well over, what FlashQLA calls a
# full GPU (its forward kernel changes tiles there), and that bring cut sequences into a
# batch of short ones.
NEIGHBOURS = {
    "few": ((), (40,)),
    "many": ((9, 300, 64, 65), (1, 700)),
    "long": ((5000,), (8200,)),
}


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("length", [1, 63, 777, 4500])
def test_batch_invariant_bits_of_a_document_do_not_depend_on_its_neighbours(
    length, decay
):
    rule = rule_named("flash_qla", bits=Bits.DETERMINISTIC)
    inputs, d_o = make_inputs(5000 + 4500 + 8200, decay=decay)
    mine = part(inputs, d_o, 1000, length)
    alone = run_whole(rule, *mine)
    for place, (before, after) in NEIGHBOURS.items():
        lengths = (*before, length, *after)
        start = sum(before)
        around, d_around = part(inputs, d_o, 0, sum(lengths))
        for whole, x in zip((*around, d_around), (*mine[0], mine[1]), strict=True):
            whole[:, start : start + length] = x
        among = run_whole(rule, around, d_around, documents_of(lengths, "cuda"))
        for tensor, a, b in zip(NAMES, alone, among, strict=True):
            assert torch.equal(a, b[:, start : start + length]), (place, tensor)


def test_batch_invariant_bits_of_a_row_do_not_depend_on_the_batch():
    rule = rule_named("flash_qla", bits=Bits.DETERMINISTIC)
    inputs, d_o = make_inputs(777, B=4)
    together = run_whole(rule, inputs, d_o)
    for row in (0, 3):
        one = RuleInputs(*(x[row : row + 1].contiguous() for x in inputs))
        alone = run_whole(rule, one, d_o[row : row + 1].contiguous())
        for tensor, a, b in zip(NAMES, alone, together, strict=True):
            assert torch.equal(a[0], b[row]), (row, tensor)


def test_batch_invariance_costs_no_accuracy():
    inputs, d_o = make_inputs(4500)
    exact = exact_run(inputs, d_o)
    usual = errors(run_whole(rule_named("flash_qla"), inputs, d_o), exact)
    rule = rule_named("flash_qla", bits=Bits.DETERMINISTIC)
    assert_as_exact(errors(run_whole(rule, inputs, d_o), exact), usual, slack=0.0)
