"""fla's kernels as Mamba2's rule on a GPU against fp64. Operands are bf16: some four independent
roundings of 2^-9 stay below 2^-7."""

import pytest
import torch

from megatron_gdn.mamba2.plain import PlainSSD, SSDInputs
from megatron_gdn.mamba2.rule import choose_ssd
from megatron_gdn.ops.state_maps.state_map import StateShape
from tests.ops.delta_rule.states import beside_fp64, documents_of, root_mean_square_errors

from .oracle import random_inputs

pytestmark = pytest.mark.gpu
LENGTHS = (1, 63, 64, 0, 65, 130)


@pytest.mark.parametrize("packed", [False, True], ids=["rows", "documents"])
def test_kernels_give_what_fp64_gives(packed):
    rows, tokens = (1, sum(LENGTHS)) if packed else (2, 200)
    inputs, d_o = random_inputs(tokens, rows, torch.bfloat16, H=8, G=2, K=128, V=64)
    inputs, d_o = SSDInputs(*(x.cuda() for x in inputs)), d_o.cuda()
    documents = documents_of(LENGTHS, "cuda") if packed else None
    count = len([n for n in LENGTHS if n]) if packed else rows
    initial, d_final = torch.randn(2, count, 8, 128, 64, device="cuda")
    state = StateShape(8, 128, 64, diagonal=True)
    rule = choose_ssd("fla", state, initial.device, torch.bfloat16).rule
    both = beside_fp64(rule, PlainSSD(), inputs, d_o, documents, initial, d_final)
    errors = root_mean_square_errors(*both)
    print({name: f"{error:.1e}" for name, error in errors.items()})
    assert max(errors.values()) < 2**-7, errors
