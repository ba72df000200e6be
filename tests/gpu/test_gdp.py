"""The rules of Gated DeltaProduct on a GPU against fp64.

Operands are bf16: some four independent roundings of 2^-9 stay below 2^-7, twice that
in the gradient of g, a difference of sums.
"""

import pytest
import torch

from megatron_gdn.gdp.layer import choose_gdp
from megatron_gdn.ops.delta_rule.base import HeadSizes, RuleInputs
from megatron_gdn.ops.delta_rule.plain import PlainRule
from megatron_gdn.ops.elementwise import l2norm
from megatron_gdn.ops.rules.steps import RuleOfSteps
from tests.ops.delta_rule.states import (
    beside_fp64,
    documents_of,
    root_mean_square_errors,
)

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
G, H, K, V = 8, 32, 128, 128
LENGTHS = (1, 63, 64, 0, 65, 130)


@pytest.mark.parametrize("rows", [1, 2], ids=["documents", "rows"])
@pytest.mark.parametrize("steps", [1, 2, 4])
@pytest.mark.parametrize("backend", ["flash_qla", "fla"])
def test_kernels_give_what_fp64_gives(backend, steps, rows):
    torch.manual_seed(0)
    packed = rows == 1
    shape = rows, sum(LENGTHS) if packed else 200

    def draw(make, *more):
        return make(*shape, *more, device="cuda")

    inputs = RuleInputs(
        l2norm(draw(torch.randn, G, K)).bfloat16(),
        l2norm(draw(torch.randn, steps * G, K)).bfloat16(),
        draw(torch.randn, steps * H, V).bfloat16(),
        -(draw(torch.rand, H) ** 4),
        draw(torch.rand, steps * H),
    )
    sizes = HeadSizes(G, H, K, V)
    rule = choose_gdp(backend, sizes, steps, CUDA, torch.bfloat16).rule
    plain = RuleOfSteps(PlainRule(), steps)
    d_o = draw(torch.randn, H, V).bfloat16()
    documents = documents_of(LENGTHS, "cuda") if packed else None
    count = len([n for n in LENGTHS if n]) if packed else rows
    initial, d_final = torch.randn(2, count, H, K, V, device="cuda")
    both = beside_fp64(rule, plain, inputs, d_o, documents, initial, d_final)
    errors = root_mean_square_errors(*both)
    print(backend, steps, {name: f"{error:.1e}" for name, error in errors.items()})
    bounds = {name: 2**-6 if name == "g" else 2**-7 for name in errors}
    assert all(errors[name] < bounds[name] for name in errors), errors
