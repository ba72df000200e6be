"""The gated norm kernels against their plain-torch twin in fp64."""

from __future__ import annotations

import pytest
import torch

from megatron_gdn.ops.head_sizes import HeadSizes
from megatron_gdn.ops.kernels.tiles import Block
from megatron_gdn.ops.readout import per_head as norm_torch
from megatron_gdn.ops.readout import per_head_triton as norm

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


def z_of(case) -> slice:
    """The gate's columns in a row."""
    return case.sizes.layout.columns("z")


@pytest.mark.parametrize("zero_centered", [False, True])
def test_forward_equals_the_twin(case, zero_centered):
    got = norm.gated_norm_forward(
        case.o, case.proj, case.gamma, z_of(case), zero_centered=zero_centered
    )
    twin = case.double()
    exact = norm_torch.gated_norm_forward(
        case.o.double(), twin.proj, twin.gamma, z_of(case), zero_centered=zero_centered
    )
    assert got.is_contiguous()
    assert_close("out", got, exact)


@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("tile", [None, Block(16, 3, 4)], ids=["table", "small"])
def test_every_gradient_equals_autograd_through_the_twin(case, zero_centered, tile):
    d_proj = torch.full_like(case.proj, float("nan"))
    d_o, d_gamma = norm.gated_norm_backward(
        case.d_out, case.o, case.proj, case.gamma, z_of(case), d_proj,
        zero_centered=zero_centered, tile=tile,
    )  # fmt: skip
    twin = case.double()
    exact_d_proj = torch.full_like(twin.proj, float("nan"))
    exact_o, exact_gamma = norm_torch.gated_norm_backward(
        case.d_out.double(), case.o.double(), twin.proj, twin.gamma, z_of(case), exact_d_proj,
        zero_centered=zero_centered,
    )  # fmt: skip
    assert_close("d_o", d_o, exact_o)
    assert_close("d_gamma", d_gamma, exact_gamma)
    section = slice(case.sizes.z_column, case.sizes.beta_column)
    assert_close("d_z", d_proj[..., section], exact_d_proj[..., section])
    d_proj[..., section] = float("nan")
    assert d_proj.isnan().all(), "only z's columns are the norm's to write"


def test_an_all_zero_row_gives_zeros_and_finite_gradients(device):
    case = Case(device, S=3)
    o = torch.zeros(1, 3, case.sizes.value_heads, case.sizes.value_dim, device=device)
    out = norm.gated_norm_forward(o, case.proj, case.gamma, z_of(case))
    d_proj = torch.zeros_like(case.proj)
    d_o, d_gamma = norm.gated_norm_backward(
        torch.ones_like(out), o, case.proj, case.gamma, z_of(case), d_proj
    )
    assert (out == 0).all() and (d_proj == 0).all() and (d_gamma == 0).all()
    assert d_o.isfinite().all()


@pytest.mark.parametrize("module", [norm, norm_torch], ids=["triton", "torch"])
def test_o_may_have_another_dtype_than_the_projection(case, module):
    """The result and the gradient of o have the projection's and its accuracy: nothing is fp16."""

    def run(module, case, o, d_out):
        d_proj = torch.zeros_like(case.proj)
        common = (case.proj, case.gamma, z_of(case))
        backward = module.gated_norm_backward(d_out, o, *common, d_proj)
        return [module.gated_norm_forward(o, *common), *backward, d_proj]

    half = case.o.half()
    got = run(module, case, half, case.d_out)
    exact = run(norm_torch, case.double(), half.double(), case.d_out.double())
    for name, a, b in zip(("out", "d_o", "d_gamma", "d_proj"), got, exact, strict=True):
        assert a.dtype == torch.float32, name
        assert_close(name, a, b)
