"""The chunk rule against the token recurrence in fp64, the laws both obey, and extreme
inputs."""

from functools import partial

import pytest
import torch

from megatron_gdn.gdn import api
from megatron_gdn.gdn.rule import resolve_rule
from megatron_gdn.ops import (
    Documents,
    decay_and_write_gates,
    gated_delta_rule,
    recurrent_gated_delta_rule,
    torch_chunk_gated_delta_rule,
)
from megatron_gdn.ops.delta_rule.base import HeadSizes, RuleInputs
from megatron_gdn.ops.delta_rule.plain import PlainRule
from megatron_gdn.ops.documents import documents_of_rows, one_document
from megatron_gdn.ops.elementwise import least_log_decay, softplus
from megatron_gdn.ops.rules.base import Bits
from tests.ops.test_plain_rules import DELTA, delta_inputs, states

from .states import backward_of, documents_of

NAMES = ("output", "final state", "dq", "dk", "dv", "dg", "dbeta", "dinitial_state")
# 1e-5 of the largest entry: 84 units of fp32 rounding, for sums of at most a few
# hundred terms.
FP32 = 1e-5


def make_inputs(B, T, G, H, K, V, decay, sequences=None, dtype=torch.float64, seed=0):
    torch.manual_seed(seed)
    shapes = [(B, T, G, K), (B, T, G, K), (B, T, H, V)]
    q, k, v = (torch.randn(shape, dtype=torch.float64) for shape in shapes)
    g = -decay * torch.nn.functional.softplus(
        torch.randn(B, T, H, dtype=torch.float64) + 1
    )
    beta = torch.rand(B, T, H, dtype=torch.float64)
    state = torch.randn(
        B if sequences is None else sequences, H, K, V, dtype=torch.float64
    )
    return [x.to(dtype) for x in (q, k, v, g, beta, state)]


def outputs_and_gradients(rule, inputs, cu_seqlens=None, l2norm=True, **options):
    inputs = [x.clone().requires_grad_() for x in inputs]
    o, state = rule(
        *inputs[:5],
        initial_state=inputs[5],
        output_final_state=True,
        use_qk_l2norm_in_kernel=l2norm,
        cu_seqlens=cu_seqlens,
        **options,
    )
    torch.manual_seed(1)
    do = torch.randn(o.shape, dtype=torch.float64).to(o)
    dstate = torch.randn(state.shape, dtype=torch.float64).to(state)
    gradients = torch.autograd.grad((o * do).sum() + (state * dstate).sum(), inputs)
    return dict(zip(NAMES, (o.detach(), state.detach(), *gradients), strict=True))


def carried(rule, q, k, v, g, beta, state, **options):
    return rule(
        q, k, v, g, beta, initial_state=state, output_final_state=True, **options
    )


def assert_agree(actual, expected, tolerance):
    for name, reference in expected.items():
        scale = reference.abs().max().clamp_min(1e-30)
        error = ((actual[name].double() - reference).abs().max() / scale).item()
        assert error <= tolerance, f"{name}: {error:.2e}"


DECAYS = pytest.mark.parametrize("decay", [0.0, 1e-3, 1.0, 16.0])


def assert_recurrence(inputs, offsets=None, tolerance=FP32, **options):
    """The chunk rule agrees with the recurrence, in fp64 from the same inputs."""
    wide = [x.double() for x in inputs]
    l2norm = {"l2norm": options.get("l2norm", True)}
    expected = outputs_and_gradients(
        recurrent_gated_delta_rule, wide, offsets, **l2norm
    )
    found = outputs_and_gradients(
        torch_chunk_gated_delta_rule, inputs, offsets, **options
    )
    assert_agree(found, expected, tolerance)


@pytest.mark.each_value
@pytest.mark.parametrize("T", [1, 2, 63, 64, 65, 127, 300])
@DECAYS
def test_fp32_chunks_agree_with_the_fp64_recurrence(T, decay):
    assert_recurrence([x.float() for x in make_inputs(2, T, 3, 6, 16, 8, decay)])


@pytest.mark.each_value
@pytest.mark.parametrize("strength", [1.5, 2.0])
@DECAYS
def test_fp32_chunks_agree_with_the_recurrence_at_write_strengths_up_to_2(
    strength, decay
):
    """Of unit keys none makes a state longer: beta |k|^2 <= 2. At 2 all are
    reflections."""
    inputs = [x.float() for x in make_inputs(1, 300, 3, 6, 16, 8, decay)]
    inputs[4].mul_(strength) if strength < 2 else inputs[4].fill_(strength)
    assert_recurrence(inputs)


@pytest.mark.parametrize(
    ("G", "H", "K", "V", "chunk_size"),
    [(1, 4, 5, 7, 64), (2, 2, 12, 3, 16), (2, 6, 8, 20, 7)],
)
@DECAYS
def test_fp64_chunks_agree_with_the_recurrence_at_odd_sizes(
    G, H, K, V, chunk_size, decay
):
    q, k, *others = make_inputs(2, 75, G, H, K, V, decay)
    options = {"l2norm": False, "chunk_size": chunk_size}
    assert_recurrence([q, k * 0.3, *others], tolerance=1e-11, **options)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("offsets", [[0, 0], [0, 0, 0], None])
@pytest.mark.parametrize("rule", [gated_delta_rule, recurrent_gated_delta_rule])
def test_sequences_without_tokens_give_their_states_back_and_gradients_of_zero(
    rule, offsets, dtype
):
    B, N = (2, 2) if offsets is None else (1, len(offsets) - 1)
    *inputs, state = make_inputs(B, 0, 2, 4, 5, 3, 1.0, N, dtype)
    wide = torch.promote_types(dtype, torch.float32)
    given = [x.requires_grad_() for x in (*inputs, state)]
    options = {"output_final_state": True, "cu_seqlens": offsets}
    o, final = rule(*given[:5], initial_state=given[5], **options)
    assert o.shape == given[2].shape and o.dtype == dtype
    assert torch.equal(final, state.to(wide)) and final.dtype == wide
    found = torch.autograd.grad(o.sum() + 3 * final.sum(), given)
    assert (found[5] == 3).all()
    for x, gradient in zip(inputs, found[:5], strict=True):
        assert gradient.shape == x.shape and gradient.dtype == x.dtype
    _, final = rule(*inputs, **options)
    assert torch.equal(final, torch.zeros_like(state, dtype=wide))
    assert final.dtype == wide
    assert rule(*inputs, cu_seqlens=offsets)[1] is None


OFFSETS = [0, 1, 3, 3, 100, 164, 300]


def test_the_decay_gradient_survives_a_strong_decay_in_the_same_chunk():
    """One token that forgets everything must not cost its neighbours' gradients their
    digits."""
    inputs = make_inputs(1, 64, 1, 1, 8, 8, 0.01, dtype=torch.float32)
    inputs[3][:, 20] = -4000.0
    assert_recurrence(inputs)


def test_a_call_keeps_its_inputs_and_nothing_else_for_the_backward():
    kept: list[torch.Tensor] = []
    inputs = [x.float().requires_grad_() for x in make_inputs(1, 256, 1, 2, 8, 8, 1.0)]
    with torch.autograd.graph.saved_tensors_hooks(
        lambda x: kept.append(x) or x, lambda x: x
    ):
        torch_chunk_gated_delta_rule(*inputs[:5], initial_state=inputs[5])
    tokens_times_chunk = 256 * 2 * 64
    assert max(x.numel() for x in kept) < tokens_times_chunk
    assert sum(x.numel() for x in kept) == sum(x.numel() for x in inputs)


def test_autocast_does_not_round_the_chunk_rule():
    inputs = [x.float() for x in make_inputs(1, 80, 2, 4, 8, 8, 1.0)]
    expected = outputs_and_gradients(torch_chunk_gated_delta_rule, inputs, l2norm=False)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual = outputs_and_gradients(
            torch_chunk_gated_delta_rule, inputs, l2norm=False
        )
    assert all(torch.equal(actual[name], expected[name]) for name in NAMES)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("backend", ["recurrent", "reference"])
def test_gates_of_any_dtype_are_those_in_fp32(backend, dtype):
    *inputs, state = make_inputs(1, 70, 2, 4, 8, 8, 1.0, dtype=torch.bfloat16)
    given = [*inputs[:3], *(x.to(dtype) for x in inputs[3:]), state]
    in_fp32 = [*inputs[:3], *(x.float() for x in inputs[3:]), state]
    rule = partial(gated_delta_rule, backend=backend)
    found, expected = (outputs_and_gradients(rule, x) for x in (given, in_fp32))
    for name in NAMES:
        gate = name in ("dg", "dbeta")
        assert found[name].dtype == (dtype if gate else expected[name].dtype)
        assert torch.equal(found[name], expected[name].to(found[name].dtype)), name


@pytest.mark.parametrize(
    ("backend", "function"),
    [
        ("recurrent", recurrent_gated_delta_rule),
        ("reference", partial(torch_chunk_gated_delta_rule, chunk_size=32)),
    ],
    ids=["recurrent", "reference"],
)
@pytest.mark.parametrize("option", ["scale", "l2norm", "states", "rows"])
def test_a_backend_is_the_function_of_its_name(backend, function, option):
    """With every argument, of sizes that all differ."""
    B, sequences, cu_seqlens = (3, 3, None) if option == "rows" else (1, 2, [0, 40, 90])
    *inputs, state = make_inputs(B, 90, 2, 4, 3, 5, 0.1, sequences)
    options = {
        "initial_state": state if option == "states" else None,
        "output_final_state": option == "states",
        "use_qk_l2norm_in_kernel": option == "l2norm",
        "scale": 0.3 if option == "scale" else None,
        "cu_seqlens": cu_seqlens,
    }
    made = gated_delta_rule(*inputs, backend=backend, chunk_size=32, **options)
    for x, y in zip(made, function(*inputs, **options), strict=True):
        assert x is y is None or torch.equal(x, y)


def test_the_reference_backend_is_what_auto_takes_on_the_cpu():
    q, k, v, g, beta, _ = make_inputs(1, 10, 2, 4, 8, 8, 1.0, dtype=torch.float32)
    auto, none = gated_delta_rule(q, k, v, g, beta)
    reference, _ = gated_delta_rule(q, k, v, g, beta, backend="reference")
    assert torch.equal(auto, reference) and none is None


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_rule_is_chosen_for_the_inputs(monkeypatch, deterministic):
    chosen_for = []

    def choose(backend, **asked):
        chosen_for.append((backend, asked))
        return resolve_rule(backend, **asked)

    monkeypatch.setattr(api, "resolve_rule", choose)
    monkeypatch.setattr(
        torch, "are_deterministic_algorithms_enabled", lambda: deterministic
    )
    inputs = make_inputs(1, 10, 2, 4, 3, 5, 1.0, dtype=torch.float32)[:5]
    gated_delta_rule(inputs[0].double(), *inputs[1:])
    ((backend, asked),) = chosen_for
    assert backend == "auto" and asked["sizes"] == HeadSizes(2, 4, 3, 5)
    assert asked["dtype"] == torch.float32 and asked["device"] == inputs[2].device
    assert asked["bits"] is (Bits.DETERMINISTIC if deterministic else Bits.FREE)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"query": torch.zeros(1, 4, 2, 5)}, "query must have shape .1, 4, 2, 8"),
        (
            {"key": torch.zeros(4, 2, 8)},
            r"must be \[B, T, heads, dim\], got \(4, 2, 8\)",
        ),
        ({"value": torch.zeros(4, 4, 8)}, r"must be \[B, T, .* and \(4, 4, 8\)"),
        ({"g": torch.zeros(1, 4, 2)}, "g must have shape"),
        (
            {
                "value": torch.zeros(1, 4, 3, 8),
                "g": torch.zeros(1, 4, 3),
                "beta": torch.zeros(1, 4, 3),
            },
            "num_value_heads=3 is not a multiple of num_key_heads=2",
        ),
        ({"initial_state": torch.zeros(2, 4, 8, 8)}, "initial_state must have shape"),
        ({"cu_seqlens": [0, 2]}, "ends at 2, which does not match the 4 tokens"),
        ({"cu_seqlens": [0, 3, 2, 4]}, "runs backwards at document 1"),
        ({"cu_seqlens": [1, 4]}, "starts at 1"),
        ({"cu_seqlens": torch.tensor([0.0, 4.0])}, "1-D integer tensor"),
    ],
)
@pytest.mark.parametrize(
    "function",
    [gated_delta_rule, torch_chunk_gated_delta_rule, recurrent_gated_delta_rule],
)
def test_bad_input_is_refused_with_what_was_given_and_what_is_legal(
    changes, message, function
):
    arguments = {
        "query": torch.zeros(1, 4, 2, 8),
        "key": torch.zeros(1, 4, 2, 8),
        "value": torch.zeros(1, 4, 4, 8),
        "g": torch.zeros(1, 4, 4),
        "beta": torch.zeros(1, 4, 4),
        **changes,
    }
    with pytest.raises(ValueError, match=message):
        function(**arguments)


def test_the_recurrence_computes_bf16_in_fp32():
    inputs = make_inputs(1, 9, 2, 4, 3, 5, 1.0, dtype=torch.bfloat16)
    o, final = carried(recurrent_gated_delta_rule, *inputs)
    exact, exact_final = carried(
        recurrent_gated_delta_rule, *(x.float() for x in inputs)
    )
    assert o.dtype == torch.bfloat16 and torch.equal(o, exact.bfloat16())
    assert final.dtype == torch.float32 and torch.equal(final, exact_final)


def test_the_options_reach_the_chunk_rule(monkeypatch):
    made = []

    class Noted(PlainRule):
        def __init__(self, **options):
            made.append(options)
            super().__init__(**options)

    monkeypatch.setattr(api, "PlainRule", Noted)
    inputs = make_inputs(1, 5, 2, 4, 3, 5, 1.0)[:5]
    for chunk_size, scale in ((1, None), (32, 0.3)):
        torch_chunk_gated_delta_rule(*inputs, chunk_size, scale=scale)
        assert made.pop() == {"chunk_size": chunk_size, "scale": scale}
    with pytest.raises(ValueError, match="chunk_size=0 must be at least 1"):
        torch_chunk_gated_delta_rule(*inputs, 0)


@pytest.mark.parametrize(
    "function", [torch_chunk_gated_delta_rule, recurrent_gated_delta_rule]
)
def test_a_scale_scales_the_output_from_one_over_the_root_of_the_key_dim(function):
    inputs = make_inputs(1, 5, 2, 4, 16, 5, 1.0)[:5]
    o, _ = function(*inputs)
    halved, _ = function(*inputs, scale=0.125)
    torch.testing.assert_close(halved, o / 2, rtol=1e-12, atol=0)


def test_packed_input_with_a_batch_is_refused():
    inputs = make_inputs(2, 4, 2, 4, 8, 8, 1.0)
    with pytest.raises(ValueError, match="need a batch of 1"):
        torch_chunk_gated_delta_rule(*inputs[:5], cu_seqlens=[0, 4])


def test_resolved_documents_keep_their_tensors():
    documents = Documents.from_cu_seqlens([0, 3, 3, 8], 8)
    assert documents.lengths == (3, 0, 5)
    assert documents.position_T.tolist() == [0, 1, 2, 0, 1, 2, 3, 4]
    assert documents.cu_seqlens.tolist() == [0, 3, 8]
    assert documents.position_T is documents.position_T


def test_documents_that_need_no_change_are_handed_on_with_their_tables():
    cpu = torch.device("cpu")
    documents = Documents((0, 3, 3, 8), cpu)
    assert Documents.from_cu_seqlens(documents, 8) is documents
    assert documents_of_rows((1, 8), cpu, documents) is documents
    assert documents.to(cpu) is documents.on_host() is documents
    assert documents_of_rows((1, 8), cpu) is one_document(8, cpu)
    rows = documents_of_rows((2, 8), cpu, documents)
    assert rows.offsets == (0, 3, 3, 8, 11, 11, 16)


rule = PlainRule()


def test_states_of_half_precision_inputs_are_fp32():
    inputs = delta_inputs(1.0, 1, 20)
    documents = documents_of((13, 7))
    half = RuleInputs(*(x.half() for x in inputs[:3]), *(x.float() for x in inputs[3:]))
    forward = rule.begin(half, documents)
    local, through = forward.state_map()
    assert local.dtype == through.dtype == torch.float32
    o, final, saved = forward.run(states(DELTA, 2).float(), final=True)
    assert o.dtype == torch.float16 and final.dtype == torch.float32
    d_local = backward_of(rule, half, o, saved, documents).d_initial()
    assert d_local.dtype == torch.float32


BOTH = [torch.float32, torch.float64]


@pytest.mark.parametrize("dtype", BOTH)
@pytest.mark.parametrize("g", [float("-inf"), -1e30, -1e4])
def test_log_decays_without_end_agree_with_the_recurrence(g, dtype):
    """Alone, in a row, at both ends of a chunk, and one head that forgets
    everything."""
    inputs = [x.float() for x in make_inputs(1, 150, 2, 4, 16, 8, 1.0)]
    inputs[3][:, [0, 5, 6, 7, 63, 64, 100, 149]] = g
    inputs[3][:, :, 2] = g
    expected = outputs_and_gradients(
        recurrent_gated_delta_rule, [x.double() for x in inputs]
    )
    actual = outputs_and_gradients(
        torch_chunk_gated_delta_rule, [x.to(dtype) for x in inputs]
    )
    assert_agree(actual, expected, FP32)
    assert (actual["dg"][inputs[3] == g] == 0).all()


@pytest.mark.parametrize("dtype", BOTH)
def test_the_bound_on_log_decays_is_where_the_decay_vanishes(dtype):
    bound = torch.tensor(least_log_decay(dtype), dtype=dtype)
    assert bound.exp() == 0 and (bound + 1).exp() > 0
    assert (bound * 64).isfinite()


@pytest.mark.parametrize("dtype", BOTH)
@pytest.mark.parametrize("A_log", [89.0, 710.0, 1e30])
def test_any_decay_rate_gives_finite_gates_and_gradients(A_log, dtype):
    alpha = torch.tensor([[-200.0, -1000.0], [0.0, 3.0], [3e38, -3e38]], dtype=dtype)
    A_log = torch.full((2,), A_log, dtype=dtype)
    dt_bias = torch.ones(2, dtype=dtype)
    leaves = [
        x.requires_grad_() for x in (alpha, torch.zeros_like(alpha), A_log, dt_bias)
    ]
    g, beta = decay_and_write_gates(*leaves)
    assert (
        g.isfinite().all() and (g[1] == least_log_decay(dtype)).all() and g[0, 1] == 0
    )
    # What a rule hands back is not exactly 0 where the decay is: rounding, of sums'
    # differences.
    (g * 1e-7).sum().add(beta.sum()).backward()
    assert all(x.grad.isfinite().all() for x in leaves)
    assert (alpha.grad[1] == 0).all()


@pytest.mark.parametrize("seed", range(3))
def test_ordinary_gates_keep_their_bits(seed):
    """Clamps change no decay. The softplus is the package's: torch's own rounds an
    element by where it stands."""
    torch.manual_seed(seed)
    alpha, beta, dt_bias = torch.randn(3, 50, 4)
    A_log = torch.tensor([-3.0, 0.0, 3.0, 60.0])
    dt_bias = dt_bias[0] - A_log.clamp(min=3)
    g, _ = decay_and_write_gates(alpha, beta, A_log, dt_bias)
    plain = -A_log.exp() * softplus(alpha + dt_bias)
    assert torch.equal(g, plain.clamp(min=-104)) and torch.equal(g.exp(), plain.exp())


def test_gates_do_not_hide_nan():
    nan = torch.full((1, 2), float("nan"))
    zero = torch.zeros(1, 2)
    for inputs in ((nan, zero, zero[0], zero[0]), (zero, zero, nan[0], zero[0])):
        assert decay_and_write_gates(*inputs)[0].isnan().all()


@pytest.mark.each_pair
@pytest.mark.parametrize(
    ("which", "bad"),
    [
        (which, float(bad))
        for which in range(5)
        for bad in ("nan", "inf", "-inf")
        if (which, bad) != (3, "-inf")  # a legal log-decay
    ],
)
@pytest.mark.parametrize("token", [0, 20, 63, 64, 130])
@pytest.mark.parametrize(
    "entries", [slice(None), slice(2, 3)], ids=["a head", "one entry"]
)
def test_what_is_not_finite_reaches_no_earlier_output(token, which, bad, entries):
    """Bit for bit; and NaN or inf stands where the recurrence has it. Inputs q, k, v,
    g, beta."""
    inputs = [x.float() for x in make_inputs(1, 150, 2, 4, 16, 8, 1.0)]
    clean, _ = carried(torch_chunk_gated_delta_rule, *inputs)
    of_head = inputs[which][:, token, 1]
    (of_head[:, entries] if which < 3 else of_head).fill_(bad)
    o, state = carried(torch_chunk_gated_delta_rule, *inputs)
    expected, expected_state = carried(recurrent_gated_delta_rule, *inputs)
    if which == 2 and entries != slice(None):  # the recurrence keeps the other columns
        assert not (o.isfinite() & ~expected.isfinite()).any()
    else:
        assert torch.equal(o.isfinite(), expected.isfinite())
        assert torch.equal(state.isfinite(), expected_state.isfinite())
    assert torch.equal(o[:, :token], clean[:, :token])
    assert not expected[:, token].isfinite().all() or which == 3 and token == 0
