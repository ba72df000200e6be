"""The whole mixer on its kernels: against fp64 without them, and in batch-invariant mode."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_gdn.gdn.half import HalfOperands
from megatron_gdn.inference import decode, gdn_rows, mamba2_rows, prefill
from megatron_gdn.mamba2.plain import PlainSSD
from megatron_gdn.ops.delta_rule.base import HeadSizes
from megatron_gdn.ops.delta_rule.plain import PlainRule
from megatron_gdn.ops.generation.aligned import decode_on_grid
from megatron_gdn.ops.kernels.launch import Launch
from megatron_gdn.ops.mixer import mix
from megatron_gdn.ops.parts import GatedNorm, Neighbours
from megatron_gdn.ops.rules.base import RuleOutput, Saved
from tests.gdn_mixer import gated_delta_mixer
from tests.inference.row_mixers import DT_LIMIT, gdn_kind, mamba2_kind
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


SIZES = HeadSizes(1, 2, 8, 12)
GDN, MAMBA2 = gdn_kind(SIZES), mamba2_kind(heads=2, groups=1, head_dim=6, state_dim=8)


def gdn(rows, parameters):
    given = {"rule": PlainRule(aligned=True), "norm": parameters.norm, "kernels": "triton"}
    return gdn_rows(rows, *parameters.own, SIZES, **given)


def mamba2(rows, parameters):
    given = {"rule": PlainSSD(aligned=True), "norm": parameters.norm, "kernels": "triton"}
    return mamba2_rows(rows, *parameters.own, MAMBA2.layout, dt_limit=DT_LIMIT, **given)


@pytest.mark.parametrize(("kind", "make"), [(GDN, gdn), (MAMBA2, mamba2)], ids=["gdn", "mamba2"])
def test_prefill_and_steps_have_the_bits_of_training(kind, make, device):
    rows = kind.rows(67, 2).to(device)
    parts = make(rows, kind.draw(torch.float32).to(device))
    assert parts.front.triton
    with torch.no_grad():
        whole = mix(rows, parts, Neighbours(None))
    mixed, carry = prefill(rows[:61], parts)
    assert torch.equal(mixed, whole[:61])
    mixed, after = decode(rows[61:], parts, carry, stands=[61, 61])
    assert torch.equal(mixed, whole[61:])
    assert not torch.equal(after[1].state, after[2].state)


class Calls(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        name = function.overloadpacket.__name__
        if isinstance(made, torch.Tensor) and not function.is_view and "empty" not in name:
            self.names.append(name)
        return made


class StandIn:
    """A rule that computes nothing, and leaves states as FlashQLA does."""

    name, batch_invariant, aligned, leaves_states = "stand-in", True, True, True
    operand_dtype = None

    def begin(self, inputs, documents):
        self.inputs = inputs
        return self

    def run(self, initial, *, keep, final):
        o = torch.empty_like(self.inputs.v)
        return RuleOutput(o, torch.empty_like(initial) if final else None, Saved())


@pytest.mark.parametrize("N", [4, 32])
def test_a_step_is_the_rule_two_kernels_and_two_calls_of_torch(N, device, monkeypatch):
    launches: list[Launch] = []
    monkeypatch.setattr(Launch, "__call__", lambda self, *args: launches.append(self))
    rows, parameters = GDN.rows(1, N).to(device), GDN.draw(torch.float32).to(device)
    parts = gdn(rows, parameters)._replace(rule=StandIn())
    memory = parts.shape.zeros(N, torch.float32, device)
    for stands, more in (
        ([7] * N, []),
        ([7] * (N - 1) + [63], ["index_select", "index_copy_"] * 2),  # a chunk ends
    ):
        decode_on_grid(rows, parts, memory, stands)  # makes tables
        launches.clear()
        with Calls() as calls:
            decode_on_grid(rows, parts, memory, stands)
        assert sorted(calls.names) == sorted(["index_copy_", "index_select", *more])
        assert len(launches) == 2
