"""The convolution, and a front that computes it without Triton."""

import pytest
import torch
import torch.nn.functional as F

from megatron_gdn.context_parallel.headwise import exchange
from megatron_gdn.gdn.front import gdn_table
from megatron_gdn.ops import causal_conv1d, obstacles
from megatron_gdn.ops.delta_rule.base import HeadSizes
from megatron_gdn.ops.front import plain


def make(B=2, T=13, C=5, W=4, seed=0):
    torch.manual_seed(seed)
    make = lambda *shape: torch.randn(*shape, dtype=torch.float64, requires_grad=True)  # noqa: E731
    return make(B, T, C), make(C, W), make(C)


def torch_conv(x_BTC, weight_CW, bias_C):
    C, W = weight_CW.shape
    y = F.conv1d(
        F.pad(x_BTC.transpose(1, 2), (W - 1, 0)), weight_CW[:, None], bias_C, groups=C
    )
    return y.transpose(1, 2)


def gradients(y, inputs):
    torch.manual_seed(1)
    return torch.autograd.grad((y * torch.randn(y.shape, dtype=y.dtype)).sum(), inputs)


def assert_same(actual, expected):
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("T", [1, 2, 3, 4, 13])
@pytest.mark.parametrize("W", [1, 2, 4])
@pytest.mark.parametrize("activation", ["silu", None])
def test_outputs_and_gradients_equal_torchs_convolution(T, W, activation):
    x, weight, bias = make(T=T, W=W)
    y, state = causal_conv1d(x, weight, bias, activation)
    expected = torch_conv(x, weight, bias)
    expected = F.silu(expected) if activation else expected
    assert state is None
    assert_same(
        [y, *gradients(y, (x, weight, bias))],
        [expected, *gradients(expected, (x, weight, bias))],
    )


OFFSETS = [0, 1, 3, 3, 9, 13]  # documents shorter than the kernel, and an empty one


@pytest.mark.parametrize("carried", [False, True], ids=["from zeros", "states"])
def test_packed_documents_equal_the_same_documents_alone(carried):
    x, weight, bias = make(B=1)
    state = torch.randn(5, 5, 4, dtype=torch.float64) * carried
    given = state if carried else None
    options = {"cu_seqlens": OFFSETS, "output_final_state": True}
    y, final = causal_conv1d(x, weight, bias, initial_state=given, **options)
    alone = [
        causal_conv1d(
            x[:, a:b], weight, bias, initial_state=one[None], output_final_state=True
        )
        for a, b, one in zip(OFFSETS, OFFSETS[1:], state, strict=False)
    ]
    outputs = torch.cat([output for output, _ in alone if output.numel()], dim=1)
    finals = torch.cat([last for _, last in alone])
    assert_same(
        [y, final, *gradients(y, (x, weight, bias))],
        [outputs, finals, *gradients(outputs, (x, weight, bias))],
    )


def test_changing_one_document_leaves_the_others_bitwise_unchanged_even_by_infinity():
    x, weight, bias = (t.detach() for t in make(B=1))
    changed = x.clone()
    changed[:, 3:9] = float("inf")
    before, _ = causal_conv1d(x, weight, bias, cu_seqlens=OFFSETS)
    after, _ = causal_conv1d(changed, weight, bias, cu_seqlens=OFFSETS)
    assert torch.equal(before[:, :3], after[:, :3]) and torch.equal(
        before[:, 9:], after[:, 9:]
    )


@pytest.mark.parametrize("cut", [1, 2, 7])
def test_two_halves_with_carried_state_equal_the_whole(cut):
    x, weight, bias = make()
    whole, end = causal_conv1d(x, weight, bias, output_final_state=True)
    first, middle = causal_conv1d(x[:, :cut], weight, bias, output_final_state=True)
    second, last = causal_conv1d(
        x[:, cut:], weight, bias, initial_state=middle, output_final_state=True
    )
    halves = torch.cat([first, second], dim=1)
    assert_same(
        [halves, last, *gradients(halves, (x, weight, bias))],
        [whole, end, *gradients(whole, (x, weight, bias))],
    )


@pytest.mark.parametrize("W", [1, 2, 4])
@pytest.mark.parametrize("activation", ["silu", None])
@pytest.mark.parametrize("offsets", [[0, 0], [0, 0, 0], None])
def test_sequences_without_tokens_give_their_states_back_and_gradients_of_zero(
    offsets, activation, W
):
    N = 2 if offsets is None else len(offsets) - 1
    x, weight, bias = make(B=2 if offsets is None else 1, T=0, W=W)
    state = torch.randn(N, 5, W, dtype=torch.float64, requires_grad=True)
    options = {
        "cu_seqlens": offsets,
        "initial_state": state,
        "output_final_state": True,
    }
    y, final = causal_conv1d(x, weight, bias, activation, **options)
    assert y.shape == x.shape and torch.equal(final, state)
    # one tap reads no state
    given = (x, weight, bias, state) if W > 1 else (x, weight, bias)
    assert_same(gradients(y, given), map(torch.zeros_like, given))
    _, final = causal_conv1d(
        x, weight, bias, cu_seqlens=offsets, output_final_state=True
    )
    assert_same([final], [torch.zeros_like(state)])


def test_bf16_rounds_once():
    x, weight, bias = (t.detach().bfloat16() for t in make())
    y, _ = causal_conv1d(x, weight, bias)
    exact = F.silu(torch_conv(x.double(), weight.double(), bias.double()))
    # One rounding of an fp32 result that is itself within an fp32 rounding or two.
    assert ((y.double() - exact).abs() <= exact.abs() * (2**-8 * 1.001)).all()


def test_the_backward_keeps_only_the_input():
    x, weight, bias = make(B=1, T=64, C=8)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: kept.append(t) or t, lambda t: t
    ):
        causal_conv1d(x, weight, bias)
    assert sum(t.numel() for t in kept) == x.numel() + weight.numel() + bias.numel()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"activation": "gelu"}, "unknown activation"),
        ({"weight": torch.zeros(3, 4)}, "takes x"),
        ({"weight": torch.zeros(5, 1, 4)}, r"takes x .* and \(5, 1, 4\)"),
        ({"x": torch.zeros(13, 2, 5, 2)}, r"takes x .* got \(13, 2, 5, 2\)"),
        ({"cu_seqlens": [0, 13]}, "need a batch of 1"),
        ({"initial_state": torch.zeros(2, 5, 3)}, "initial_state must be"),
    ],
)
def test_bad_input_is_refused(arguments, message):
    x, weight, _ = make()
    with pytest.raises(ValueError, match=message):
        causal_conv1d(**{"x": x, "weight": weight, **arguments})


def test_a_gpu_without_triton_runs_plain_torch_and_the_log_says_so(monkeypatch, caplog):
    """Fronts, and what packs the messages of a head exchange."""
    for module in (obstacles, exchange):
        monkeypatch.setattr(module, "find_spec", lambda name: None)
    monkeypatch.setattr(plain, "why_not_triton", obstacles.why_not_triton.__wrapped__)
    obstacles.log_obstacle_once.cache_clear()
    table = gdn_table(HeadSizes(2, 4, 64, 64).layout)
    with caplog.at_level("INFO"):
        front = plain.front_of.__wrapped__(table, "cuda", torch.bfloat16, 4)
    assert not front.is_triton
    assert (
        "conv, gates and norm run in plain torch: triton is not installed"
        in caplog.text
    )
    assert exchange._packing_module.__wrapped__(True).__name__.endswith(".pack_torch")


def test_a_carried_state_in_fp32_is_rounded_to_the_rows_dtype_first():
    x, weight, _ = (x.detach().bfloat16() for x in make())
    state = torch.randn(2, *weight.shape)
    found = causal_conv1d(x, weight, initial_state=state, output_final_state=True)
    rounded = {"initial_state": state.bfloat16(), "output_final_state": True}
    for y, expected in zip(found, causal_conv1d(x, weight, **rounded), strict=True):
        assert y.dtype == x.dtype and torch.equal(y, expected)
