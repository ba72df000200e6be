"""fla's kernels as Mamba2's rule on a GPU: output, states and every gradient against fp64.

Operands of the products are bf16: a result has some four roundings of 2^-9 in a row behind it,
which are independent of each other, so their root mean square stays below 2^-7.
"""

import pytest
import torch

from megatron_gdn.mamba2.plain import PlainSSD, SSDInputs
from megatron_gdn.mamba2.rule import choose_ssd
from megatron_gdn.ops.state_maps.state_map import StateShape

from .oracle import documents_of, random_inputs

pytestmark = pytest.mark.gpu
LENGTHS = (1, 63, 64, 0, 65, 130)
NAMES = ("o", "final", "final by the map", "d_initial", *SSDInputs._fields)


def run(rule, inputs, d_o, documents, initial, d_final):
    begun = rule.begin(inputs, documents)
    maps, got = begun.state_map(), begun.run(initial, final=True)
    backward = rule.begin_backward(d_o, inputs, got.saved, documents)
    d_initial = maps.transposed(backward.d_initial()).apply(d_final)
    made = (got.o, got.final, maps.apply(initial), d_initial)
    return (*made, *backward.run(initial, d_final))


@pytest.mark.parametrize("packed", [False, True], ids=["rows", "documents"])
def test_kernels_give_what_fp64_gives(packed):
    rows, tokens = (1, sum(LENGTHS)) if packed else (2, 200)
    inputs, d_o = random_inputs(tokens, rows, torch.bfloat16, H=8, G=2, K=128, V=64)
    inputs, d_o = SSDInputs(*(x.cuda() for x in inputs)), d_o.cuda()
    documents = documents_of(LENGTHS) if packed else None
    count = len([n for n in LENGTHS if n]) if packed else rows
    initial, d_final = torch.randn(2, count, 8, 128, 64, device="cuda")
    state = StateShape(8, 128, 64, diagonal=True)
    rule = choose_ssd("fla", state, initial.device, torch.bfloat16).rule
    on_device = None
    if documents is not None:
        on_device = type(documents)(documents.offsets, torch.device("cuda"))
    found = run(rule, inputs, d_o, on_device, initial, d_final)
    exact = run(
        PlainSSD(), SSDInputs(*(x.double() for x in inputs)), d_o.double(), on_device,
        initial.double(), d_final.double(),
    )  # fmt: skip
    errors = {
        name: ((a - b).square().mean() / b.square().mean()).sqrt().item()
        for name, a, b in zip(NAMES, found, exact, strict=True)
    }
    print({name: f"{error:.1e}" for name, error in errors.items()})
    assert max(errors.values()) < 2**-7, errors
