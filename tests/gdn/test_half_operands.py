"""fp16 operands: powers of two around the plain rule in fp32, whose roundings are
seen."""

import weakref

import pytest
import torch

from megatron_gdn.gdn.api import run_rule
from megatron_gdn.gdn.flash_qla import rule as flash_qla
from megatron_gdn.gdn.flash_qla.rule import FlashQlaRule
from megatron_gdn.gdn.half import HalfOperands
from megatron_gdn.gdn.half_torch import power_exponent
from megatron_gdn.gdn.rule import FlaGDN, RuleInputs, resolve_rule
from megatron_gdn.ops.delta_rule.base import HeadSizes
from megatron_gdn.ops.delta_rule.plain import PlainRule
from megatron_gdn.ops.readout.base import PlainReadout
from megatron_gdn.ops.rules.base import Bits
from megatron_gdn.ops.stages import GatedNorm
from tests.gdn_mixer import gated_delta_mixer
from tests.ops.delta_rule import states
from tests.trees import Tree

G = 2
H = 6
K = 5
V = 7
# Two numbers rounded to fp16, by 2^-12 each: d_o on the way in, a gradient on the way
# out.
HALF = 2 * 2**-12

rule = HalfOperands(states.InHalf())


def make_inputs(S=70, B=1):
    inputs, d_o = states.random_inputs(S, B, (G, H), K, V)
    q, k, v = (x.half() for x in inputs[:3])
    return RuleInputs(
        q, k, v, 20 * inputs.g.float(), inputs.beta.float()
    ), d_o.bfloat16()


def mixed(proj, rule, norm=None, weight=None, **options):
    weight = (
        torch.randn(SIZES.layout.conv_width, 4, dtype=proj.dtype)
        if weight is None
        else weight
    )
    gates = torch.zeros(2, H)
    return gated_delta_mixer(
        proj, weight, None, *gates, SIZES, rule=rule, norm=norm, **options
    )


def assert_all_close(got, exact) -> None:
    for name, a, b in zip(states.NAMES, got, exact, strict=True):
        assert_close(name, a, b)


def run(inputs, d_o):
    o, *grads = states.run_whole(rule, inputs, d_o)
    assert o.dtype == torch.float16
    return [o, *grads]


def exact_run(inputs, d_o):
    oracle = states.Oracle(
        RuleInputs(*(x.double() for x in inputs)), [inputs.k.shape[1]]
    )
    return [oracle.forward()[0], *oracle.backward(d_o.double())[0]]


def assert_close(name, got, exact, tolerance=HALF):
    error = ((got.double() - exact).norm() / exact.norm()).item()
    assert error <= tolerance, f"{name}: relative error {error:.2e}"


@pytest.mark.parametrize(
    ("exponent", "strength"), [*((n, 1) for n in (0, -40, 40, -100, 100, -128)), (0, 2)]
)
def test_output_and_every_gradient_at_any_size_of_the_gradient(exponent, strength):
    """Not of subnormal gradients alone: 2^-128 is where bf16 itself begins to lose
    bits."""
    inputs, d_o = make_inputs()
    inputs = inputs._replace(beta=strength * inputs.beta)
    d_o = (d_o.double() * 2.0**exponent).bfloat16()
    assert_all_close(run(inputs, d_o), exact_run(inputs, d_o))


def test_the_rule_as_a_function_takes_the_factor_out_of_every_gradient():
    inputs, d_o = make_inputs()
    d_o = d_o.half() / 16
    leaves = RuleInputs(*(x.clone().requires_grad_() for x in inputs))
    o, _ = run_rule(rule, leaves, None)
    grads = torch.autograd.grad(o, leaves, d_o)
    assert_all_close([o.detach(), *grads], exact_run(inputs, d_o))


def test_another_size_of_the_gradient_is_another_factor_and_the_same_bits():
    inputs, d_o = make_inputs()
    saved = rule.begin(inputs, None).run().saved

    def backward(d_o):
        return states.backward_of(rule, inputs, d_o, saved).run()

    usual = backward(d_o)
    for exponent in (-40, 40):
        other = backward(d_o * 2.0**exponent)
        for name in states.NAMES[1:]:
            assert torch.equal(getattr(usual, name), getattr(other, name)), name
        assert torch.equal(other.factor, usual.factor * 2.0**exponent)


def test_a_quiet_key_head_keeps_its_digits_beside_a_loud_one():
    inputs, d_o = make_inputs()
    quiet = slice(0, H // G)
    d_o[:, :, quiet] *= 2.0**-60
    got = run(inputs, d_o)
    exact = exact_run(inputs, d_o)
    for index, heads in (
        (1, slice(0, 1)),
        (2, slice(0, 1)),
        (3, quiet),
        (4, quiet),
        (5, quiet),
    ):
        assert_close(
            states.NAMES[index], got[index][:, :, heads], exact[index][:, :, heads]
        )


def test_no_gradient_gives_none_and_the_factor_stays_finite():
    inputs, d_o = make_inputs()
    saved = rule.begin(inputs, None).run().saved
    grads = states.backward_of(rule, inputs, torch.zeros_like(d_o), saved).run()
    assert grads.factor.isfinite().all() and (grads.factor > 0).all()
    assert all((x == 0).all() for x in grads[:5])


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_reaches_the_gradients_of_its_head_and_no_other(bad):
    inputs, d_o = make_inputs()
    exact = run(inputs, d_o)
    d_o[0, 33, 1, 2] = bad
    got = run(inputs, d_o)
    for name, x, y in zip(states.NAMES[3:], got[3:], exact[3:], strict=True):
        assert not x[:, :, 1].isfinite().all(), name
        assert torch.equal(x[:, :, H // G :], y[:, :, H // G :]), name


def test_values_beyond_fp16_are_seen():
    inputs, d_o = make_inputs()
    inputs.v[0, 3, 0, 0] = float("inf")  # what fp16 makes of 65520 and more
    o, *grads = run(inputs, d_o)
    assert not o.isfinite().all() and not grads[1].isfinite().all()


@pytest.mark.parametrize("largest", [-3, 0, 5])
def test_the_largest_number_is_brought_just_below_its_mark(largest):
    every = [2.0**n * m for n in range(-126, 127) for m in (1.0, 1.9921875)]
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.tensor(every, dtype=dtype).view(1, 1, -1, 1)
        exponent = power_exponent(x, len(every), largest, (0, 1, 3))
        power = (exponent << 23).view(torch.float32)
        assert (power.log2() == power.log2().round()).all()
        scaled = x.flatten().double() * power
        inside = (exponent > 1) & (exponent < 253)
        assert inside.sum() > 480 and (scaled[inside] < 2.0**largest).all()
        assert (scaled[inside] >= 2.0 ** (largest - 1)).all()
        assert scaled.max() < 2.0 ** max(largest, 2)


def test_a_sequence_in_segments_equals_the_whole():
    lengths = (1, 63, 64, 65, 30)
    inputs, d_o = make_inputs(sum(lengths))
    got = states.run_in_segments(rule, inputs, d_o, states.documents_of(lengths))
    assert_all_close(got, exact_run(inputs, d_o))


@pytest.mark.parametrize(
    "size", [2.0**-60, 2.0**60, 0.0], ids=["faint", "loud", "none"]
)
def test_states_bring_gradients_of_any_size_from_other_ranks(size):
    """The last rank's gradients are far from the others' own, or all there are."""
    lengths = [70, 40, 65]
    inputs, d_o = make_inputs(sum(lengths))
    d_o[:, :110] *= size
    got = states.run_on_ranks(rule, inputs, d_o, lengths)
    for name, *both in zip(states.NAMES, got, exact_run(inputs, d_o), strict=True):
        # gets nothing from later tokens: beside what does, its digits may go
        if name == "q":
            assert_close(name, *both)
            continue
        for rank, (a, exact) in enumerate(
            zip(*(x.split(lengths, 1) for x in both), strict=True)
        ):
            assert_close(f"{name} of rank {rank}", a, exact)


@pytest.mark.parametrize("lengths", [None, (1, 0, 64, 65)], ids=["dense", "packed"])
def test_states_are_in_true_units_on_both_sides(lengths):
    B, S = (2, 65) if lengths is None else (1, 130)
    inputs, d_o = make_inputs(S, B)
    documents = None if lengths is None else states.documents_of(lengths)
    wide = RuleInputs(*(x.double() for x in inputs))
    exact = states.Oracle(wide, [n for n in lengths or (S,) * B if n])
    make = torch.Generator().manual_seed(2)
    initial, d_final = (
        torch.randn(exact.zeros().shape, generator=make) for _ in range(2)
    )
    for start, made in states.forwards_from(rule, inputs, documents, initial):
        o, final = exact.forward(start.double())
        assert_close("o", made.o, o)
        # fp32 from what fp16 holds exactly
        assert_close("final", made.final_states, final, 2**-20)
    forward = rule.begin(inputs, documents)
    through = forward.state_map().through
    saved = forward.run(initial).saved
    for size in (2.0**-60, 1.0, 2.0**60):
        scaled = (d_o.double() * size).bfloat16()
        d_state = d_final * size
        grads, d_initial = exact.backward(scaled.double(), initial, d_state)
        backward = states.backward_of(rule, inputs, scaled, saved, documents)
        got = backward.d_initial() + through.mT @ d_state
        assert_close("d_initial", got, d_initial)
        got = states.by_key_head(backward.run(initial, d_state), G)
        for name, a, b in zip(states.NAMES[1:], got, grads, strict=True):
            assert_close(name, a, b)


@pytest.mark.parametrize("run", [states.run_whole, states.run_in_segments])
def test_documents_over_batch_rows_equal_one_row(run):
    inputs, d_o = make_inputs(140)
    states.assert_rows_equal_one_row(
        run, rule, inputs, d_o, states.documents_of((5, 65, 0, 70))
    )


SIZES = HeadSizes(G, H, K, V)


@pytest.mark.parametrize("recompute", [False, True], ids=["saved", "recomputed"])
@pytest.mark.parametrize(
    "documents",
    [
        None,
        states.documents_of((1, 2, 30, 0, 37)),
        Tree((-1, 0, 0, 1), (30, 9, 12, 19)).documents,
    ],
    ids=["dense", "packed", "tree"],
)
def test_the_mixer_takes_the_factor_out_of_every_gradient(documents, recompute):
    make = torch.Generator().manual_seed(1)
    S, B = 70, 2 if documents is None else 1

    def normal(*shape):
        return torch.randn(*shape, generator=make).requires_grad_()

    width = SIZES.layout.width
    C = SIZES.layout.conv_width
    leaves = [normal(S, B, width), normal(C, 1, 4), normal(H), normal(H)]
    gamma = normal(V)
    d_out = normal(S, B, H * V).detach()
    options = {"documents": documents, "recompute_qkv": recompute}

    def run_mixer(rule, dtype, size=1.0):
        *tensors, gain = (
            x.detach().to(dtype).requires_grad_() for x in (*leaves, gamma)
        )
        out = gated_delta_mixer(
            *tensors[:2],
            None,
            *tensors[2:],
            SIZES,
            rule=rule,
            norm=GatedNorm(gain),
            **options,
        )
        assert out.dtype == dtype
        return [
            out,
            *torch.autograd.grad(out, [*tensors, gain], size * d_out.to(dtype)),
        ]

    names = ("out", "proj", "conv_weight", "A_log", "dt_bias", "gamma")
    got = run_mixer(rule, torch.float32)
    exact = run_mixer(PlainRule(), torch.float64)
    tiny = run_mixer(rule, torch.float32, 2.0**-50)
    for name, a, b, c in zip(names, got, exact, tiny, strict=True):
        # The gradient of l2norm takes away what lies along q and k, the larger part
        # with K = 5.
        assert_close(name, a, b, 8 * HALF)
        assert torch.equal(a if name == "out" else a * 2.0**-50, c), name


def test_without_norm_o_leaves_in_the_dtype_of_the_projection():
    proj = torch.randn(9, 2, SIZES.layout.width).bfloat16().requires_grad_()
    o, z = mixed(proj, rule)
    assert o.dtype == z.dtype == torch.bfloat16
    (d_proj,) = torch.autograd.grad(o.float().square().sum(), [proj])
    assert d_proj.dtype == torch.bfloat16 and d_proj.isfinite().all() and d_proj.any()


@pytest.fixture
def choose(monkeypatch):
    monkeypatch.setattr(flash_qla, "why_not_flash_qla", lambda *_: None)
    monkeypatch.setattr(FlaGDN, "why_not", lambda *_: None)

    def choose(backend="auto", **options):
        options = {"dtype": torch.bfloat16, "device": "cpu", **options}
        return resolve_rule(backend, sizes=HeadSizes(2, 4, 128, 128), **options)

    return choose


@pytest.mark.parametrize("backend", ["auto", "flash_qla", "fla"])
def test_the_choice_of_fp16_operands(choose, backend):
    rule, reason = choose(backend)
    assert isinstance(rule, HalfOperands) and rule.name == backend.replace(
        "auto", "flash_qla"
    )
    assert reason.endswith("fp16 operands")
    assert isinstance(choose(backend, operands="bf16").rule, FlaGDN | FlashQlaRule)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"backend": "flash_qla", "bits": Bits.DETERMINISTIC}, "deterministic mode"),
        ({"normalise_qk": False}, "unit length"),
        *(
            ({key: value}, "")
            for key, value in (
                ("backend", "reference"),
                ("dtype", torch.float16),
                ("dtype", torch.float32),
            )
        ),
    ],
    ids=["deterministic", "no l2norm", "reference", "fp16", "fp32"],
)
def test_where_fp16_operands_cannot_be_had_the_reason_says_so(choose, options, why):
    """And where they would gain nothing, nothing is said."""
    rule, reason = choose(**options)
    assert not isinstance(rule, HalfOperands)
    if why:
        assert "no fp16 operands: " in reason and why in reason
    else:
        assert "operands" not in reason


def test_unknown_operands_are_refused(choose):
    with pytest.raises(ValueError, match="'tf32'.*'fp16' or 'bf16'"):
        choose(operands="tf32")


def test_the_gradient_of_o_is_freed_once_it_has_another_form(monkeypatch):
    """It is as large as v: the rule's own buffers need not stand beside both."""
    made = []
    found = []
    backward = PlainReadout.backward

    def remembered(*args, **options):
        d_o, d_gamma = backward(*args, **options)
        made.append(weakref.ref(d_o))
        return d_o, d_gamma

    class LooksBackward(states.InHalfBackward):
        def run(self, *args):
            found.append(made[0]())
            return super().run(*args)

    class Looks(states.InHalf):
        def begin_backward(self, d_o, inputs, saved, documents):
            return LooksBackward(self, d_o, inputs, saved, documents)

    monkeypatch.setattr(PlainReadout, "backward", remembered)
    proj = torch.randn(9, 1, SIZES.layout.width, requires_grad=True)
    mixed(proj, HalfOperands(Looks()), GatedNorm(torch.ones(V))).sum().backward()
    assert found == [None]


def test_the_mixer_refuses_q_and_k_of_any_length():
    with pytest.raises(ValueError, match=r"torch.float16.*operands='bf16'"):
        mixed(torch.randn(9, 1, SIZES.layout.width), rule, normalise_qk=False)


@pytest.mark.parametrize("bad", [float("inf"), -float("inf"), float("nan")])
def test_a_number_that_is_not_finite_leaves_the_others_their_power(bad):
    x = torch.full((1, 3, 2, 4), 2.0**-20)
    expected = power_exponent(x, 2, 0, (0, 1, 3))
    x[0, 1, 0, 2] = bad
    assert torch.equal(power_exponent(x, 2, 0, (0, 1, 3)), expected)
