"""FlashQLA as the mixer calls it, at sizes that divide nothing: all results are finite.

`benchmarks/run.py sanitize` runs these small tests under NVIDIA's compute-sanitizer.
"""

import pytest
import torch

from megatron_gdn.gdn.rule import RuleInputs
from megatron_gdn.ops.rules.base import Bits
from tests.gdn.test_gpu_mixer import NAMES, make_inputs, rule_named, run
from tests.gdn.test_gpu_states import rule_named as rule_with_bits
from tests.ops.delta_rule.states import documents_of, run_everything

pytestmark = pytest.mark.gpu

HEADS = (2, 4)
LENGTHS = (1, 63, 64, 65, 0, 1, 67)
SHAPES = {
    "one token": {"S": 1},
    "rows": {"S": 63, "B": 2},
    "packed": {"S": sum(LENGTHS), "lengths": LENGTHS},
}
BITS = [Bits.FREE, Bits.DETERMINISTIC, Bits.ON_GRID]


def rule_inputs(tokens: int) -> tuple[RuleInputs, torch.Tensor]:
    """bf16 inputs of one row, and d_o; the device's generator draws none of them."""
    make = torch.Generator().manual_seed(0)
    key_heads, value_heads = HEADS

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(1, tokens, *shape, generator=make).cuda()

    q = torch.nn.functional.normalize(normal(key_heads, 128), dim=-1).bfloat16()
    k = torch.nn.functional.normalize(normal(key_heads, 128), dim=-1).bfloat16()
    v = normal(value_heads, 128).bfloat16()
    g = -normal(value_heads).abs() * 0.05
    beta = normal(value_heads).sigmoid()
    return RuleInputs(q, k, v, g, beta), normal(value_heads, 128).bfloat16()


@pytest.mark.parametrize("rule", ["flash_qla", "flash_qla fp16"])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_mixer_gives_finite_numbers(shape, rule):
    sizes, leaves, d_out, documents = make_inputs(HEADS, **SHAPES[shape])
    chosen = rule_named(rule, sizes)
    found = run(sizes, leaves, d_out, documents, chosen)
    for name, x in zip(NAMES, found, strict=True):
        assert x.isfinite().all(), name


@pytest.mark.parametrize("bits", BITS)
def test_states_and_their_gradients_are_finite(bits):
    rule = rule_with_bits("flash_qla", bits=bits)
    inputs, d_o = rule_inputs(sum(LENGTHS))
    documents = documents_of(LENGTHS, "cuda")
    # An empty document has no state here.
    initial = torch.randn(documents.sequences, HEADS[1], 128, 128).cuda()
    d_final = torch.randn(initial.shape).cuda()
    found = run_everything(rule, inputs, d_o, documents, initial, d_final)
    for name, x in found.items():
        assert x.isfinite().all(), name


@pytest.mark.parametrize("bits", BITS[:2])
def test_a_row_that_is_cut_gives_finite_numbers(bits):
    rule = rule_with_bits("flash_qla", bits=bits)
    inputs, d_o = rule_inputs(4100)
    assert not rule.plan(inputs, None, states=False).are_sequences
    zeros = torch.zeros(1, HEADS[1], 128, 128).cuda()
    found = run_everything(rule, inputs, d_o, None, zeros, zeros)
    for name, x in found.items():
        assert x.isfinite().all(), name
