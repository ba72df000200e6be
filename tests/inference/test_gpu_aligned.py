"""Aligned mixers on a GPU: any cut, batch and place has the bits of training.

Our Triton kernels run the front and the readout; FlashQLA, or the plain rule, the
recurrence.
"""

from __future__ import annotations

import pytest
import torch

from megatron_gdn.mamba2.rule import PlainSSD
from megatron_gdn.ops.delta_rule.base import HeadSizes
from megatron_gdn.ops.delta_rule.plain import PlainRule
from megatron_gdn.ops.generation.aligned import decode_on_grid
from megatron_gdn.ops.rules.base import Bits
from tests.inference import test_aligned
from tests.inference.row_mixers import documents_of, gdn_kind, mamba2_kind, prefilled

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

GDN = gdn_kind(HeadSizes(16, 32, 128, 128))  # every other ratio is minutes of compiling
MAMBA2 = mamba2_kind(heads=16, groups=2, head_dim=64, state_dim=128)


def flash_qla():
    pytest.importorskip("flash_qla")
    from megatron_gdn.gdn.flash_qla.rule import FlashQlaRule

    return FlashQlaRule(Bits.ON_GRID)


CASES = {
    "gdn, flash_qla": (GDN, flash_qla),
    "gdn, plain": (GDN, lambda: PlainRule(Bits.ON_GRID)),
    "mamba2, plain": (MAMBA2, lambda: PlainSSD(Bits.ON_GRID)),
}
each_case = pytest.mark.parametrize("name", CASES)


class Mixer:
    """A kind's mixer on the GPU, aligned, in bf16, as the laws of ``test_aligned`` ask
    for it."""

    def __init__(self, name: str) -> None:
        self.kind, rule = CASES[name]
        self.rule = rule()
        self.parameters = self.kind.draw(torch.bfloat16).to("cuda")
        self.stages = self.kind.make(self.rows(1), self.parameters, self.rule)

    def mixer(self, dtype=torch.bfloat16, aligned=True):
        return self.stages

    def rows(self, S: int, B: int = 1, dtype=torch.bfloat16) -> torch.Tensor:
        return self.kind.rows(S, B, dtype).cuda()

    def trained(self, rows: torch.Tensor, lengths=None, aligned=True) -> torch.Tensor:
        documents = None if lengths is None else documents_of(lengths, "cuda")
        return self.kind.train(rows, self.parameters, self.rule, documents)


@each_case
@pytest.mark.parametrize(
    "stages", [(63, 1, 86), (70, -5, 60, -9, 6), (-3, 61, -2, 84)], ids=str
)
def test_any_cut_has_the_bits_of_training(name, stages):
    test_aligned.test_any_cut_has_the_bits_of_training(
        Mixer(name), stages, torch.bfloat16
    )


@each_case
def test_a_step_in_place_has_the_bits_of_training(name):
    mixer = Mixer(name)
    tokens = [63, 5, 126]
    rows = mixer.rows(140, 3)
    whole = mixer.trained(rows)
    memory = mixer.stages.memory_shape.zeros(3, rows.dtype, rows.device)
    for n, had in enumerate(tokens):
        _, begun = prefilled(mixer.stages, rows[:had, n : n + 1])
        memory.history[n], memory.state[n] = begun.history[0], begun.state[0]
    for step in range(3):
        at = [had + step for had in tokens]
        row = torch.stack([rows[place, n] for n, place in enumerate(at)])[None]
        mixed = decode_on_grid(row, mixer.stages, memory)
        for n, place in enumerate(at):
            assert torch.equal(mixed[0, n], whole[place, n]), (n, place)


@each_case
def test_neighbours_place_and_length_change_no_bit(name):
    mixer = Mixer(name)
    rows = mixer.rows(4300)
    whole = mixer.trained(rows)
    packed = torch.cat([mixer.rows(5), rows, mixer.rows(6000)])
    assert torch.equal(mixer.trained(packed, (5, 4300, 0, 6000))[5:4305], whole)
    assert torch.equal(
        mixer.trained(torch.cat([mixer.rows(4300, 3), rows], 1))[:, 3:], whole
    )
    for length in (1, 64, 999):
        assert torch.equal(mixer.trained(rows[:length]), whole[:length]), length


@each_case
def test_gradients_repeat_and_are_those_of_the_plain_mixer(name):
    mixer = Mixer(name)
    rows = mixer.rows(300)
    found = []
    plain = type(mixer.kind.plain)()
    for rule in (mixer.rule, mixer.rule, plain):
        leaf = rows.clone().requires_grad_()
        mixed = mixer.kind.train(leaf, mixer.parameters, rule, None)
        mixed.float().square().sum().backward()
        found.append(leaf.grad.float())
    assert torch.equal(found[0], found[1])
    error = (found[0] - found[2]).norm() / found[2].norm()
    # some roundings to bf16 on the way, see test_gpu_states
    assert error < 2 * 8 * 2**-9
