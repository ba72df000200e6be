"""What the mixer's backward has read is freed while it runs, unless a second backward
may come."""

import weakref

import numpy as np
import pytest
import torch

from megatron_gdn.ops import recompute as hand_over
from megatron_gdn.ops.delta_rule.base import HeadSizes
from megatron_gdn.ops.delta_rule.plain import PlainBackward, PlainRule
from megatron_gdn.ops.front.plain import PlainFront
from megatron_gdn.ops.readout.base import (
    PassThroughReadout,
    PlainReadout,
    SplitReadout,
)
from megatron_gdn.ops.rules.base import SavedForBackward
from tests.inference.row_mixers import KINDS, documents_of
from tests.ops.test_mixer import assert_equal, gradients, make_inputs, mixed_by

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


@pytest.mark.parametrize("training", [True, False])
def test_what_the_rule_read_is_freed_before_the_readout(monkeypatch, training):
    """Without a backward its inputs too."""
    given = []
    alive = []

    class Remembered(PlainRule):
        def begin(self, inputs, documents):
            forward = super().begin(inputs, documents)
            given.append(weakref.ref(forward))
            if not training:
                given.extend(map(weakref.ref, inputs))
            return forward

    read_out = PlainReadout.forward

    def watched_readout(self, *args, **kwargs):
        alive.extend(ref() is not None for ref in given)
        return read_out(self, *args, **kwargs)

    monkeypatch.setattr(PlainReadout, "forward", watched_readout)
    with torch.set_grad_enabled(training):
        mixed_by(Remembered(), make_inputs(SIZES, 9, bias=True)[0], SIZES)
    assert alive and not any(alive)


class Dropping(PlainRule):
    """The plain rule, with a saved tensor; its backward drops what it was given, and
    notes what is then alive."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: list = []
        self.backwards: list = []

    class forward_class(PlainRule.forward_class):
        def run(self, *args, **kwargs):
            made = super().run(*args, **kwargs)
            return made._replace(saved=SavedForBackward((made.o.clone(),)))

    class backward_class(PlainBackward):
        def run(self, *states):
            given = (self.d_o, *self.inputs, *self.saved.tensors)
            given = [weakref.ref(x) for x in given]
            grads = super().run(*states)
            self.d_o = self.inputs = self.saved = None
            self.rule.alive += [ref() is not None for ref in given]
            self.rule.backwards.append(weakref.ref(self))
            return grads


@pytest.mark.parametrize("options", [{}, {"recompute_qkv": True}], ids=str)
def test_what_a_rules_backward_drops_is_freed(monkeypatch, options):
    rule = Dropping()
    front_backward = PlainFront.backward

    def watched_front(*args, **kwargs):
        rule.alive += [ref() is not None for ref in rule.backwards]
        return front_backward(*args, **kwargs)

    monkeypatch.setattr(PlainFront, "backward", watched_front)
    leaves = make_inputs(SIZES, 9, bias=True)[0]
    mixed_by(rule, leaves, SIZES, **options).square().sum().backward()
    assert rule.alive == [False] * 8  # d_o, five inputs, a saved tensor, the backward


@pytest.mark.parametrize("more", [0, 1])
def test_a_gradient_of_so_many_bytes_is_handed_over(monkeypatch, more):
    monkeypatch.setattr(hand_over, "MIN_HAND_OVER_BYTES", 9 * 3 * 2 * 4 * 8 + more)
    rule = Watch()
    mixed = mixed_by(rule, make_inputs(SIZES, 9, B=3)[0], SIZES)
    mixed.register_hook(lambda gradient: watched(gradient, rule.gradients))
    mixed.square().sum().backward()
    assert rule.alive == [[False, bool(more)]]


@pytest.mark.parametrize("norm", ["norm", "none"])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("aligned", [False, True], ids=["free", "on the grid"])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_a_tensor_that_is_saved_is_read(kind, aligned, packed, norm):
    """A NaN in its place is in a gradient. A parameter costs no memory."""
    parameters = kind.draw(torch.float32)
    rows = kind.rows(9).requires_grad_()
    if norm == "none":
        first = PassThroughReadout(kind.layout.gate_columns, kind.layout.state_heads)
        parameters = parameters._replace(norm=SplitReadout(first, lambda o, _: o))

    def gradient(spoilt=None):
        kept = []

        def unpack(n):
            return torch.full_like(kept[n], torch.nan) if n == spoilt else kept[n]

        hooks = torch.autograd.graph.saved_tensors_hooks
        with hooks(lambda x: kept.append(x) or len(kept) - 1, unpack):
            documents = documents_of((4, 5)) if packed else None
            out = kind.train(rows, parameters, kind.rule(aligned), documents)
        return gradients(out, [rows])[0], kept

    exact, saved = gradient()
    own = {x.data_ptr() for x in parameters.own}
    for n, x in enumerate(saved):
        if x.is_floating_point() and x.numel() and x.data_ptr() not in own:
            assert not torch.equal(gradient(n)[0], exact), x.shape


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
