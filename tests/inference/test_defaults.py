"""No table and no sum follows the default device or dtype that a program gives torch."""

import pytest
import torch

from megatron_gdn.inference import decode, prefill
from megatron_gdn.ops import Documents
from tests.inference.row_mixers import KINDS
from tests.other_defaults import forget_tables, other_defaults

OFFSETS = (0, 70, 70, 71, 135, 200)


def results(kind, aligned):
    """Outputs, gradients and states, in training and in generation."""
    parameters = kind.draw(torch.float32)
    tensors = (*parameters.own, parameters.norm.gamma)
    for x in tensors:
        x.requires_grad_()
    batch = kind.rows(70, 2).requires_grad_()
    packed = kind.rows(OFFSETS[-1]).requires_grad_()
    rows = kind.rows(67, 2)
    mixer = kind.mixer(aligned=aligned)
    memory = mixer.memory_shape.zeros(2, rows.dtype, rows.device)
    forget_tables()
    yield
    made = []
    for x, offsets in ((batch, None), (packed, OFFSETS)):
        rule = kind.rule(aligned)
        documents = None
        if offsets is not None:
            documents = Documents(offsets, torch.device("cpu"))
        out = kind.train(x, parameters, rule, documents)
        made += [out, *torch.autograd.grad(out.square().sum(), (x, *tensors))]
    with torch.no_grad():
        made.append(prefill(rows[:65], mixer, memory))
        made.append(decode(rows[65:66], mixer, memory))
        made.append(decode(rows[66:], mixer, memory))
    yield [*made, memory.history, memory.state]


@pytest.mark.parametrize("aligned", [False, True], ids=["free", "on the grid"])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_no_bit_follows_torchs_defaults(kind, aligned):
    usual = results(kind, aligned)
    next(usual)
    expected = next(usual)
    elsewhere = results(kind, aligned)
    next(elsewhere)
    with other_defaults():
        found = next(elsewhere)
    for here, there in zip(expected, found, strict=True):
        assert here.dtype == there.dtype and torch.equal(here, there)


class Noted:
    """A rule, and what each run of it was asked to keep for a backward."""

    def __init__(self, rule):
        self.rule = rule
        self.kept = []

    def __getattr__(self, name):
        return getattr(self.rule, name)

    def begin(self, inputs, documents):
        begun = self.rule.begin(inputs, documents)
        run = begun.run

        def noted(*states, keep=True, final=False):
            self.kept.append(keep)
            return run(*states, keep=keep, final=final)

        begun.run = noted
        return begun


@pytest.mark.parametrize("aligned", [False, True], ids=["free", "on the grid"])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_generation_keeps_nothing_for_a_backward(kind, aligned):
    mixer = kind.mixer(aligned=aligned)
    noted = Noted(mixer.rule)
    mixer = mixer._replace(rule=noted)
    rows = kind.rows(67, 2)
    memory = mixer.memory_shape.zeros(2, rows.dtype, rows.device)
    prefill(rows[:65], mixer, memory)
    decode(rows[65:], mixer, memory)
    assert noted.kept and not any(noted.kept)
