"""The kernels of the readouts against their plain twins in fp64."""

import pytest
import torch

from megatron_gdn.ops.delta_rule.base import HeadSizes
from megatron_gdn.ops.kernels.tiles import RowTile
from megatron_gdn.ops.readout.base import PlainReadout
from megatron_gdn.ops.readout.kernels import TritonReadout

from .kernel_cases import FP32, Case, assert_close
from .test_other_fronts import case as mamba2_case

CASES = {
    "S1": {"S": 1, "sizes": HeadSizes(1, 1, 8, 128)},
    "S3-B2": {"S": 3, "B": 2, "sizes": HeadSizes(3, 6, 8, 16)},
    "S63": {"S": 63, "sizes": HeadSizes(1, 4, 12, 20)},
    "S65-B2": {"S": 65, "B": 2, "sizes": HeadSizes(1, 3, 8, 16)},
}


@pytest.fixture(params=CASES)
def case(request, device):
    case = Case(device, **CASES[request.param])
    S, B = case.proj.shape[:2]
    sizes = case.sizes
    case.o = case._normal(B, S, sizes.value_heads, sizes.value_dim) * 3
    # The gradient of a slice of something larger: its rows are strided too.
    width = sizes.value_heads * sizes.value_dim
    case.d_out = case._normal(S, B, width + 16)[..., :width]
    return case


def readouts(case, **options):
    gate = case.sizes.layout.gate_columns
    return TritonReadout(gate, **options), PlainReadout(gate, **options)


def assert_twins(ours, plain, o, proj, gamma, d_out, **options):
    out = ours.forward(o, proj, gamma)
    assert out.is_contiguous()
    wide = [x.double() for x in (o, proj, gamma)]
    assert_close("out", out, plain.forward(*wide))
    d_proj, exact_d_proj = (torch.full_like(x, torch.nan) for x in (proj, wide[1]))
    got = ours.backward(d_out, o, proj, gamma, d_proj, **options)
    exact = plain.backward(d_out.double(), *wide, exact_d_proj)
    for name, a, b in zip(("d_o", "d_gamma"), got, exact, strict=True):
        assert_close(name, a, b)
    assert_close(
        "d_z", d_proj[..., ours.gate_columns], exact_d_proj[..., ours.gate_columns]
    )
    d_proj[..., ours.gate_columns] = torch.nan
    assert d_proj.isnan().all(), "only z's columns are the norm's to write"


@pytest.mark.each_pair
@pytest.mark.parametrize(
    "options", [{}, {"zero_centered": True}, {"activation": "sigmoid"}], ids=str
)
@pytest.mark.parametrize("tile", [None, RowTile(16, 3, 4)], ids=["table", "small"])
def test_output_and_every_gradient_equal_the_twin(case, options, tile):
    tensors = case.o, case.proj, case.gamma, case.d_out
    assert_twins(*readouts(case, **options), *tensors, tile=tile)


def test_a_gradient_whose_columns_lie_apart_is_read_where_it_is(device):
    case = Case(device, S=5, B=2)
    sizes = case.sizes
    o = case._normal(2, 5, sizes.value_heads, sizes.value_dim)
    d_out = case._normal(5, 2, sizes.value_heads * sizes.value_dim, 2)[..., 0]
    assert d_out.stride(2) == 2
    assert_twins(*readouts(case), o, case.proj, case.gamma, d_out)


def test_generation_on_the_grid_reads_new_rows_alone_as_a_row_keeps_its_bits(device):
    """Whatever stands beside it."""
    case = Case(device, S=5, B=2)
    sizes = case.sizes
    o = case._normal(2, 5, sizes.value_heads, sizes.value_dim)
    ours, _ = readouts(case)
    assert ours.is_rowwise
    whole = ours.forward(o, case.proj, case.gamma)
    alone = ours.forward(o[1:, 3:4].contiguous(), case.proj[3:4, 1:], case.gamma)
    assert torch.equal(whole[3, 1], alone[0, 0])


@pytest.mark.parametrize("activation", ["silu", "sigmoid"])
@pytest.mark.parametrize(
    ("S", "B", "sizes"), [(9, 2, (4, 2, 6, 4)), (5, 1, (3, 1, 7, 4))]
)
def test_the_norm_of_groups_equals_its_twin(S, B, sizes, activation, device):
    layout, proj, _, normal = mamba2_case(device, S, B, sizes)
    H, G, V, _ = sizes
    z = layout.gate_columns
    o = normal(B, S, H, V)
    gamma = normal(H * V)
    d_out = normal(S, B, H * V + 8)[..., : H * V]
    ours = TritonReadout(z, activation, 1e-5, groups=G)
    plain = PlainReadout(z, activation, 1e-5, groups=G)
    assert_twins(ours, plain, o, proj, gamma, d_out)


def test_an_all_zero_row_gives_zeros_and_finite_gradients(device):
    case = Case(device, S=3)
    ours, _ = readouts(case)
    o = torch.zeros(1, 3, case.sizes.value_heads, case.sizes.value_dim, device=device)
    out = ours.forward(o, case.proj, case.gamma)
    d_proj = torch.zeros_like(case.proj)
    d_o, d_gamma = ours.backward(torch.ones_like(out), o, case.proj, case.gamma, d_proj)
    assert (out == 0).all() and (d_proj == 0).all() and (d_gamma == 0).all()
    assert d_o.isfinite().all()


def test_one_plus_a_weight_of_16_bits_is_not_rounded_to_one(device):
    case = Case(device, S=1)
    ours, plain = readouts(case, zero_centered=True)
    o = case._normal(1, 1, case.sizes.value_heads, case.sizes.value_dim)
    d_out = torch.ones_like(case.proj[..., case.sizes.layout.gate_columns])
    gamma = torch.full_like(case.gamma, 2**-11, dtype=torch.float16)
    wide = [x.double() for x in (o, case.proj, gamma)]
    assert_close("out", ours.forward(o, case.proj, gamma), plain.forward(*wide))
    d_o, _ = ours.backward(d_out, o, case.proj, gamma, torch.empty_like(case.proj))
    exact, _ = plain.backward(d_out.double(), *wide, torch.empty_like(wide[1]))
    assert_close("d_o", d_o, exact)


@pytest.mark.each_value
@pytest.mark.parametrize("which", [0, 1], ids=["triton", "torch"])
def test_o_may_have_another_dtype_than_the_projection(case, which):
    """The result and the gradient of o have the projection's and its accuracy: nothing
    is fp16."""

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


@pytest.mark.parametrize("groups", [None, 2])
def test_half_precision_is_computed_with_in_fp32_and_rounded_once(groups, device):
    layout, proj, _, normal = mamba2_case(device, 9, 2, (4, 2, 6, 4))
    z = layout.gate_columns
    width = z.stop - z.start
    o, proj, d_out = (x.half() for x in (normal(2, 9, 4, 6), proj, normal(9, 2, width)))
    gamma = normal(6 if groups is None else width)
    found = []
    for kind, dtype in ((TritonReadout, torch.float16), (PlainReadout, torch.float64)):
        readout = kind(z, groups=groups)
        given = [x.to(dtype) for x in (o, proj)]
        d_proj = torch.zeros_like(given[1])
        backward = readout.backward(d_out.to(dtype), *given, gamma, d_proj)
        found.append([readout.forward(*given, gamma), *backward, d_proj])
    for name, a, b in zip(("out", "d_o", "d_gamma", "d_proj"), *found, strict=True):
        # fp16 has 11 bits, and subnormal numbers below 2^-14
        room = (2**-11, 2**-24) if a.dtype == torch.float16 else (0, 0)
        error = (a.double() - b).abs()
        room = room[0] * b.abs() + room[1] + FP32 * b.abs().max()
        assert (error <= room).all(), name
