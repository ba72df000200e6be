"""The kernels of the readout per head against their plain twin in fp64."""

import pytest
import torch

from megatron_gdn.ops.delta_rule.base import HeadSizes
from megatron_gdn.ops.kernels.tiles import Block
from megatron_gdn.ops.readout.per_head_triton import TritonPerHead
from megatron_gdn.ops.readout.plain import PerHead

from .kernel_cases import Case, assert_close

CASES = {
    "S1": {"S": 1, "sizes": HeadSizes(1, 1, 8, 128)},
    "S3-B2": {"S": 3, "B": 2, "sizes": HeadSizes(3, 6, 8, 16)},
    "S63": {"S": 63, "sizes": HeadSizes(1, 4, 12, 20)},
    "S65-B2": {"S": 65, "B": 2, "sizes": HeadSizes(1, 3, 8, 16)},
}


@pytest.fixture(params=CASES)
def case(request, device):
    case = Case(device, **CASES[request.param])
    (S, B), sizes = case.proj.shape[:2], case.sizes
    case.o = case._normal(B, S, sizes.value_heads, sizes.value_dim) * 3
    # The gradient of a slice of something larger: its rows are strided too.
    width = sizes.value_heads * sizes.value_dim
    case.d_out = case._normal(S, B, width + 16)[..., :width]
    return case


def readouts(case, **options):
    gate = case.sizes.layout.gate_columns
    return TritonPerHead(gate, **options), PerHead(gate, **options)


of_every_kind = pytest.mark.parametrize(
    "options",
    [{}, {"zero_centered": True}, {"activation": "sigmoid"}],
    ids=["False", "True", "sigmoid"],
)


@of_every_kind
def test_forward_equals_the_twin(case, options):
    ours, plain = readouts(case, **options)
    got = ours.forward(case.o, case.proj, case.gamma)
    twin = case.double()
    assert got.is_contiguous()
    assert_close("out", got, plain.forward(case.o.double(), twin.proj, twin.gamma))


@of_every_kind
@pytest.mark.parametrize("tile", [None, Block(16, 3, 4)], ids=["table", "small"])
def test_every_gradient_equals_autograd_through_the_twin(case, options, tile):
    ours, plain = readouts(case, **options)
    d_proj = torch.full_like(case.proj, float("nan"))
    d_o, d_gamma = ours.backward(case.d_out, case.o, case.proj, case.gamma, d_proj, tile=tile)
    twin = case.double()
    exact_d_proj = torch.full_like(twin.proj, float("nan"))
    exact_o, exact_gamma = plain.backward(
        case.d_out.double(), case.o.double(), twin.proj, twin.gamma, exact_d_proj
    )
    assert_close("d_o", d_o, exact_o)
    assert_close("d_gamma", d_gamma, exact_gamma)
    gate = ours.gate
    assert_close("d_z", d_proj[..., gate], exact_d_proj[..., gate])
    d_proj[..., gate] = float("nan")
    assert d_proj.isnan().all(), "only z's columns are the norm's to write"


def test_an_all_zero_row_gives_zeros_and_finite_gradients(device):
    case = Case(device, S=3)
    ours, _ = readouts(case)
    o = torch.zeros(1, 3, case.sizes.value_heads, case.sizes.value_dim, device=device)
    out = ours.forward(o, case.proj, case.gamma)
    d_proj = torch.zeros_like(case.proj)
    d_o, d_gamma = ours.backward(torch.ones_like(out), o, case.proj, case.gamma, d_proj)
    assert (out == 0).all() and (d_proj == 0).all() and (d_gamma == 0).all()
    assert d_o.isfinite().all()


@pytest.mark.parametrize("which", [0, 1], ids=["triton", "torch"])
def test_o_may_have_another_dtype_than_the_projection(case, which):
    """The result and the gradient of o have the projection's and its accuracy: nothing is fp16."""

    def run(readout, case, o, d_out):
        d_proj = torch.zeros_like(case.proj)
        backward = readout.backward(d_out, o, case.proj, case.gamma, d_proj)
        return [readout.forward(o, case.proj, case.gamma), *backward, d_proj]

    half = case.o.half()
    got = run(readouts(case)[which], case, half, case.d_out)
    exact = run(readouts(case)[1], case.double(), half.double(), case.d_out.double())
    for name, a, b in zip(("out", "d_o", "d_gamma", "d_proj"), got, exact, strict=True):
        assert a.dtype == torch.float32, name
        assert_close(name, a, b)
