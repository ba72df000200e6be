"""Kernels of decoding in slots, and of whole mixers, against fp64 and in batch-invariant mode."""

from functools import partial

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_gdn.gdn.half import HalfOperands
from megatron_gdn.gdn.step import step_slots
from megatron_gdn.inference import Carry, decode, gdn_rows, mamba2_rows, prefill
from megatron_gdn.mamba2.plain import PlainSSD
from megatron_gdn.mamba2.step import mamba2_step_slots
from megatron_gdn.ops.delta_rule.base import HeadSizes
from megatron_gdn.ops.delta_rule.plain import PlainRule
from megatron_gdn.ops.generation.aligned import decode_on_grid
from megatron_gdn.ops.kernels.launch import Launch
from megatron_gdn.ops.mixer import mix
from megatron_gdn.ops.parts import GatedNorm, Neighbours
from megatron_gdn.ops.rules.base import RuleOutput, Saved
from tests.gdn_mixer import gated_delta_mixer
from tests.inference.row_mixers import DT_LIMIT, gdn_kind, mamba2_kind
from tests.kernels.conftest import INTERPRETED
from tests.mamba2.oracle import layout_of
from tests.ops.delta_rule.states import InHalf

from .kernel_cases import Case, assert_close

# The interpreter cuts bfloat16 off instead of rounding it.
DTYPES = [torch.float32, torch.float16] + ([] if INTERPRETED else [torch.bfloat16])
CASES = [
    (HeadSizes(2, 4, 8, 6), 4, True, {}),
    (HeadSizes(1, 3, 24, 40), 2, False, {}),
    (HeadSizes(2, 2, 16, 16), 5, False, {"normalise_qk": False}),
    (HeadSizes(2, 2, 96, 192), 4, False, {"allow_neg_eigval": True}),
]


@pytest.mark.parametrize(("sizes", "taps", "bias", "options"), CASES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_step_in_slots_is_the_recurrence(device, sizes, taps, bias, options, dtype):
    torch.manual_seed(1)
    H, C = sizes.value_heads, sizes.conv_width
    parameters = {
        "conv_weight": torch.randn(C, 1, taps).to(device, dtype) * 0.5,
        "conv_bias": torch.randn(C).to(device, dtype) if bias else None,
        "A_log": torch.randn(H).to(device),
        "dt_bias": torch.randn(H).to(device),
    }
    gamma = torch.randn(sizes.value_dim).to(device, dtype)
    made = {
        kernels: gdn_rows(
            torch.zeros(1, 1, sizes.width, dtype=dtype, device=device), **parameters, sizes=sizes,
            rule=PlainRule(), norm=GatedNorm(gamma), kernels=kernels, **options,
        )
        for kernels in ("torch", "triton")
    }  # fmt: skip
    step = partial(step_slots, sizes=sizes, **options)
    hold_a_step_in_slots(step, made, sizes.width, taps, device, dtype)


def hold_a_step_in_slots(step, made, width, taps, device, dtype):
    """``step`` launches the kernels; ``made`` is the same mixer over our kernels and in torch."""
    shape, slots = made["torch"].shape, torch.tensor([4, 0, 3], device=device)
    memory = Carry(*(torch.randn_like(x) for x in shape.zeros(6, dtype, device)))
    ours = Carry(*(x.clone() for x in memory))
    theirs = Carry(*(x.index_select(0, slots) for x in memory))
    for _ in range(taps + 1):  # until the whole history was written here
        proj = torch.randn(1, 3, width).to(device, dtype)
        o = step(proj[0], *made["triton"].of_front, *ours, slots)
        found = made["triton"].read_out(o, proj)
        plain, (theirs,) = decode(proj, made["torch"], theirs)
        rounding = 0 if dtype == torch.float32 else torch.finfo(dtype).eps
        torch.testing.assert_close(
            found.float(), plain.float(), rtol=1e-5 + rounding, atol=1e-5 * plain.abs().max().item()
        )
        assert torch.equal(ours.history[slots], theirs.history)
        scale = theirs.state.abs().max().item()
        torch.testing.assert_close(ours.state[slots], theirs.state, rtol=1e-5, atol=1e-5 * scale)
    for slot in (1, 2, 5):
        assert torch.equal(ours.state[slot], memory.state[slot])
        assert torch.equal(ours.history[slot], memory.history[slot])


MAMBA2_CASES = [  # heads, groups, head dim, state dim
    ((4, 2, 6, 8), 4, True, "normed"),
    ((3, 1, 40, 24), 2, False, "gate alone"),
    ((2, 2, 16, 16), 5, True, "D of channels"),
]


@pytest.mark.parametrize(("sizes", "taps", "bias", "what"), MAMBA2_CASES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_mamba2s_step_in_slots_is_the_recurrence(device, sizes, taps, bias, what, dtype):
    torch.manual_seed(1)
    layout = layout_of(*sizes)
    H, V, C = sizes[0], sizes[2], layout.conv_width
    parameters = (
        torch.randn(C, 1, taps).to(device, dtype) * 0.5,
        torch.randn(C).to(device, dtype) if bias else None,
        *(torch.randn(H).to(device) for _ in range(2)),
        torch.randn(H * V if what == "D of channels" else H).to(device),
    )
    gamma = torch.randn(H * V).to(device, dtype)
    made = {
        kernels: mamba2_rows(
            torch.zeros(1, 1, layout.width, dtype=dtype, device=device), *parameters, layout,
            rule=PlainSSD(), norm=None if what == "gate alone" else GatedNorm(gamma, 1e-5),
            dt_limit=(0.2, 1.0), kernels=kernels,
        )
        for kernels in ("torch", "triton")
    }  # fmt: skip
    step = partial(mamba2_step_slots, layout=layout, dt_limit=(0.2, 1.0))
    hold_a_step_in_slots(step, made, layout.width, taps, device, dtype)


def run(case, kernels: str, rule, **options):
    leaves = [case.proj, case.conv_weight, case.A_log, case.dt_bias, case.gamma]
    leaves = [x.detach().requires_grad_() for x in leaves]
    proj, weight, A_log, dt_bias, gamma = leaves
    out = gated_delta_mixer(
        proj, weight, None, A_log, dt_bias, case.sizes, rule=rule,
        norm=GatedNorm(gamma), documents=case.documents, kernels=kernels, **options,
    )  # fmt: skip
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype, device=out.device)
    return [out.detach(), *torch.autograd.grad(out, leaves, weights.view(out.shape))]


FP32, HALF = {"sizes": HeadSizes(1, 3, 8, 16)}, {"sizes": HeadSizes(2, 4, 8, 16)}
SHAPES = {
    "dense": {**FP32, "S": 35, "B": 2},
    "packed": {**FP32, "S": 40, "lengths": (1, 2, 20, 17)},
    "fp16 operands, dense": {**HALF, "S": 9, "B": 2},
    "fp16 operands, packed": {**HALF, "S": 21, "lengths": (1, 2, 18)},
}


@pytest.mark.parametrize("shape", SHAPES)
def test_output_and_every_gradient(shape, device):
    """Against fp64, or the twin: roundings of q, k, v and d_o to fp16 may fall the other way."""
    half, case = shape.startswith("fp16"), Case(device, **SHAPES[shape])
    rule = HalfOperands(InHalf()) if half else PlainRule()
    got = run(case, "triton", rule)
    exact = run(case if half else case.double(), "torch", rule)
    again = run(case, "triton", rule, recompute_qkv=True)
    names = ("out", "proj", "conv_weight", "A_log", "dt_bias", "gamma")
    for name, a, b, c in zip(names, got, exact, again, strict=True):
        # The rule in fp32 adds its own rounding to the kernels'.
        assert_close(name, a, b, 2**-11 if half else 3e-5)
        assert a.dtype == torch.float32 and torch.equal(a, c), name


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
