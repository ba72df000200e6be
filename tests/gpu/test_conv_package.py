"""On one GPU: the plain front with causal-conv1d's convolution against the plain front in fp64."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("causal_conv1d", reason='needs the package, extra "conv1d"')

from megatron_gdn.gdn.front import gdn_front
from megatron_gdn.ops.conv import convolve_rows as plain
from megatron_gdn.ops.delta_rule.base import HeadSizes, RuleGrads
from megatron_gdn.ops.documents import Documents
from megatron_gdn.ops.front.choice import PACKAGE as convolve_rows
from tests.kernels.kernel_cases import FP32, Case, assert_close

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")
PACKED = {"S": 69, "lengths": (1, 2, 3, 1, 27, 0, 2, 33)}  # documents shorter than the taps
CASES = {
    "S1": {"S": 1},
    "S2-B2": {"S": 2, "B": 2, "bias": True},
    "S777-3taps": {"S": 777, "sizes": HeadSizes(1, 4, 16, 24), "taps": 3},
    "packed": {**PACKED, "bias": True},
    "packed-2taps": {**PACKED, "taps": 2},
    "packed-B2": {**PACKED, "B": 2},  # the same in both rows
    "packed-long": {"S": 2048, "lengths": (932, 63, 1, 1052), "sizes": HeadSizes(2, 4, 64, 64)},
}
# One rounding of each entry is 2^-9 of it in bf16 at most.
TOLERANCE = {torch.float32: FP32, torch.bfloat16: 2.0**-9}


@pytest.mark.parametrize("dtype", TOLERANCE, ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", CASES)
def test_outputs_and_every_gradient_equal_the_plain_front(name, dtype):
    tolerance = 2 * TOLERANCE[dtype]  # the convolution rounds, and what reads its output
    case = Case(CUDA, dtype=dtype, **CASES[name])
    twin, grads = case.double(), case.grads(per_value_head=False)
    exact_front = gdn_front("cuda", dtype, case.conv_weight.shape[-1], case.sizes, kernels="torch")
    front = replace(exact_front, convolve=convolve_rows)
    got = front.forward(case.proj, case.parameters, case.documents)
    exact = exact_front.forward(twin.proj, twin.parameters, case.documents)
    for part in got._fields:
        assert_close(part, getattr(got, part), getattr(exact, part), tolerance)
    d_proj, exact_d_proj = torch.zeros_like(case.proj), torch.zeros_like(twin.proj)
    given = (case.proj, case.parameters, RuleGrads(*grads), d_proj, case.documents)
    got = front.backward(*given)
    exact_grads = RuleGrads(*(x.double() for x in grads))
    exact = exact_front.backward(
        twin.proj, twin.parameters, exact_grads, exact_d_proj, case.documents
    )
    assert_close("d_proj", d_proj, exact_d_proj, tolerance)
    for place, (x, y) in enumerate(zip(got, exact, strict=True)):
        if y is not None:
            assert_close(f"parameter {place}", x, y, tolerance)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=["fp32", "bf16"])
def test_rows_in_their_own_dtype_as_mamba2_has_them(dtype):
    """The sum is fp32 inside and rounded once."""
    documents = Documents((0, 5, 7, 40), CUDA)
    made = torch.Generator().manual_seed(3)
    inputs = [torch.randn(shape, generator=made) for shape in ((1, 40, 64), (64, 4), (64,))]
    d_y = torch.randn(1, 40, 128, generator=made).to(CUDA)[..., 3:67]  # no stride that it takes

    def run(convolve, dtype):
        leaves = [x.to(CUDA, dtype).requires_grad_() for x in rounded]
        y = convolve(*leaves, documents)
        return [y, *torch.autograd.grad(y, leaves, d_y.to(dtype))]

    rounded = [x.to(dtype) for x in inputs]
    d_y = d_y.to(dtype)
    for got, exact in zip(run(convolve_rows, dtype), run(plain, torch.float64), strict=True):
        assert got.dtype == dtype
        assert_close("tensor", got, exact, TOLERANCE[dtype])


def test_gradients_have_the_same_bits_again_and_a_document_its_own(monkeypatch):
    """Alone, before and after another: the gradients of parameters belong to the batch."""
    monkeypatch.delenv("CAUSAL_CONV1D_DETERMINISTIC", raising=False)
    made = torch.Generator("cuda").manual_seed(5)
    x, d_y = (torch.randn(1, 4096, 64, generator=made, device=CUDA) for _ in range(2))
    weight = torch.randn(64, 4, generator=made, device=CUDA)

    def run(*documents: slice):
        rows, d_rows = (torch.cat([t[:, d] for d in documents], dim=1) for t in (x, d_y))
        ends = torch.tensor([0, *(d.stop - d.start for d in documents)]).cumsum(0).tolist()
        leaves = rows.requires_grad_(), weight.clone().requires_grad_()
        y = convolve_rows(*leaves, None, Documents(tuple(ends), CUDA))
        return [y.detach(), *torch.autograd.grad(y, leaves, d_rows)]

    one, other = slice(0, 97), slice(97, 4096)
    first = run(one, other)
    for _ in range(50):
        assert all(map(torch.equal, run(one, other), first))
    for part in range(2):
        whole = first[part]
        assert torch.equal(run(one)[part], whole[:, one])
        assert torch.equal(run(other, one)[part], torch.cat([whole[:, other], whole[:, one]], 1))
