"""The kernels of Mamba2's and KDA's fronts and of the grouped norm against their plain twins."""

import pytest
import torch

from megatron_gdn.kda.front import KDAFront
from megatron_gdn.kda.sizes import rows_of
from megatron_gdn.mamba2.front import Mamba2Front
from megatron_gdn.mamba2.plain import SSDInputs
from megatron_gdn.ops.delta_rule.base import RuleGrads
from megatron_gdn.ops.layout import Layout, Section
from megatron_gdn.ops.readout.grouped_triton import TritonGrouped
from megatron_gdn.ops.readout.plain import Grouped
from tests.ops.delta_rule.states import documents_of

from .kernel_cases import assert_close


def layout_of(H: int, G: int, V: int, K: int) -> Layout:
    return Layout(
        (
            Section("z", "head", V), Section("x", "head", V, True), Section("B", "group", K, True),
            Section("C", "group", K, True), Section("dt", "head", 1),
        ),
        (("head", H), ("group", G)),
    )  # fmt: skip


def case(device, S, B=1, sizes=(2, 1, 6, 20), bias=True, taps=4):
    made = torch.Generator().manual_seed(S)

    def normal(*shape):
        return torch.randn(*shape, generator=made).to(device)

    layout = layout_of(*sizes)
    proj = normal(S, B + 1, layout.width + 8)[:, :B, : layout.width]
    C, H = layout.conv_width, sizes[0]
    given = [normal(C, 1, taps), normal(C) if bias else None, normal(H), normal(H), normal(H)]
    return layout, proj, given, normal


def double(tensors):
    return [None if x is None else x.double() for x in tensors]


@pytest.mark.parametrize(
    "shape",
    [
        {"S": 19, "B": 2},
        {"S": 40, "sizes": (2, 2, 6, 4), "lengths": (1, 2, 0, 20, 17)},
        {"S": 9, "bias": False, "taps": 2},
    ],
    ids=["dense", "packed", "no bias"],
)
def test_front_equals_its_twin(shape, device):
    lengths = shape.get("lengths")
    documents = documents_of(lengths, device)
    layout, proj, given, normal = case(device, **{k: shape[k] for k in shape if k != "lengths"})
    for batch_invariant in (False, True) if lengths else (False,):
        front = Mamba2Front(layout, triton=True, batch_invariant=batch_invariant)
        twin = Mamba2Front(layout)
        made = front.forward(proj, given, documents)
        exact = twin.forward(proj.double(), double(given), documents)
        for name, a, b in zip(SSDInputs._fields, made, exact, strict=True):
            assert a.is_contiguous() or name == "D"
            assert_close(name, a, b)
        some = front.forward(proj, given, documents, ("B",))
        assert torch.equal(some.B, made.B) and some.x is None and some.dt is None
        grads = SSDInputs(*(normal(*x.shape) for x in made))
        d_proj, exact_d = (torch.zeros_like(x) for x in (proj, proj.double()))
        got = front.backward(proj, given, grads, d_proj, documents)
        expected = twin.backward(
            proj.double(), double(given), SSDInputs(*double(grads)), exact_d, documents
        )
        assert_close("d_proj", d_proj, exact_d)
        for a, b in zip(got, expected, strict=True):
            assert (a is None) == (b is None)
            if a is not None:
                assert_close("parameter", a, b)


@pytest.mark.parametrize("activation", ["silu", "sigmoid"])
@pytest.mark.parametrize(("S", "B", "sizes"), [(9, 2, (4, 2, 6, 4)), (5, 1, (3, 1, 7, 4))])
def test_grouped_norm_equals_its_twin(S, B, sizes, activation, device):
    layout, proj, _, normal = case(device, S, B, sizes)
    (H, G, V, _), z = sizes, layout.gate_columns
    o, gamma, d_out = normal(B, S, H, V), normal(H * V), normal(S, B, H * V + 8)[..., : H * V]
    norm, twin = TritonGrouped(z, activation, G), Grouped(z, activation, G)
    wide = double((o, proj, gamma))
    exact = twin.forward(*wide)
    assert_close("out", norm.forward(o, proj, gamma), exact)
    d_proj = torch.full_like(proj, float("nan"))
    exact_d = torch.zeros_like(wide[1])
    got = norm.backward(d_out, o, proj, gamma, d_proj)
    expected = twin.backward(d_out.double(), *wide, exact_d)
    for name, a, b in zip(("d_o", "d_gamma"), got, expected, strict=True):
        assert_close(name, a, b)
    assert_close("d_z", d_proj[..., z], exact_d[..., z])
    d_proj[..., z] = float("nan")
    assert d_proj.isnan().all(), "only z's columns are the norm's to write"


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

    layout, documents = rows_of(*heads), documents_of(case.get("lengths"), device)
    G, H, K, V = heads
    proj = normal(S, B + 1, layout.width + 8)[:, :B, : layout.width]
    given = [
        normal(layout.conv_width, 1, 4) * 0.5,
        normal(layout.conv_width) if case.get("bias") else None,
        normal(H) + case.get("A_log", 0.0),
        normal(H * K),
    ]
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
