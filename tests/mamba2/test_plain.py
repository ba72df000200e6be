"""The plain SSD rule, and Mamba2's front and grouped norm against the same in fp64 written out."""

import pytest
import torch

from megatron_gdn.mamba2.rule import PlainSSD, SSDInputs
from megatron_gdn.ops.readout.base import grouped_rms_norm
from megatron_gdn.ops.rules.base import Saved
from tests.whole_groups import whole_groups

from .oracle import documents_of, oracle, random_inputs

RULE = PlainSSD()


def close(got, expected, tolerance=1e-11):
    for name, a, b in zip(("x", "B", "C", "dt", "g", "D"), got, expected, strict=False):
        scale = b.abs().max()
        assert (a.double() - b).abs().max() <= tolerance * scale, name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_narrow_inputs_are_computed_in_fp32_and_rounded_once(dtype):
    inputs, d_o = random_inputs(200, dtype=dtype)
    o, _, grads, _ = oracle(inputs, (200,), d_o)
    got = RULE.begin(inputs, None).run().o
    found = RULE.begin_backward(d_o, inputs, Saved(), None).run()
    assert got.dtype == dtype and [t.dtype for t in found] == [t.dtype for t in inputs]
    # One rounding to the dtype; what is before is fp32 sums of a few hundred terms.
    unit = torch.finfo(dtype).eps / 2
    close([got], [o], unit + 1e-5)
    close(found, grads, unit + 1e-5)


@whole_groups()
def test_a_documents_bits_depend_neither_on_its_neighbours_nor_on_its_place():
    lengths = (70, 129, 33)
    inputs, d_o = random_inputs(sum(lengths), dtype=torch.float32)
    documents, at = documents_of(lengths), slice(70, 199)
    alone = SSDInputs(*(t[:, at] for t in inputs))
    o = RULE.begin(inputs, documents).run().o
    assert torch.equal(o[:, at], RULE.begin(alone, documents_of((129,))).run().o)
    grads = RULE.begin_backward(d_o, inputs, Saved(), documents).run()
    of_alone = RULE.begin_backward(d_o[:, at], alone, Saved(), documents_of((129,))).run()
    for a, b in zip(grads, of_alone, strict=True):
        assert torch.equal(a[:, at], b)


def test_the_strongest_decays_leave_no_nan():
    inputs, d_o = random_inputs(130, dtype=torch.float32)
    inputs = inputs._replace(g=torch.full_like(inputs.g, -104.0))
    got = RULE.begin_backward(d_o, inputs, Saved(), None).run()
    assert all(t.isfinite().all() for t in (*got, RULE.begin(inputs, None).run().o))


H, G, V, K, W = 4, 2, 3, 5, 4


def test_a_norm_that_does_not_fit_is_refused():
    with pytest.raises(ValueError, match=r"12 channels, gamma of shape \(12,\) and 5 groups"):
        grouped_rms_norm(torch.randn(2, 12), torch.ones(12), 5)
