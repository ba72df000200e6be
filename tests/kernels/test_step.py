"""One decode step in slots: the Triton kernels against the plain recurrence, to 1e-5 in fp32 (sums
in another order, Triton's exp2 and rsqrt) and to one rounding more in 16 bits."""

from functools import partial

import pytest
import torch

from megatron_gdn.gdn.step import step_slots
from megatron_gdn.inference import Carry, decode, gdn_rows, mamba2_rows
from megatron_gdn.mamba2.plain import PlainSSD
from megatron_gdn.mamba2.step import mamba2_step_slots
from megatron_gdn.ops.delta_rule.base import HeadSizes
from megatron_gdn.ops.delta_rule.plain import PlainRule
from megatron_gdn.ops.parts import GatedNorm
from tests.kernels.conftest import INTERPRETED
from tests.kernels.test_other_fronts import layout_of

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
