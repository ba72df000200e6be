"""What the mixer's backward has read is freed while it runs, unless a second backward
may come."""

import weakref

import numpy as np
import pytest
import torch

from megatron_gdn.ops import recompute as hand_over
from megatron_gdn.ops.delta_rule.base import HeadSizes
from megatron_gdn.ops.delta_rule.plain import PlainRule
from megatron_gdn.ops.readout.base import PlainReadout
from tests.ops.test_mixer import assert_equal, make_inputs, mixed_by

SIZES = HeadSizes(1, 2, 4, 4)


def watched(like: torch.Tensor, alive: list) -> torch.Tensor:
    """A copy, in memory that tells when it is freed."""
    memory = np.array(like.detach().numpy())
    alive.append(weakref.ref(memory))
    return torch.from_numpy(memory)


class Watch(PlainRule):
    """The plain rule; notes which of the outputs and gradients are alive in its
    backward."""

    def __init__(self) -> None:
        super().__init__()
        self.outputs: list = []
        self.gradients: list = []
        self.alive: list = []

    def begin(self, inputs, documents):
        forward = super().begin(inputs, documents)
        run = forward.run

        def watched_run(*args, **kwargs):
            made = run(*args, **kwargs)
            return made._replace(o=watched(made.o, self.outputs))

        forward.run = watched_run
        return forward

    def begin_backward(self, d_o, inputs, saved, documents):
        self.alive.append(
            [ref() is not None for ref in (*self.outputs, *self.gradients)]
        )
        return super().begin_backward(d_o, inputs, saved, documents)


@pytest.fixture(autouse=True)
def every_size(monkeypatch):
    monkeypatch.setattr(hand_over, "MIN_HAND_OVER_BYTES", 0)


def test_the_output_of_the_rule_and_the_incoming_gradient_are_freed():
    rule = Watch()
    leaves = make_inputs(SIZES, 9, bias=True)[0]
    mixed = mixed_by(rule, leaves, SIZES)
    mixed.register_hook(lambda gradient: watched(gradient, rule.gradients))
    mixed.square().sum().backward()
    assert rule.alive == [[False, False]]


def test_what_the_rule_computed_is_freed_before_the_readout(monkeypatch):
    forwards = []
    alive = []

    class Remembered(PlainRule):
        def begin(self, inputs, documents):
            forward = super().begin(inputs, documents)
            forwards.append(weakref.ref(forward))
            return forward

    read_out = PlainReadout.forward

    def watched_readout(self, *args, **kwargs):
        alive.append([ref() is not None for ref in forwards])
        return read_out(self, *args, **kwargs)

    monkeypatch.setattr(PlainReadout, "forward", watched_readout)
    mixed_by(Remembered(), make_inputs(SIZES, 9, bias=True)[0], SIZES)
    assert alive == [[False]]


def test_a_second_backward_finds_everything():
    rule = Watch()
    leaves = make_inputs(SIZES, 9, bias=True)[0]
    mixed = mixed_by(rule, leaves, SIZES)
    loss = mixed.square().sum()
    first = torch.autograd.grad(loss, leaves, retain_graph=True)
    again = torch.autograd.grad(loss, leaves)
    assert rule.alive == [[True], [False]]
    assert_equal(first, again)


def test_no_gradient_changes(monkeypatch):
    def gradients():
        leaves, _ = make_inputs(SIZES, 9, bias=True)
        out = mixed_by(PlainRule(), leaves, SIZES)
        return torch.autograd.grad(out.square().sum() + out.sum(), leaves)

    handed_over = gradients()
    monkeypatch.setattr(hand_over, "MIN_HAND_OVER_BYTES", 1 << 60)
    assert_equal(handed_over, gradients())
