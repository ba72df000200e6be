"""The whole mixer on its kernels, around the plain-torch rule, against fp64 without them."""

import pytest
import torch

from megatron_gdn.gdn.half import HalfOperands
from megatron_gdn.ops.delta_rule.base import HeadSizes
from megatron_gdn.ops.delta_rule.plain import PlainRule
from megatron_gdn.ops.parts import GatedNorm
from tests.gdn_mixer import gated_delta_mixer
from tests.ops.delta_rule.states import InHalf

from .kernel_cases import Case, assert_close


def run(case, kernels: str, rule=None, **options):
    leaves = [case.proj, case.conv_weight, case.A_log, case.dt_bias, case.gamma]
    leaves = [x.detach().requires_grad_() for x in leaves]
    proj, weight, A_log, dt_bias, gamma = leaves
    out = gated_delta_mixer(
        proj, weight, None, A_log, dt_bias, case.sizes, rule=rule or PlainRule(),
        norm=GatedNorm(gamma), documents=case.documents, kernels=kernels, **options,
    )  # fmt: skip
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype, device=out.device)
    return [out.detach(), *torch.autograd.grad(out, leaves, weights.view(out.shape))]


@pytest.mark.parametrize(
    "shape", [{"S": 35, "B": 2}, {"S": 40, "lengths": (1, 2, 20, 17)}], ids=["dense", "packed"]
)
def test_output_and_every_gradient(shape, device):
    case = Case(device, sizes=HeadSizes(1, 3, 8, 16), **shape)
    got = run(case, "triton")
    exact = run(case.double(), "torch")
    names = ("out", "proj", "conv_weight", "A_log", "dt_bias", "gamma")
    for name, a, b in zip(names, got, exact, strict=True):
        assert_close(name, a, b, 3e-5)  # the rule in fp32 adds its own rounding to the kernels'
    for name, a, b in zip(names, got, run(case, "triton", recompute_qkv=True), strict=True):
        assert torch.equal(a, b), name


@pytest.mark.parametrize(
    "shape", [{"S": 9, "B": 2}, {"S": 21, "lengths": (1, 2, 18)}], ids=["dense", "packed"]
)
def test_fp16_operands_give_the_twins_results(shape, device):
    """To the rounding of q, k, v and d_o to fp16, which may fall the other way now and then."""
    case, rule = Case(device, sizes=HeadSizes(2, 4, 8, 16), **shape), HalfOperands(InHalf())
    got, twin = run(case, "triton", rule), run(case, "torch", rule)
    names = ("out", "proj", "conv_weight", "A_log", "dt_bias", "gamma")
    for name, a, b in zip(names, got, twin, strict=True):
        assert a.dtype == torch.float32
        assert_close(name, a, b, 2**-11)
    for name, a, b in zip(names, got, run(case, "triton", rule, recompute_qkv=True), strict=True):
        assert torch.equal(a, b), name
