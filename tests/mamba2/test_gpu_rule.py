"""fla's kernels as Mamba2's rule on a GPU: output, states and every gradient against fp64.

Operands of the products are bf16: a result has some four roundings of 2^-9 in a row behind it,
which are independent of each other, so their root mean square stays below 2^-7.
"""

import pytest
import torch

from megatron_gdn.mamba2.plain import PlainSSD, SSDInputs
from megatron_gdn.mamba2.rule import choose_ssd
from megatron_gdn.ops.state_maps.state_map import StateShape
from tests.ops.delta_rule.states import (
    documents_of,
    root_mean_square_errors,
    run_everything,
)

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
    found = run_everything(rule, inputs, d_o, documents, initial, d_final)
    wide = SSDInputs(*(x.double() for x in inputs))
    exact = run_everything(
        PlainSSD(), wide, d_o.double(), documents, initial.double(), d_final.double()
    )
    errors = root_mean_square_errors(found, exact)
    print({name: f"{error:.1e}" for name, error in errors.items()})
    assert max(errors.values()) < 2**-7, errors
