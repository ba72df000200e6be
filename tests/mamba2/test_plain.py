"""The plain SSD rule, and Mamba2's front and grouped norm against the same in fp64 written out."""

import pytest
import torch
import torch.nn.functional as F

from megatron_gdn.mamba2.front import mamba2_front
from megatron_gdn.mamba2.plain import PlainSSD, SSDInputs
from megatron_gdn.ops.readout.plain import PlainReadout, grouped_rms_norm
from megatron_gdn.ops.rules.base import Saved
from tests.ops.test_readout import ACTIVATIONS, assert_readout
from tests.whole_groups import whole_groups

from .oracle import documents_of, layout_of, oracle, random_inputs

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
LAYOUT = layout_of(H, G, V, K)


def parameters(bias=True, dtype=torch.float64):
    C = LAYOUT.conv_width
    made = [torch.randn(C, 1, W), torch.randn(C), torch.randn(H), torch.randn(H), torch.randn(H)]
    made = [x.double() for x in made]
    made[:2] = [x.to(dtype) for x in made[:2]]
    return [x if bias or i != 1 else None for i, x in enumerate(made)]


def written_out(proj, weight, bias, A_log, dt_bias, D, limit):
    rows = proj.transpose(0, 1)
    x = rows[..., LAYOUT.conv_columns].mT
    x = F.conv1d(F.pad(x, (W - 1, 0)), weight, bias, groups=x.shape[1])
    x, B, C = F.silu(x).mT.split(LAYOUT.conv_widths, dim=-1)
    dt = F.softplus(rows[..., LAYOUT.columns("dt")] + dt_bias).clamp(*limit)
    B, C = (t.unflatten(-1, (G, K)) for t in (B, C))
    return SSDInputs(
        x.unflatten(-1, (H, V)), B, C, dt, -A_log.exp() * dt, D[:, None].expand(*dt.shape, 1)
    )


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("limit", [(0.0, float("inf")), (0.3, 1.1)], ids=["free", "limited"])
def test_front_and_its_gradients(bias, limit):
    torch.manual_seed(0)
    S, batch = 9, 2
    proj = torch.randn(S, batch, LAYOUT.width, dtype=torch.float64)
    given = parameters(bias)
    leaves = [None if x is None else x.clone().requires_grad_() for x in (proj, *given)]
    expected = written_out(*leaves, limit)
    front = mamba2_front("cpu", proj.dtype, W, LAYOUT, limit)
    made = front.forward(proj, given, None)
    for name, a, b in zip(SSDInputs._fields, made, expected, strict=True):
        torch.testing.assert_close(a, b.detach(), msg=name)
    grads = SSDInputs(*(torch.randn_like(x) for x in made))
    present = [x for x in leaves if x is not None]
    wanted = torch.autograd.grad(list(expected), present, list(grads), materialize_grads=True)
    d_proj = torch.zeros_like(proj)
    got = [x for x in front.backward(proj, given, grads, d_proj, None) if x is not None]
    for a, b in zip((d_proj, *got), wanted, strict=True):
        torch.testing.assert_close(a, b)


def test_taps_stop_at_documents_and_only_what_is_asked_for_is_made():
    torch.manual_seed(0)
    lengths, given = (5, 0, 7), parameters()
    proj = torch.randn(12, 1, LAYOUT.width, dtype=torch.float64)
    front = mamba2_front("cpu", proj.dtype, W, LAYOUT)
    made = front.forward(proj, given, documents_of(lengths))
    for at in (slice(0, 5), slice(5, 12)):
        alone = front.forward(proj[at], given, None)
        for a, b in zip(made[:5], alone[:5], strict=True):
            torch.testing.assert_close(a[:, at], b)
    some = front.forward(proj, given, documents_of(lengths), ("B", "dt"))
    assert [name for name, x in some._asdict().items() if x is not None] == ["B", "dt"]
    assert torch.equal(some.B, made.B) and torch.equal(some.dt, made.dt)
    assert all(x is None for x in front.forward(proj, given, None, ()))


def gate_then_norm(o, proj, gamma, groups, eps=1e-5, act=F.silu):
    u = o.flatten(2).transpose(0, 1) * act(proj[..., LAYOUT.gate_columns])
    u = u.unflatten(-1, (groups, -1))
    return (u / (u.square().mean(-1, keepdim=True) + eps).sqrt()).flatten(-2) * gamma


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_the_gate_comes_before_the_norm_of_each_group(groups, activation):
    torch.manual_seed(0)
    o = torch.randn(2, 6, H, V, dtype=torch.float64)
    proj, gamma = torch.randn(6, 2, LAYOUT.width).double(), torch.randn(H * V).double()
    leaves = [x.clone().requires_grad_() for x in (o, proj, gamma)]
    expected = gate_then_norm(*leaves, groups, act=ACTIVATIONS[activation])
    norm = PlainReadout(LAYOUT.gate_columns, activation, 1e-5, groups=groups)
    wanted, d_out = assert_readout(norm, leaves, expected)
    # The two halves, through autograd and by hand.
    gate = PlainReadout(LAYOUT.gate_columns, activation)
    apart = grouped_rms_norm(gate.forward(o, proj, None), gamma, groups)
    torch.testing.assert_close(apart, expected.detach())
    u = gate.forward(o, proj, None).requires_grad_()
    leaf = gamma.clone().requires_grad_()
    d_u, d_gamma = torch.autograd.grad(grouped_rms_norm(u, leaf, groups), (u, leaf), d_out)
    d_proj = torch.zeros_like(proj)
    d_o, nothing = gate.backward(d_u, o, proj, None, d_proj)
    assert nothing is None
    for a, b in zip((d_o, d_proj, d_gamma), wanted, strict=True):
        torch.testing.assert_close(a, b)


def test_a_norm_that_does_not_fit_is_refused():
    with pytest.raises(ValueError, match=r"12 channels, gamma of shape \(12,\) and 5 groups"):
        grouped_rms_norm(torch.randn(2, 12), torch.ones(12), 5)
