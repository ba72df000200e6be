"""KDA's kernels compile for a Hopper GPU, on any machine: the interpreter accepts
more."""

import pytest
import torch

pytest.importorskip("triton", minversion="3.6")

from megatron_gdn.kda.front import kda_table
from megatron_gdn.kda.sizes import kda_layout
from megatron_gdn.ops.delta_rule.base import HeadSizes, RuleGrads
from megatron_gdn.ops.front.plain import front_of
from tests.compilation import compile_for_hopper

S = 256
H = 4
K = 128


@pytest.mark.nightly
@pytest.mark.parametrize("beside", [False, True], ids=["one tensor", "beta beside"])
@pytest.mark.parametrize("bound", [None, -5.0], ids=["unbounded", "bounded"])
def test_the_front_compiles_and_nearly_all_of_it_stays_in_registers(bound, beside):
    layout = kda_layout(HeadSizes(H, H, K, K))
    kind = torch.bfloat16
    front = front_of(kda_table(layout, bound), "cpu", kind, 4, "triton")
    width = layout.main_width if beside else layout.width
    rows = torch.empty(S, 1, width, dtype=kind)
    weight = torch.empty(layout.conv_width, 1, 4, dtype=kind)
    parameters = [weight, None, torch.empty(H), torch.empty(H * K)]
    if beside:
        parameters.append(torch.empty(S, 1, H, dtype=kind))
    with compile_for_hopper() as done:
        made = front.forward(rows, parameters, None)
        front.backward(rows, parameters, RuleGrads(*made), torch.empty_like(rows), None)
    stacks = {one.kernel: one.stack for one in done}
    assert set(stacks) == {
        "front_forward_kernel",
        "front_backward_kernel",
        "_sum_rows_kernel",
    }
    assert max(stacks.values()) <= 64, "a frame for the walks, which are called"
