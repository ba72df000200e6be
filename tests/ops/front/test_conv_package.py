"""When causal-conv1d computes a plain front's convolution, and what is said where it cannot; its
results are in ``tests/gpu/test_conv_package.py``."""

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from megatron_gdn.gdn import front
from megatron_gdn.mamba2 import front as mamba2
from megatron_gdn.ops.conv import convolve_rows as plain
from megatron_gdn.ops.delta_rule import front_choice, front_torch
from megatron_gdn.ops.delta_rule.base import HeadSizes
from megatron_gdn.ops.delta_rule.front_choice import front_conv_package
from megatron_gdn.ops.front import conv_package
from megatron_gdn.ops.front.conv_package import why_not_conv_package
from megatron_gdn.ops.obstacles import say_once
from tests.mamba2.test_front_and_norm import LAYOUT

SIZES = HeadSizes(2, 4, 64, 64)


@pytest.fixture
def package(monkeypatch):
    """``package(version)`` installs it; Triton is missing."""
    fake = ModuleType("causal_conv1d")
    fake.__spec__ = SimpleNamespace()

    def install(version, module=fake):
        conv_package._why_not_installed.cache_clear()
        monkeypatch.setitem(sys.modules, "causal_conv1d", module)
        monkeypatch.setattr(conv_package, "installed_version", lambda name: version)

    monkeypatch.delenv("CAUSAL_CONV1D_DETERMINISTIC", raising=False)
    for chooser in (front_choice, mamba2):
        monkeypatch.setattr(chooser, "why_not_triton", lambda *_: "triton is not installed")
    say_once.cache_clear()
    yield install
    conv_package._why_not_installed.cache_clear()


def chosen(kernels="auto", aligned=False, sizes=SIZES, dtype=torch.bfloat16, taps=4):
    return front_choice.kernels_for("cuda", dtype, taps, sizes, kernels, aligned)


def test_it_is_taken_on_a_gpu_without_triton_and_the_log_says_so(package, caplog):
    package("1.6.0")
    with caplog.at_level("INFO"):
        assert chosen() is front_conv_package
    assert "conv by causal-conv1d: triton is not installed" in caplog.text
    assert chosen("torch") is front_torch, "asked for by name"
    made = front.GDNFront.of.__wrapped__("cuda", torch.bfloat16, 4, SIZES)
    assert made.kernels is front_conv_package and not made.triton


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
        assert chosen() is front_torch
    assert said.replace("\\", "") in caplog.text


def test_a_package_built_for_another_torch_is_passed_over(package, monkeypatch, tmp_path):
    package("1.7.0")
    monkeypatch.delitem(sys.modules, "causal_conv1d")
    (tmp_path / "causal_conv1d.py").write_text("raise ImportError('undefined symbol: _ZN2at')\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert chosen() is front_torch
    why = conv_package._why_not_installed()
    assert why == "causal-conv1d cannot be imported: undefined symbol: _ZN2at"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"device": "cpu"}, "runs on a GPU, not on cpu"),
        ({"dtype": torch.float64}, "computes in fp32, not in torch.float64"),
        ({"taps": 5}, "takes 2 to 4 taps, not 5"),
        ({"widths": (16, 16, 20)}, "takes channels in eights, not [16, 16, 20]"),
        ({"aligned": True}, "was not seen to keep a token's bits, which batch_invariant_mode asks"),
    ],
)
def test_what_it_cannot_do_is_left_to_plain_torch(package, given, said):
    package("1.6.0")
    can = {"device": "cuda", "dtype": torch.bfloat16, "taps": 4, "widths": (16, 16, 32)}
    assert why_not_conv_package(**can) is None
    assert why_not_conv_package(**can | given) == f"causal-conv1d {said}"


def test_a_run_that_lets_it_add_in_any_order_does_not_get_it(package, monkeypatch):
    package("1.6.0")
    monkeypatch.setenv("CAUSAL_CONV1D_DETERMINISTIC", "0")
    assert chosen() is front_torch
    assert "CAUSAL_CONV1D_DETERMINISTIC=0" in why_not_conv_package("cuda", torch.half, 4, (8,))


@pytest.mark.parametrize("version, expected", [("1.6.0", "package"), ("1.5.2", "plain")])
def test_mamba2_chooses_by_the_same_rules(package, version, expected):
    package(version)
    shape, cuda = (1, 1, LAYOUT.width), torch.device("cuda")
    rows = SimpleNamespace(shape=shape, device=cuda, dtype=torch.half)
    rule = SimpleNamespace(batch_invariant=True)
    weight = torch.zeros(LAYOUT.conv_width, 1, 4)
    made = mamba2.mamba2_parts(rows, weight, None, *[None] * 3, LAYOUT, rule=rule, norm=None)
    assert made.front.convolve is {"package": conv_package.convolve_rows, "plain": plain}[expected]
