"""The convolution, and when causal-conv1d computes it."""

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from megatron_gdn.gdn.front import gdn_front
from megatron_gdn.ops import causal_conv1d, conv
from megatron_gdn.ops.conv import convolve_rows as plain
from megatron_gdn.ops.conv import why_not_conv_package
from megatron_gdn.ops.delta_rule.base import HeadSizes
from megatron_gdn.ops.front import choice
from megatron_gdn.ops.obstacles import say_once
from megatron_gdn.ops.rules.base import Bits


def make(B=2, T=13, C=5, W=4, seed=0):
    torch.manual_seed(seed)
    make = lambda *shape: torch.randn(*shape, dtype=torch.float64, requires_grad=True)  # noqa: E731
    return make(B, T, C), make(C, W), make(C)


def torch_conv(x_BTC, weight_CW, bias_C):
    C, W = weight_CW.shape
    y = F.conv1d(F.pad(x_BTC.transpose(1, 2), (W - 1, 0)), weight_CW[:, None], bias_C, groups=C)
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
    assert_same([y, *gradients(y, (x, weight, bias))],
                [expected, *gradients(expected, (x, weight, bias))])  # fmt: skip


OFFSETS = [0, 1, 3, 3, 9, 13]  # documents shorter than the kernel, and an empty one


def test_packed_documents_equal_the_same_documents_alone():
    x, weight, bias = make(B=1)
    y, _ = causal_conv1d(x, weight, bias, cu_seqlens=OFFSETS)
    alone = torch.cat(
        [
            F.silu(torch_conv(x[:, a:b], weight, bias))
            for a, b in zip(OFFSETS, OFFSETS[1:], strict=False)
            if b > a
        ],
        dim=1,
    )
    assert_same([y, *gradients(y, (x, weight, bias))],
                [alone, *gradients(alone, (x, weight, bias))])  # fmt: skip


def test_changing_one_document_leaves_the_others_bitwise_unchanged_even_by_infinity():
    x, weight, bias = (t.detach() for t in make(B=1))
    changed = x.clone()
    changed[:, 3:9] = float("inf")
    before, _ = causal_conv1d(x, weight, bias, cu_seqlens=OFFSETS)
    after, _ = causal_conv1d(changed, weight, bias, cu_seqlens=OFFSETS)
    assert torch.equal(before[:, :3], after[:, :3]) and torch.equal(before[:, 9:], after[:, 9:])


@pytest.mark.parametrize("cut", [1, 2, 7])
def test_two_halves_with_carried_state_equal_the_whole(cut):
    x, weight, bias = make()
    whole, end = causal_conv1d(x, weight, bias, output_final_state=True)
    first, middle = causal_conv1d(x[:, :cut], weight, bias, output_final_state=True)
    second, last = causal_conv1d(
        x[:, cut:], weight, bias, initial_state=middle, output_final_state=True
    )
    halves = torch.cat([first, second], dim=1)
    assert_same([halves, last, *gradients(halves, (x, weight, bias))],
                [whole, end, *gradients(whole, (x, weight, bias))])  # fmt: skip


def test_packed_documents_with_states_equal_the_same_documents_alone():
    x, weight, bias = make(B=1)
    state = torch.randn(5, 5, 4, dtype=torch.float64, requires_grad=True)
    y, final = causal_conv1d(
        x, weight, bias, cu_seqlens=OFFSETS, initial_state=state, output_final_state=True
    )
    for n, (a, b) in enumerate(zip(OFFSETS, OFFSETS[1:], strict=False)):
        one, one_final = causal_conv1d(
            x[:, a:b], weight, bias, initial_state=state[n : n + 1], output_final_state=True
        )
        assert_same([y[:, a:b], final[n : n + 1]], [one, one_final])


def test_bf16_rounds_once():
    x, weight, bias = (t.detach().bfloat16() for t in make())
    y, _ = causal_conv1d(x, weight, bias)
    exact = F.silu(torch_conv(x.double(), weight.double(), bias.double()))
    # One rounding of an fp32 result that is itself within an fp32 rounding or two.
    assert ((y.double() - exact).abs() <= exact.abs() * (2**-8 * 1.001)).all()


def test_the_backward_keeps_only_the_input():
    x, weight, bias = make(B=1, T=64, C=8)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        causal_conv1d(x, weight, bias)
    assert sum(t.numel() for t in kept) == x.numel() + weight.numel() + bias.numel()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"activation": "gelu"}, "unknown activation"),
        ({"weight": torch.zeros(3, 4)}, "takes x"),
        ({"cu_seqlens": [0, 13]}, "need a batch of 1"),
        ({"initial_state": torch.zeros(2, 5, 3)}, "initial_state must be"),
    ],
)
def test_bad_input_is_refused(arguments, message):
    x, weight, _ = make()
    with pytest.raises(ValueError, match=message):
        causal_conv1d(**{"x": x, "weight": weight, **arguments})


SIZES = HeadSizes(2, 4, 64, 64)


@pytest.fixture
def package(monkeypatch):
    """``package(version)`` installs it; Triton is missing."""
    fake = ModuleType("causal_conv1d")
    fake.__spec__ = SimpleNamespace()

    def install(version, module=fake):
        conv._why_not_installed.cache_clear()
        monkeypatch.setitem(sys.modules, "causal_conv1d", module)
        monkeypatch.setattr(conv, "installed_version", lambda name: version)

    monkeypatch.delenv("CAUSAL_CONV1D_DETERMINISTIC", raising=False)
    monkeypatch.setattr(choice, "why_not_triton", lambda *_: "triton is not installed")
    say_once.cache_clear()
    yield install
    conv._why_not_installed.cache_clear()


def chosen(kernels="auto", bits=Bits.FREE):
    """The convolution of a front on a GPU."""
    make = gdn_front.__wrapped__
    front = make("cuda", torch.bfloat16, 4, SIZES, kernels=kernels, bits=bits)
    assert not front.triton
    return front.convolve


def test_it_is_taken_on_a_gpu_without_triton_and_the_log_says_so(package, caplog):
    package("1.6.0")
    with caplog.at_level("INFO"):
        assert chosen() is choice.PACKAGE
    assert "conv by causal-conv1d: triton is not installed" in caplog.text
    assert chosen("torch") is plain, "asked for by name"


@pytest.mark.parametrize(
    ("version", "module", "said"),
    [
        (None, None, r"causal-conv1d is not installed (pip install \"megatron-gdn[conv1d]\")"),
        ("1.5.3.post1", ..., "causal-conv1d 1.5.3.post1 adds gradients in another order"),
        (None, ..., "causal-conv1d without a version adds gradients in another order"),
    ],
)
def test_without_the_package_it_is_plain_torch_and_the_log_says_why(
    package, caplog, version, module, said
):
    package(version, *([None] if module is None else []))
    with caplog.at_level("INFO"):
        assert chosen() is plain
    assert said.replace("\\", "") in caplog.text


def test_a_package_built_for_another_torch_is_passed_over(package, monkeypatch, tmp_path):
    package("1.7.0")
    monkeypatch.delitem(sys.modules, "causal_conv1d")
    (tmp_path / "causal_conv1d.py").write_text("raise ImportError('undefined symbol: _ZN2at')\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert chosen() is plain
    why = conv._why_not_installed()
    assert why == "causal-conv1d cannot be imported: undefined symbol: _ZN2at"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"device": "cpu"}, "runs on a GPU, not on cpu"),
        ({"dtype": torch.float64}, "computes in fp32, not in torch.float64"),
        ({"taps": 5}, "takes 2 to 4 taps, not 5"),
        ({"widths": (16, 16, 20)}, "takes channels in eights, not [16, 16, 20]"),
    ],
)
def test_what_it_cannot_do_is_left_to_plain_torch(package, given, said):
    package("1.6.0")
    can = {"device": "cuda", "dtype": torch.bfloat16, "taps": 4, "widths": (16, 16, 32)}
    assert why_not_conv_package(**can) is None
    assert why_not_conv_package(**can | given) == f"causal-conv1d {said}"


def test_batch_invariant_mode_does_not_get_it_and_the_log_says_so(package, caplog):
    package("1.6.0")
    with caplog.at_level("INFO"):
        assert chosen(bits=Bits.ON_GRID) is plain
    said = "causal-conv1d was not seen to keep a token's bits, which batch_invariant_mode asks"
    assert said in caplog.text


def test_a_run_that_lets_it_add_in_any_order_does_not_get_it(package, monkeypatch):
    package("1.6.0")
    monkeypatch.setenv("CAUSAL_CONV1D_DETERMINISTIC", "0")
    assert chosen() is plain
    assert "CAUSAL_CONV1D_DETERMINISTIC=0" in why_not_conv_package("cuda", torch.half, 4, (8,))
