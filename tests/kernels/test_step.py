"""Kernels of a decode step, and of whole mixers, against fp64 and in batch-invariant mode."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_gdn.gdn.half import HalfOperands
from megatron_gdn.gdn2.rule import PlainGDN2
from megatron_gdn.gdn2.sizes import rows_of as rows_of_gdn2
from megatron_gdn.inference import Memory, decode, gdn2_rows, gdn_rows, kda_rows, mamba2_rows
from megatron_gdn.kda.sizes import rows_of
from megatron_gdn.mamba2.rule import PlainSSD
from megatron_gdn.ops.delta_rule.base import HeadSizes
from megatron_gdn.ops.delta_rule.plain import PlainRule
from megatron_gdn.ops.generation.aligned import decode_on_grid
from megatron_gdn.ops.generation.step_kernels import put_in_slots
from megatron_gdn.ops.kernels.launch import Launch
from megatron_gdn.ops.mixer import mix
from megatron_gdn.ops.parts import GatedNorm, Neighbours
from megatron_gdn.ops.rules.base import Bits, RuleOutput, Saved
from tests.gdn_mixer import gated_delta_mixer
from tests.inference.row_mixers import DT_LIMIT, copied, gdn_kind, mamba2_kind, prefilled
from tests.kernels.conftest import INTERPRETED
from tests.mamba2.oracle import layout_of
from tests.ops.delta_rule.states import InHalf

from .kernel_cases import Case, assert_close

# The interpreter cuts bfloat16 off instead of rounding it.
DTYPES = [torch.float32, torch.float16] + ([] if INTERPRETED else [torch.bfloat16])
DT_RANGE = (0.2, 1.0)


def gdn_made(device, dtype, sizes, taps, bias=False, **options):
    """The same mixer over our kernels and in plain torch."""
    own, gamma = drawn(device, dtype, sizes.layout, taps, bias, [sizes.value_heads] * 2)
    return {
        kernels: gdn_rows(
            no_row(sizes.layout, device, dtype), *own, sizes, rule=PlainRule(),
            norm=GatedNorm(gamma[: sizes.value_dim]), kernels=kernels, **options,
        )
        for kernels in ("torch", "triton")
    }  # fmt: skip


def kda_made(device, dtype, sizes, taps, bias=False, **options):
    layout, H = rows_of(*sizes), sizes.value_heads
    own, gamma = drawn(device, dtype, layout, taps, bias, [H, H * sizes.key_dim])
    norm = GatedNorm(gamma[: sizes.value_dim], activation="sigmoid")
    return {
        kernels: kda_rows(
            no_row(layout, device, dtype), *own, layout, rule=PlainRule(), norm=norm,
            kernels=kernels, **options,
        )
        for kernels in ("torch", "triton")
    }  # fmt: skip


def gdn2_made(device, dtype, sizes, taps, bias=False, **options):
    layout, G = rows_of_gdn2(*sizes), sizes.key_heads
    own, gamma = drawn(device, dtype, layout, taps, bias, [G, G * sizes.key_dim])
    return {
        kernels: gdn2_rows(
            no_row(layout, device, dtype), *own, layout, rule=PlainGDN2(),
            norm=GatedNorm(gamma[: sizes.value_dim]), kernels=kernels, **options,
        )
        for kernels in ("torch", "triton")
    }  # fmt: skip


def mamba2_made(device, dtype, sizes, taps, bias=False, what="normed"):
    layout, (H, _, V, _) = layout_of(*sizes), sizes
    D = H * V if what == "D of channels" else H
    own, gamma = drawn(device, dtype, layout, taps, bias, [H, H, D])
    norm = None if what == "gate alone" else GatedNorm(gamma, 1e-5)
    return {
        kernels: mamba2_rows(
            no_row(layout, device, dtype), *own, layout, rule=PlainSSD(), norm=norm,
            dt_limit=DT_RANGE, kernels=kernels,
        )
        for kernels in ("torch", "triton")
    }  # fmt: skip


def drawn(device, dtype, layout, taps, bias, gates):
    C = layout.conv_width
    own = (
        torch.randn(C, 1, taps).to(device, dtype) * 0.5,
        torch.randn(C).to(device, dtype) if bias else None,
        *(torch.randn(n).to(device) for n in gates),
    )
    return own, torch.randn(layout.mixed_width).to(device, dtype)


def no_row(layout, device, dtype):
    return torch.zeros(1, 1, layout.width, dtype=dtype, device=device)


CASES = [
    (gdn_made, HeadSizes(2, 4, 8, 6), 4, True, {}),
    (gdn_made, HeadSizes(1, 3, 24, 40), 2, False, {}),
    (gdn_made, HeadSizes(2, 2, 16, 16), 5, False, {"normalise_qk": False}),
    (gdn_made, HeadSizes(2, 2, 96, 192), 4, False, {"allow_neg_eigval": True}),
    (kda_made, HeadSizes(2, 4, 8, 6), 4, True, {}),
    (kda_made, HeadSizes(1, 3, 24, 40), 2, False, {"lower_bound": -5.0}),
    (kda_made, HeadSizes(2, 2, 96, 160), 3, False, {}),
    (gdn2_made, HeadSizes(2, 4, 8, 6), 4, True, {}),
    (gdn2_made, HeadSizes(1, 3, 24, 40), 2, False, {}),
    (mamba2_made, (4, 2, 6, 8), 4, True, {}),
    (mamba2_made, (3, 1, 40, 24), 2, False, {"what": "gate alone"}),
    (mamba2_made, (2, 2, 16, 16), 5, True, {"what": "D of channels"}),
]
EVERY_TAP = [(gdn_made, HeadSizes(1, 2, 7, 5), taps, False, {}) for taps in (3, 6, 7, 8)]


@pytest.mark.parametrize(("make", "sizes", "taps", "bias", "options"), [*CASES, *EVERY_TAP])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_step_in_place_is_the_recurrence(device, make, sizes, taps, bias, options, dtype):
    torch.manual_seed(1)
    made = make(device, dtype, sizes, taps, bias, **options)
    memory = made["torch"].shape.zeros(3, dtype, device)
    hold_steps(made, drawn_like(memory), [1] * (taps + 1))  # until all of it was written here


@pytest.mark.parametrize(("make", "sizes", "taps", "bias", "options"), CASES)
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_steps_in_a_contexts_buffers_are_the_recurrence(
    device, make, sizes, taps, bias, options, dtype
):
    """Windows of W in a wider dtype, states as Mamba2's context holds them, slots that pad a step,
    and several tokens at once with the memory after each.
    """
    torch.manual_seed(2)
    made = make(device, dtype, sizes, taps, bias, **options)
    shape = made["torch"].shape
    slots = torch.tensor([4, -1, 0, 3], dtype=torch.int32, device=device)
    history = torch.zeros(6, *shape.window(taps), dtype=torch.float32, device=device)
    state = torch.zeros(6, *shape.state[::2], shape.rows, dtype=torch.float64, device=device)
    assert state.shape[1:] == (shape.heads, shape.columns, shape.rows)
    memory = drawn_like(Memory(history, state.mT, slots))
    hold_steps(made, memory, [1, 3, 1, taps])


def drawn_like(memory):
    history, state, slots = memory
    return Memory(torch.randn_like(history), torch.randn_like(state), slots)


def hold_steps(made, memory, counts):
    """Steps of so many tokens by kernels change memory as those in plain torch do."""
    parts = made["torch"]
    device, dtype = memory.history.device, parts.of_front[0].dtype
    assert made["triton"].front.triton and not parts.front.triton
    slots = memory.slots
    real = slice(None) if slots is None else (slots >= 0).nonzero()[:, 0]
    N, M = len(memory.history if slots is None else slots), len(memory.history)
    used = set(range(M) if slots is None else slots.tolist())
    ours, theirs = copied(memory), copied(memory)
    if memory.state.stride(-1) != 1:  # a copy of a view is no view
        ours, theirs = (x._replace(state=x.state.mT.contiguous().mT) for x in (ours, theirs))
    for count in counts:
        proj = torch.randn(count, N, parts.front.layout.width).to(device, dtype)
        steps = [None, None]
        if count > 1:
            steps = [Memory(*(buffers(x, count) for x in memory[:2])) for _ in range(2)]
        found = decode(proj, made["triton"], ours, steps[0])
        plain = decode(proj, parts, theirs, steps[1])
        assert found.dtype == plain.dtype == dtype
        rounding = 0 if dtype == torch.float32 else torch.finfo(dtype).eps
        close = {"rtol": 1e-5 + rounding, "atol": 1e-5 * plain.abs().max().item()}
        torch.testing.assert_close(found.float(), plain.float(), **close)
        if slots is not None:
            assert not found[:, (slots < 0).nonzero()[:, 0]].any()
        for a, b in ((ours, theirs), steps) if count > 1 else ((ours, theirs),):
            at = real if slots is None else slots[real].long()
            assert torch.equal(a.history[at], b.history[at])
            bound = 1e-5 * b.state[at].abs().max().item()
            torch.testing.assert_close(a.state[at], b.state[at], rtol=1e-5, atol=bound)
        for slot in set(range(M)) - used:
            assert torch.equal(ours.state[slot], memory.state[slot])
            assert torch.equal(ours.history[slot], memory.history[slot])
            for x in (steps[0] or ())[:2]:
                assert (x[slot] == 7).all()


def buffers(x, count):
    """Of a context's memory after each token, laid as ``x`` is, with marks in it."""
    if x.stride(-1) == 1:
        return x.new_full((len(x), count, *x.shape[1:]), 7)
    return x.new_full((len(x), count, *x.mT.shape[1:]), 7).mT


def test_values_are_put_in_their_slots_alone(device):
    buffer = torch.zeros(5, 3, 1700, device=device)
    slots, values = torch.tensor([3, -1, 0], device=device), torch.randn(3, 3, 1700, device=device)
    put_in_slots(buffer, slots, values)
    assert torch.equal(buffer[3], values[0]) and torch.equal(buffer[0], values[2])
    assert not buffer[[1, 2, 4]].any()


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
    given = {"rule": PlainRule(Bits.ON_GRID), "norm": parameters.norm, "kernels": "triton"}
    return gdn_rows(rows, *parameters.own, SIZES, **given)


def mamba2(rows, parameters):
    given = {"rule": PlainSSD(Bits.ON_GRID), "norm": parameters.norm, "kernels": "triton"}
    return mamba2_rows(rows, *parameters.own, MAMBA2.layout, dt_limit=DT_LIMIT, **given)


@pytest.mark.parametrize(("kind", "make"), [(GDN, gdn), (MAMBA2, mamba2)], ids=["gdn", "mamba2"])
def test_prefill_and_steps_have_the_bits_of_training(kind, make, device):
    rows = kind.rows(67, 2).to(device)
    parts = make(rows, kind.draw(torch.float32).to(device))
    assert parts.front.triton
    with torch.no_grad():
        whole = mix(rows, parts, Neighbours(None))
    mixed, memory = prefilled(parts, rows[:61])
    assert torch.equal(mixed, whole[:61])
    steps = memory.steps(6)
    mixed = decode(rows[61:], parts, memory, steps, stands=[61, 61])
    assert torch.equal(mixed, whole[61:])
    assert torch.equal(steps.state[:, 2], steps.state[:, 0])
    assert not torch.equal(steps.state[:, 2], steps.state[:, 3])


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

    name, bits, leaves_states = "stand-in", Bits.ON_GRID, True
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
