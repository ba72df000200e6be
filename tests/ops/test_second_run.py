"""The front and the rule run again in the backward: the same bits, and what is then
kept."""

import weakref
from pathlib import Path

import pytest
import torch

from megatron_gdn.gdn.half import HalfOperands
from megatron_gdn.ops.delta_rule.base import HeadSizes
from megatron_gdn.ops.delta_rule.plain import PlainRule
from megatron_gdn.ops.recompute import RefilledOutput
from megatron_gdn.ops.rules.base import Bits
from megatron_gdn.ops.rules.steps import RuleOfSteps
from tests.gdn.stand_ins import flash_qla_rule, forget_plans
from tests.inference.row_mixers import GDP

from .test_mixer import (
    CASES,
    assert_equal,
    gradients,
    make_inputs,
    mixed_by,
    saved_bytes,
)

ROOT = Path(__file__).parents[2]


@pytest.fixture
def flash_qla(monkeypatch):
    yield flash_qla_rule(monkeypatch)
    forget_plans()


class Counting(PlainRule):
    def __init__(self) -> None:
        self.runs = 0

    def begin(self, inputs, documents):
        self.runs += 1
        return super().begin(inputs, documents)


class KeepsDecay(PlainRule):
    """As rules of kernels: its backward reads what the forward saved of g, and no g."""

    backward_reads = PlainRule.backward_reads - {"g"}

    def begin(self, inputs, documents):
        begun = super().begin(inputs, documents)
        run = begun.run

        def run_and_keep(*states, **options):
            made = run(*states, **options)
            tensors = (*made.saved.tensors, inputs.g)
            return made._replace(saved=made.saved._replace(tensors=tensors))

        begun.run = run_and_keep
        return begun

    def begin_backward(self, d_o, inputs, saved, documents):
        assert inputs.g is None
        *tensors, g = saved.tensors
        saved = saved._replace(tensors=tuple(tensors))
        return super().begin_backward(d_o, inputs._replace(g=g), saved, documents)


def test_steps_of_a_rule_whose_backward_does_not_read_every_input():
    rows = GDP.rows(9, dtype=torch.float64).requires_grad_()
    parameters = GDP.draw(torch.float64)
    found = []
    for rule in (PlainRule(), KeepsDecay()):
        mixed = GDP.train(rows, parameters, RuleOfSteps(rule, 2), None)
        found += torch.autograd.grad(mixed.square().sum(), rows)
    assert torch.equal(*found)


@pytest.mark.parametrize(
    "rule",
    [PlainRule(), PlainRule(Bits.ON_GRID), KeepsDecay()],
    ids=["plain", "on the grid", "keeps its decay"],
)
@pytest.mark.parametrize("name", CASES)
def test_a_second_run_changes_no_bit(name, rule):
    sizes = CASES[name]["sizes"]
    leaves, documents = make_inputs(**CASES[name])
    usual = mixed_by(rule, leaves, sizes, documents)
    again = mixed_by(rule, leaves, sizes, documents, recompute_rule=True)
    assert torch.equal(usual, again)
    assert_equal(gradients(usual, leaves), gradients(again, leaves))


SIZES = HeadSizes(1, 2, 16, 16)


def with_reader(rule, leaves, refilled, **options):
    """The mixer and a reader that saves its output, as out_proj does."""
    torch.manual_seed(5)
    width = SIZES.value_heads * SIZES.value_dim
    weight = torch.randn(width, width, dtype=torch.float64, requires_grad=True)
    mixed = mixed_by(rule, leaves, SIZES, refilled=refilled, **options)
    out = mixed @ weight
    if refilled is not None:
        refilled.drop_until_backward_of(out)
        assert mixed.untyped_storage().nbytes() == 0
    return out, [*leaves[:2], *leaves[3:], weight]


def test_the_reader_and_the_backward_share_one_second_run():
    leaves, _ = make_inputs(SIZES, S=130)
    out, wanted = with_reader(PlainRule(), leaves, None)
    expected = torch.autograd.grad(out.sin().sum(), wanted)
    for refilled in (None, RefilledOutput()):
        rule = Counting()
        out, wanted = with_reader(rule, leaves, refilled, recompute_rule=True)
        assert_equal(torch.autograd.grad(out.sin().sum(), wanted), expected)
        assert rule.runs == 2


def test_a_second_backward_runs_it_once_more():
    leaves, _ = make_inputs(SIZES, S=70)
    rule = Counting()
    out, wanted = with_reader(rule, leaves, RefilledOutput(), recompute_rule=True)
    loss = out.sin().sum()
    first = torch.autograd.grad(loss, wanted, retain_graph=True)
    assert_equal(torch.autograd.grad(loss, wanted), first)
    assert rule.runs == 3


def test_fp16_operands_are_run_again_within_them():
    leaves, _ = make_inputs(SIZES, S=70)
    wrapped = PlainRule()
    wrapped.bits = Bits.FREE
    rule = HalfOperands(wrapped)
    usual = gradients(mixed_by(rule, leaves, SIZES), leaves)
    assert_equal(
        gradients(mixed_by(rule, leaves, SIZES, recompute_rule=True), leaves), usual
    )


def test_what_fills_an_output_again_is_freed_after_it():
    """Though the loss, and with it the graph's last tensor, is kept."""

    def refill(out):
        out.fill_(2)

    output = torch.ones(3, requires_grad=True).exp()
    refilled = RefilledOutput()
    refilled.remember(output, refill)
    out = output.square()
    refilled.drop_until_backward_of(out)
    waits = weakref.ref(refill)
    del refill, refilled
    assert waits() is not None
    out.sum().backward()
    assert waits() is None and output.tolist() == [2] * 3


@pytest.mark.parametrize("needs", [0, 4], ids=["rows", "dt_bias alone"])
def test_one_gradient_alone_is_enough(needs):
    leaves, _ = make_inputs(SIZES, S=33)
    usual = mixed_by(PlainRule(), leaves, SIZES).sum()
    (expected,) = torch.autograd.grad(usual, leaves[needs])
    fixed = [x if x is None or i == needs else x.detach() for i, x in enumerate(leaves)]
    again = mixed_by(PlainRule(), fixed, SIZES, recompute_rule=True).sum()
    assert torch.equal(torch.autograd.grad(again, leaves[needs])[0], expected)


LEVELS = {
    "none": {},
    "light": {"recompute_qkv": True},
    "full": {"recompute_qkv": True, "recompute_rule": True},
}


CHUNK = 64


def mixer_bytes_per_token(
    sizes: HeadSizes,
    recompute: str,
    *,
    operand: int = 2,
    gate: int = 4,
    kernels: bool = True,
) -> int:
    """Bytes that the mixer itself keeps of one token, its projection row included.

    Args:
        recompute: ``"none"``, ``"light"`` or ``"full"``.
        operand, gate: bytes of an element of the rows, and of the gates.
        kernels: a GPU rule, which keeps the sums of the log-decay and the inverses of
            chunks; the plain rule keeps the log-decay.
    """
    G, H, K, V = sizes
    kept = sizes.layout.width * operand
    if recompute == "full":
        return kept
    kept += H * V * operand + 2 * H * gate  # o; beta, and the log-decay or its sums
    if kernels:
        kept += H * CHUNK * operand
    if recompute == "none":
        kept += (G * K + H * V) * operand  # k, v; q is computed again in each
    return kept


def layer_bytes_per_token(sizes: HeadSizes, hidden: int, recompute: str) -> int:
    """The same of a layer in bf16 on a GPU, with out_proj's input and the layer's
    output."""
    normed = sizes.value_heads * sizes.value_dim * 2 if recompute == "none" else 0
    return mixer_bytes_per_token(sizes, recompute) + normed + hidden * 2


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("kernels", [False, True], ids=["plain", "flash_qla"])
def test_the_bytes_of_a_token_are_those_of_the_formula(level, kernels, flash_qla):
    """For FlashQLA's rule with its kernels in plain torch, in fp64."""
    rule = flash_qla if kernels else PlainRule()
    leaves, _ = make_inputs(SIZES, S=64)
    parameters = sum(x.nbytes for x in leaves[1:] if x is not None)
    kept = (
        saved_bytes(lambda: mixed_by(rule, leaves, SIZES, **LEVELS[level])) - parameters
    )
    formula = mixer_bytes_per_token(SIZES, level, operand=8, gate=8, kernels=kernels)
    assert kept == 64 * formula


def test_what_the_page_says_of_memory():
    """16 key and 32 value heads of 128 at hidden 2048, in bf16."""
    kib = {
        level: layer_bytes_per_token(HeadSizes(16, 32, 128, 128), 2048, level) / 1024
        for level in LEVELS
    }
    assert kib == {"none": 60.375, "light": 40.375, "full": 28.125}
    page = (ROOT / "benchmarks" / "README.md").read_text()
    for level, of_token in kib.items():
        assert f"| `{level}` | {of_token:.1f} | {of_token * 32:.0f} |" in page
