"""Mamba2's convolution and grouped norm against their plain twins in fp64."""

import pytest
import torch

from megatron_gdn.mamba2.front import Mamba2Front
from megatron_gdn.mamba2.plain import SSDInputs
from megatron_gdn.ops.documents import Documents
from megatron_gdn.ops.layout import Layout, Section
from megatron_gdn.ops.readout.kernels import TritonReadout
from megatron_gdn.ops.readout.plain import PlainReadout

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
    layout, proj, given, normal = case(device, **{k: shape[k] for k in shape if k != "lengths"})
    documents = None
    if lengths is not None:
        offsets = torch.tensor([0, *lengths]).cumsum(0).tolist()
        documents = Documents.from_cu_seqlens(offsets, offsets[-1], device=device)
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
    norm, twin = (kind(z, activation, 1e-5, groups=G) for kind in (TritonReadout, PlainReadout))
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
