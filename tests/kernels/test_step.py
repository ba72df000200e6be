"""Kernels of a decode step, and of whole mixers, against fp64 and in batch-invariant
mode."""

import pytest
import torch

from megatron_gdn.gdn.half import HalfOperands
from megatron_gdn.inference import Memory, decode
from megatron_gdn.ops.delta_rule.base import HeadSizes
from megatron_gdn.ops.delta_rule.plain import PlainRule
from megatron_gdn.ops.generation.step_kernels import write_slots_on_gpu
from megatron_gdn.ops.mixer import mix
from megatron_gdn.ops.rules.base import Bits
from megatron_gdn.ops.stages import GatedNorm, SequenceContext
from tests.gdn_mixer import gated_delta_mixer
from tests.inference.row_mixers import (
    Parameters,
    copied,
    documents_of,
    gdn2_kind,
    gdn_kind,
    gdp_kind,
    kda_kind,
    mamba2_kind,
    prefilled,
)
from tests.kernels.conftest import INTERPRETED
from tests.ops.delta_rule.states import InHalf

from .kernel_cases import Case, assert_close

# The interpreter cuts bfloat16 off instead of rounding it.
DTYPES = [torch.float32, torch.float16] + ([] if INTERPRETED else [torch.bfloat16])


def made_of(case, device, dtype):
    """The same mixer over our kernels and in plain torch, and its taps."""
    kind, bias, options = case
    (weight, conv_bias, *gates), norm = kind.draw(dtype).to(device)
    own = weight, conv_bias if bias else None, *gates
    parameters = Parameters(own, None if options is GATE_ALONE else norm)
    rows = torch.zeros(1, 1, kind.layout.width, dtype=dtype, device=device)
    made = {
        kernels: kind.make(rows, parameters, kind.plain, kernels=kernels, **options)
        for kernels in ("torch", "triton")
    }
    return made, weight.shape[-1]


GATE_ALONE: dict = {}
# A kind, whether its convolution has a bias, and options.
CASES = {
    "gdn": (gdn_kind(HeadSizes(2, 4, 8, 6)), True, {}),
    "gdn, 2 taps": (gdn_kind(HeadSizes(1, 3, 24, 40), 2), False, {}),
    "gdn, no l2norm": (
        gdn_kind(HeadSizes(2, 2, 16, 16), 5),
        False,
        {"normalise_qk": False},
    ),
    "gdn, wide": (
        gdn_kind(HeadSizes(2, 2, 96, 192)),
        False,
        {"allow_neg_eigval": True},
    ),
    "kda": (kda_kind(HeadSizes(2, 4, 8, 6)), True, {}),
    "kda, bounded": (
        kda_kind(HeadSizes(1, 3, 24, 40), 2),
        False,
        {"lower_bound": -5.0},
    ),
    "kda, wide": (kda_kind(HeadSizes(2, 2, 96, 160), 3), False, {}),
    "gdn2": (gdn2_kind(HeadSizes(2, 4, 8, 6)), True, {}),
    "gdn2, 2 taps": (gdn2_kind(HeadSizes(1, 3, 24, 40), 2), False, {}),
    "gdp": (gdp_kind(HeadSizes(2, 4, 8, 6), 2), True, {}),
    "gdp, 2 taps": (gdp_kind(HeadSizes(1, 3, 24, 40), 3, 2), False, {}),
    "mamba2": (mamba2_kind(4, 2, 6, 8), True, {}),
    "mamba2, gate alone": (mamba2_kind(3, 1, 40, 24, 2), False, GATE_ALONE),
    "mamba2, D of channels": (
        mamba2_kind(2, 2, 16, 16, 5, per_channel_D=True),
        True,
        {},
    ),
}
WITH_EVERY_TAP = CASES | {
    f"gdn, {taps} taps": (gdn_kind(HeadSizes(1, 2, 7, 5), taps), False, {})
    for taps in (3, 6, 7, 8)
}


@pytest.mark.each_value
@pytest.mark.parametrize("case", WITH_EVERY_TAP.values(), ids=WITH_EVERY_TAP)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_step_in_place_is_the_recurrence(device, case, dtype):
    torch.manual_seed(1)
    made, taps = made_of(case, device, dtype)
    memory = made["torch"].memory_shape.zeros(3, dtype, device)
    # until all of it was written here
    hold_steps(made, drawn_like(memory), [1] * (taps + 1))


@pytest.mark.parametrize("name", ["gdn", "gdn2", "mamba2", "mamba2, D of channels"])
def test_rows_and_parameters_in_fp16_are_computed_with_in_fp32(name, device):
    """The interpreter refuses sums and products in fp16."""
    torch.manual_seed(1)
    made, _ = made_of(CASES[name], device, torch.float16)
    memory = made["torch"].memory_shape.zeros(1, torch.float16, device)
    hold_steps(made, drawn_like(memory), [1])


@pytest.mark.each_value
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_steps_in_a_contexts_buffers_are_the_recurrence(device, case, dtype):
    """Windows of W in a wider dtype, states as Mamba2's context holds them, slots that
    pad a step, and several tokens at once with the memory after each.
    """
    torch.manual_seed(2)
    made, taps = made_of(case, device, dtype)
    shape = made["torch"].memory_shape
    slots = torch.tensor([4, -1, 0, 3], dtype=torch.int32, device=device)
    history = torch.zeros(
        6, *shape.dynamic_context_history, dtype=torch.float32, device=device
    )
    state = torch.zeros(
        6, *shape.state[::2], shape.rows, dtype=torch.float64, device=device
    )
    assert state.shape[1:] == (shape.heads, shape.columns, shape.rows)
    memory = drawn_like(Memory(history, state.mT, slots))
    hold_steps(made, memory, [1, 3, 1, taps])


def drawn_like(memory):
    history, state, slots = memory
    return Memory(torch.randn_like(history), torch.randn_like(state), slots)


def hold_steps(made, memory, counts):
    """Steps of so many tokens by kernels change memory as those in plain torch do."""
    stages = made["torch"]
    device = memory.history.device
    dtype = stages.front_parameters[0].dtype
    assert made["triton"].front.is_triton and not stages.front.is_triton
    slots = memory.slots
    real = slice(None) if slots is None else (slots >= 0).nonzero()[:, 0]
    N, M = len(memory.history if slots is None else slots), len(memory.history)
    used = set(range(M) if slots is None else slots.tolist())
    ours = copied(memory)
    theirs = copied(memory)
    if memory.state.stride(-1) != 1:  # a copy of a view is no view
        ours, theirs = (
            x._replace(state=x.state.mT.contiguous().mT) for x in (ours, theirs)
        )
    for count in counts:
        proj = torch.randn(count, N, stages.front.layout.width).to(device, dtype)
        steps = [None, None]
        if count > 1:
            steps = [Memory(*(buffers(x, count) for x in memory[:2])) for _ in range(2)]
        found = decode(proj, made["triton"], ours, steps[0])
        plain = decode(proj, stages, theirs, steps[1])
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("integers", [torch.int32, torch.int64])
def test_values_are_put_in_their_slots_alone(dtype, integers, device):
    buffer = torch.zeros(5, 3, 1700, dtype=dtype, device=device)
    slots = torch.tensor([3, -1, 0], dtype=integers, device=device)
    values = torch.randn(3, 3, 1700, device=device).to(dtype)
    write_slots_on_gpu(buffer, slots, values)
    assert torch.equal(buffer[3], values[0]) and torch.equal(buffer[0], values[2])
    assert not buffer[[1, 2, 4]].any()


def run(case, kernels: str, rule, **options):
    leaves = [case.proj, case.conv_weight, case.A_log, case.dt_bias, case.gamma]
    leaves = [x.detach().requires_grad_() for x in leaves]
    proj, weight, A_log, dt_bias, gamma = leaves
    out = gated_delta_mixer(
        proj,
        weight,
        None,
        A_log,
        dt_bias,
        case.sizes,
        rule=rule,
        norm=GatedNorm(gamma),
        documents=case.documents,
        kernels=kernels,
        **options,
    )
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype, device=out.device)
    return [out.detach(), *torch.autograd.grad(out, leaves, weights.view(out.shape))]


FP32 = {"sizes": HeadSizes(1, 3, 8, 16)}
HALF = {"sizes": HeadSizes(2, 4, 8, 16)}
SHAPES = {
    "dense": {**FP32, "S": 35, "B": 2},
    "packed": {**FP32, "S": 40, "lengths": (1, 2, 20, 17)},
    "fp16 operands, dense": {**HALF, "S": 9, "B": 2},
    "fp16 operands, packed": {**HALF, "S": 21, "lengths": (1, 2, 18)},
}


@pytest.mark.parametrize("shape", SHAPES)
def test_output_and_every_gradient(shape, device):
    """Against fp64, or the twin: roundings of q, k, v and d_o to fp16 may fall the
    other way."""
    half = shape.startswith("fp16")
    case = Case(device, **SHAPES[shape])
    rule = HalfOperands(InHalf()) if half else PlainRule()
    got = run(case, "triton", rule)
    exact = run(case if half else case.double(), "torch", rule)
    again = run(case, "triton", rule, recompute_qkv=True)
    names = ("out", "proj", "conv_weight", "A_log", "dt_bias", "gamma")
    for name, a, b, c in zip(names, got, exact, again, strict=True):
        # The rule in fp32 adds its own rounding to the kernels'.
        assert_close(name, a, b, 2**-11 if half else 3e-5)
        assert a.dtype == torch.float32 and torch.equal(a, c), name


GDN = gdn_kind(HeadSizes(1, 2, 8, 12))
MAMBA2 = mamba2_kind(heads=2, groups=1, head_dim=6, state_dim=8)


def on_the_grid(kind, rows):
    rule = type(kind.plain)(Bits.ON_GRID)
    parameters = kind.draw(torch.float32)
    return kind.make(rows, parameters.to(rows.device), rule, kernels="triton")


@pytest.mark.parametrize("kind", [GDN, MAMBA2], ids=["gdn", "mamba2"])
def test_prefill_and_steps_have_the_bits_of_training(kind, device):
    rows = kind.rows(67, 2).to(device)
    stages = on_the_grid(kind, rows)
    assert stages.front.is_triton
    with torch.no_grad():
        whole = mix(rows, stages, SequenceContext(None))
    mixed, memory = prefilled(stages, rows[:61])
    assert torch.equal(mixed, whole[:61])
    steps = memory.steps(6)
    mixed = decode(rows[61:], stages, memory, steps)
    assert torch.equal(mixed, whole[61:])
    assert torch.equal(steps.state[:, 2], steps.state[:, 0])
    assert not torch.equal(steps.state[:, 2], steps.state[:, 3])


@pytest.mark.parametrize("kind", [GDN, MAMBA2], ids=["gdn", "mamba2"])
def test_documents_on_the_grid_have_the_bits_of_each_alone(kind, device):
    rows = kind.rows(12).to(device)
    stages = on_the_grid(kind, rows)
    documents = documents_of((5, 7), device)
    with torch.no_grad():
        packed = mix(rows, stages, SequenceContext(documents))
        alone = [mix(x, stages, SequenceContext(None)) for x in rows.split((5, 7))]
    assert torch.equal(packed, torch.cat(alone))


@pytest.mark.parametrize("size", [1, 4096, 4097])
def test_every_element_of_a_slot_is_written(size, device):
    """Slots of one program and of more."""
    values = torch.arange(1.0, 2 * size + 1, device=device).view(2, size)
    buffer = torch.zeros(3, size, device=device)
    write_slots_on_gpu(buffer, torch.tensor([2, 0], device=device), values)
    assert torch.equal(buffer[[2, 0]], values) and not buffer[1].any()
