"""The readout per head, written out in fp64: output and every gradient, at odd
sizes."""

import pytest
import torch
import torch.nn.functional as F

from megatron_gdn.ops.aligned import AlignedReadout
from megatron_gdn.ops.mixer import mix
from megatron_gdn.ops.readout.base import (
    PassThroughReadout,
    PlainReadout,
    SplitReadout,
    readout_by_module,
)
from megatron_gdn.ops.stages import Stages
from tests import toy_mixer
from tests.autograd_parts import AutogradFront

ACTIVATIONS = {"silu": F.silu, "sigmoid": torch.sigmoid}
EPS = 1e-3


def written_out(o, rows, gate, gamma, zero_centered, act):
    z = rows[..., gate].unflatten(-1, o.shape[2:]).transpose(0, 1)
    normed = o / (o.square().mean(-1, keepdim=True) + EPS).sqrt()
    y = normed * (1 + gamma if zero_centered else gamma) * act(z)
    return y.transpose(0, 1).flatten(2)


def assert_readout(readout, leaves, expected):
    """Its output and gradients are those of ``expected``: the gradients, and that of
    the output."""
    o, rows, gamma = (x.detach() for x in leaves)
    torch.testing.assert_close(readout.forward(o, rows, gamma), expected.detach())
    d_out = torch.randn_like(expected)
    d_rows = torch.zeros_like(rows)
    d_o, d_gamma = readout.backward(d_out, o, rows, gamma, d_rows)
    wanted = torch.autograd.grad(expected, leaves, d_out)
    for found, exact in zip((d_o, d_rows, d_gamma), wanted, strict=True):
        torch.testing.assert_close(found, exact)
    return wanted, d_out


@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("sizes", [(1, 1, 1, 1), (3, 2, 3, 5), (65, 1, 6, 7)], ids=str)
def test_output_and_every_gradient(sizes, activation, zero_centered):
    torch.manual_seed(0)
    S, B, H, V = sizes
    gate = slice(3, 3 + H * V)
    wide = {"dtype": torch.float64}
    o = torch.randn(B, S, H, V, **wide)
    gamma = torch.randn(V, **wide)
    rows = torch.randn(S, B, gate.stop + 2, **wide)
    leaves = [x.clone().requires_grad_() for x in (o, rows, gamma)]
    of_leaves = leaves[0], leaves[1], gate, leaves[2]
    expected = written_out(*of_leaves, zero_centered, ACTIVATIONS[activation])
    assert_readout(PlainReadout(gate, activation, EPS, zero_centered), leaves, expected)


GATE = slice(3, 45)
PLAIN = PlainReadout(GATE, "silu", EPS)


@pytest.mark.parametrize(
    "readout",
    [PLAIN, AlignedReadout(PLAIN, None), PassThroughReadout(GATE, 6)],
    ids=lambda readout: type(readout).__name__,
)
def test_the_result_is_written_to_a_given_tensor(readout):
    o, rows, gamma = torch.randn(2, 3, 6, 7), torch.randn(3, 2, 45), torch.randn(7)
    expected = readout.forward(o, rows, gamma)
    given = torch.full_like(expected, torch.nan)
    assert readout.forward(o, rows, gamma, out=given) is given
    assert torch.equal(given, expected)


def toy_stages(layout, readout, *parameters):
    def make(proj, given, documents, history):
        return toy_mixer.front(layout, proj, given, documents, history)

    front = AutogradFront(layout, make, toy_mixer.Inputs, ("q", "k", "v"))
    return Stages(front, toy_mixer.RULE, readout, parameters)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_a_module_is_one_more_readout(activation):
    """A norm that is called gives what the same norm gives inside, with every
    gradient."""
    torch.manual_seed(0)
    layout = toy_mixer.LAYOUT
    act = ACTIVATIONS[activation]
    gate = layout.gate_columns
    heads = layout.state_heads
    V = toy_mixer.V
    wide = {"dtype": torch.float64, "requires_grad": True}
    rows = torch.randn(7, 2, layout.width, **wide)
    weight = torch.randn(layout.conv_width, 1, toy_mixer.TAPS, **wide)
    bias = torch.randn(heads, **wide)
    gamma = torch.randn(V, **wide)

    def norm(o, z):
        normed = o / (o.square().mean(-1, keepdim=True) + EPS).sqrt()
        return normed * gamma * act(z)

    inside = toy_stages(
        layout, PlainReadout(gate, activation, EPS), weight, None, bias, gamma
    )
    called = toy_stages(
        layout, readout_by_module(gate, heads, norm), weight, None, bias, None
    )
    results = []
    for stages in (inside, called):
        mixed = mix(rows, stages)
        d_out = torch.linspace(-1, 1, mixed.numel(), dtype=torch.float64).view(
            mixed.shape
        )
        grads = torch.autograd.grad(mixed, (rows, weight, bias, gamma), d_out)
        results.append([mixed.detach(), *grads])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other)


def test_a_call_that_waits_for_all_heads_is_not_made_by_the_mixer():
    layout = toy_mixer.LAYOUT
    never = SplitReadout(
        PassThroughReadout(layout.gate_columns, layout.state_heads),
        lambda *_: 1 / 0,
        second_step_after_exchange=True,
    )
    weight = torch.randn(layout.conv_width, 1, toy_mixer.TAPS)
    stages = toy_stages(
        layout, never, weight, None, torch.zeros(layout.state_heads), None
    )
    assert mix(torch.randn(5, 1, layout.width), stages).shape == (
        5,
        1,
        layout.mixed_width,
    )
