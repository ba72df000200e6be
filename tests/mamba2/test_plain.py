"""The plain SSD rule of narrow inputs and strong decays; a grouped norm that does not
fit."""

import pytest
import torch

from megatron_gdn.mamba2.rule import PlainSSD
from megatron_gdn.ops.readout.base import grouped_rms_norm
from megatron_gdn.ops.rules.base import SavedForBackward

from .oracle import oracle, random_inputs

RULE = PlainSSD()


def close(got, expected, tolerance=1e-11):
    for name, a, b in zip(("x", "B", "C", "dt", "g", "D"), got, expected, strict=False):
        scale = b.abs().max()
        assert (a.double() - b).abs().max() <= tolerance * scale, name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_narrow_inputs_are_computed_in_fp32_and_rounded_once(dtype):
    inputs, d_o = random_inputs(130, dtype=dtype)  # two chunks and two tokens
    o, _, grads, _ = oracle(inputs, (130,), d_o)
    got = RULE.begin(inputs, None).run().o
    found = RULE.begin_backward(d_o, inputs, SavedForBackward(), None).run()
    assert got.dtype == dtype and [t.dtype for t in found] == [t.dtype for t in inputs]
    # One rounding to the dtype; what is before is fp32 sums of a few hundred terms.
    unit = torch.finfo(dtype).eps / 2
    close([got], [o], unit + 1e-5)
    close(found, grads, unit + 1e-5)


def test_the_strongest_decays_leave_no_nan():
    inputs, d_o = random_inputs(130, dtype=torch.float32)
    inputs = inputs._replace(g=torch.full_like(inputs.g, -104.0))
    got = RULE.begin_backward(d_o, inputs, SavedForBackward(), None).run()
    assert all(t.isfinite().all() for t in (*got, RULE.begin(inputs, None).run().o))


@pytest.mark.parametrize(
    ("gamma", "groups"), [(12, 5), (12, 0), (12, -1), (6, 2), (1, 2)]
)
def test_a_norm_that_does_not_fit_is_refused(gamma, groups):
    said = rf"12 channels, gamma of shape \({gamma},\) and {groups} groups"
    with pytest.raises(ValueError, match=said):
        grouped_rms_norm(torch.randn(2, 12), torch.ones(gamma), groups, 1e-5)


def test_a_norm_of_narrow_rows_is_computed_in_fp32_and_rounded_once():
    make = torch.Generator().manual_seed(0)
    x = torch.randn(50, 12, generator=make).bfloat16()
    gamma = torch.randn(12, generator=make)
    exact = grouped_rms_norm(x.double(), gamma.double(), 2, 1e-5)
    found = grouped_rms_norm(x, gamma, 2, 1e-5)
    assert found.dtype == torch.bfloat16
    # Half a unit of the last of 8 bits, and some roundings of fp32.
    torch.testing.assert_close(found.double(), exact, rtol=2**-8 + 1e-6, atol=0)
