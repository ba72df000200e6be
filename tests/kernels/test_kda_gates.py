"""KDA's front and gate kernels against their plain twins in fp64."""

import pytest
import torch

from megatron_gdn.kda.front import KDAFront
from megatron_gdn.kda.sizes import rows_of
from megatron_gdn.ops.delta_rule.base import RuleGrads
from megatron_gdn.ops.documents import Documents

from .kernel_cases import assert_close

CASES = {
    "S1": {"S": 1},
    "S65-B2": {"S": 65, "B": 2, "heads": (1, 3, 12, 20)},
    "bounded": {"S": 33, "bound": -5.0},
    "packed": {"S": 40, "lengths": (1, 2, 0, 20, 17), "bias": True},
    "no decay left": {"S": 9, "A_log": 8.0},
    "several tiles": {"S": 300, "heads": (1, 1, 16, 16)},
}


@pytest.mark.parametrize("name", CASES)
def test_front_and_gradients_equal_the_twins(name, device):
    case = CASES[name]
    S, B, heads = case["S"], case.get("B", 1), case.get("heads", (2, 2, 16, 8))
    make = torch.Generator().manual_seed(S)

    def normal(*shape):
        return torch.randn(*shape, generator=make).to(device)

    layout, documents = rows_of(*heads), None
    G, H, K, V = heads
    proj = normal(S, B + 1, layout.width + 8)[:, :B, : layout.width]
    given = [
        normal(layout.conv_width, 1, 4) * 0.5,
        normal(layout.conv_width) if case.get("bias") else None,
        normal(H) + case.get("A_log", 0.0),
        normal(H * K),
    ]
    if "lengths" in case:
        offsets = torch.tensor([0, *case["lengths"]]).cumsum(0).tolist()
        documents = Documents.from_cu_seqlens(offsets, S, device=device)
    grads = [normal(B, S, *shape) for shape in ((G, K), (G, K), (H, V), (H, K))]
    grads.append(normal(B, S, H))

    def run(kernels, kind):
        rows, *parameters = [None if x is None else x.to(kind) for x in (proj, *given)]
        dtype = torch.float32  # of the choice of kernels; Triton has no fp64
        front = KDAFront.of(device, dtype, 4, layout, case.get("bound"), kernels=kernels)
        made = front.forward(rows, parameters, documents)
        d_rows = torch.full_like(rows, 7.0)
        of_parameters = front.backward(
            rows, parameters, RuleGrads(*(x.to(kind) for x in grads)), d_rows, documents
        )
        return made, d_rows, of_parameters

    found, d_rows, of_parameters = run("triton", torch.float32)
    # Where log-decays are clamped, fp64 has another bound.
    wide = torch.float32 if "A_log" in case else torch.float64
    exact, d_exact, of_exact = run("torch", wide)
    for which, a, b in zip(found._fields, found, exact, strict=True):
        assert a.is_contiguous()
        assert_close(which, a, b)
    assert_close("rows", d_rows, d_exact)
    assert (d_rows[..., layout.columns("z")] == 7).all()
    for which, a, b in zip(("weight", "bias", "A_log", "dt_bias"), of_parameters, of_exact,
                           strict=True):  # fmt: skip
        assert (a is None) == (b is None)
        if a is not None:
            assert_close(which, a, b)
