"""The kernels of the fronts of Mamba2, KDA, Gated DeltaNet-2 and Gated DeltaProduct
against their plain twins."""

import pytest
import torch

from megatron_gdn.gdn2.front import gdn2_table
from megatron_gdn.gdn2.rule import GDN2Inputs
from megatron_gdn.gdn2.sizes import gdn2_layout as gdn2_rows
from megatron_gdn.gdp.front import gdp_table
from megatron_gdn.gdp.sizes import gdp_layout
from megatron_gdn.kda.front import kda_table
from megatron_gdn.kda.sizes import kda_layout
from megatron_gdn.mamba2.front import mamba2_table
from megatron_gdn.mamba2.rule import SSDInputs
from megatron_gdn.ops.delta_rule.base import HeadSizes, RuleGrads
from megatron_gdn.ops.front.plain import front_of
from megatron_gdn.ops.rules.base import Bits
from tests.mamba2.oracle import layout_of
from tests.ops.delta_rule.states import documents_of

from .conftest import INTERPRETED
from .kernel_cases import assert_close


def drawn(layout, S, B, device):
    """Rows that lie apart, and a function that draws more."""
    make = torch.Generator().manual_seed(S)

    def normal(*shape):
        return torch.randn(*shape, generator=make).to(device)

    return normal(S, B + 1, layout.width + 8)[:, :B, : layout.width], normal


def case(device, S, B=1, sizes=(2, 1, 6, 20), bias=True, taps=4):
    layout = layout_of(*sizes)
    proj, normal = drawn(layout, S, B, device)
    C, H = layout.conv_width, sizes[0]
    given = [
        normal(C, 1, taps),
        normal(C) if bias else None,
        normal(H),
        normal(H),
        normal(H),
    ]
    return layout, proj, given, normal


def mamba2(device, sizes=(2, 1, 6, 20), limit=(0.0, float("inf")), **shape):
    layout, proj, given, normal = case(device, sizes=sizes, **shape)
    S, B = proj.shape[:2]
    H, G, V, K = sizes
    shapes = [(H, V), (G, K), (G, K), (H,), (H,), (H, 1)]
    kind = mamba2_table(layout, limit), "cpu", torch.float32, given[0].shape[-1]
    ours = [front_of(*kind, "triton", each) for each in (Bits.FREE, Bits.DETERMINISTIC)]
    grads = SSDInputs(*(normal(B, S, *x) for x in shapes))
    return layout, proj, given, grads, ours, front_of(*kind, "torch")


def kda(device, S, B=1, heads=(2, 2, 16, 8), bias=False, bound=None, A_log=0.0):
    layout = kda_layout(HeadSizes(*heads))
    G, H, K, V = heads
    proj, normal = drawn(layout, S, B, device)
    C = layout.conv_width
    given = [
        normal(C, 1, 4) * 0.5,
        normal(C) if bias else None,
        normal(H) + A_log,
        normal(H * K),
    ]
    shapes = [(G, K), (G, K), (H, V), (H, K), (H,)]
    ours, twin = (
        front_of(kda_table(layout, bound), str(device), torch.float32, 4, kernels)
        for kernels in ("triton", "torch")
    )
    return (
        layout,
        proj,
        given,
        RuleGrads(*(normal(B, S, *x) for x in shapes)),
        [ours],
        twin,
    )


def gdn2(device, S, B=1, heads=(2, 4, 12, 20), per_value_head=False):
    layout = gdn2_rows(HeadSizes(*heads))
    G, H, K, V = heads
    proj, normal = drawn(layout, S, B, device)
    C = layout.conv_width
    given = [normal(C, 1, 4) * 0.5, None, normal(G), normal(G * K)]
    many = H if per_value_head else G  # the front sums those of a key head
    shapes = [(many, K), (many, K), (H, V), (many, K), (many, K), (H, V)]
    ours, twin = (
        front_of(gdn2_table(layout), str(device), torch.float32, 4, kernels)
        for kernels in ("triton", "torch")
    )
    return (
        layout,
        proj,
        given,
        GDN2Inputs(*(normal(B, S, *x) for x in shapes)),
        [ours],
        twin,
    )


def gdp(device, S, B=1, heads=(2, 4, 12, 20), steps=2, per_value_head=False):
    layout = gdp_layout(HeadSizes(*heads), steps)
    G, H, K, V = heads
    proj, normal = drawn(layout, S, B, device)
    C = layout.conv_width
    given = [normal(C, 1, 4) * 0.5, normal(C), normal(H), normal(H)]
    many = H if per_value_head else G  # the front sums those of a group
    n = steps
    shapes = [(many, K), (n * many, K), (n * H, V), (H,), (n * H,)]
    ours, twin = (
        front_of(gdp_table(layout), str(device), torch.float32, 4, kernels)
        for kernels in ("triton", "torch")
    )
    grads = RuleGrads(*(normal(B, S, *x) for x in shapes))
    return layout, proj, given, grads, [ours], twin


FRONTS = {
    "Mamba2": (mamba2, {"S": 19, "B": 2}, None),
    "Mamba2, packed": (mamba2, {"S": 40, "sizes": (2, 2, 6, 4)}, (1, 2, 0, 20, 17)),
    "Mamba2, limits": (mamba2, {"S": 19, "limit": (0.3, 1.1)}, None),
    "Mamba2, no bias": (mamba2, {"S": 9, "bias": False, "taps": 2}, None),
    "KDA": (kda, {"S": 65, "B": 2, "heads": (1, 3, 12, 20)}, None),
    "KDA, one token": (kda, {"S": 1}, None),
    "KDA, bounded": (kda, {"S": 33, "bound": -5.0}, None),
    "KDA, packed": (kda, {"S": 40, "bias": True}, (1, 2, 0, 20, 17)),
    "KDA, no decay left": (kda, {"S": 9, "A_log": 8.0}, None),
    "KDA, several tiles": (kda, {"S": 300, "heads": (1, 1, 16, 16)}, None),
    "GDN-2": (gdn2, {"S": 33, "B": 2}, None),
    "GDN-2, packed": (gdn2, {"S": 40, "per_value_head": True}, (1, 2, 0, 20, 17)),
    "GDP": (gdp, {"S": 33, "B": 2}, None),
    "GDP, packed": (
        gdp,
        {"S": 40, "steps": 3, "per_value_head": True},
        (1, 2, 0, 20, 17),
    ),
}


@pytest.mark.parametrize("name", FRONTS)
def test_a_front_and_its_gradients_equal_the_twins(name, device):
    draw, shape, lengths = FRONTS[name]
    layout, proj, given, grads, ours, twin = draw(device, **shape)
    documents = documents_of(lengths, device)
    z = layout.gate_columns

    def run(front, dtype):
        rows, *parameters = (None if x is None else x.to(dtype) for x in (proj, *given))
        of_rule = type(grads)(*(None if x is None else x.to(dtype) for x in grads))
        d_rows = torch.full_like(rows, torch.nan)
        made = front.forward(rows, parameters, documents)
        of_parameters = front.backward(rows, parameters, of_rule, d_rows, documents)
        assert d_rows[..., z].isnan().all(), "only the norm writes z's columns"
        d_rows[..., z] = 0
        return made, d_rows, of_parameters

    # Where log-decays are clamped, fp64 has another bound.
    wide = torch.float32 if "A_log" in shape else torch.float64
    exact, d_exact, of_exact = run(twin, wide)
    for front in ours:
        made, d_rows, of_parameters = run(front, torch.float32)
        for field, a, b in zip(made._fields, made, exact, strict=True):
            assert a.is_contiguous() or field == "D"
            assert_close(field, a, b)
        one = front.convolved_inputs[1]
        some = front.forward(proj, given, documents, (one,))
        assert torch.equal(getattr(some, one), getattr(made, one))
        assert [
            field for field in made._fields if getattr(some, field) is not None
        ] == [one]
        assert_close("rows", d_rows, d_exact)
        for number, (a, b) in enumerate(zip(of_parameters, of_exact, strict=True)):
            assert (a is None) == (b is None)
            if a is not None:
                assert_close(f"parameter {number}", a, b)


@pytest.mark.parametrize("name", ["Mamba2, no bias", "KDA, one token", "GDN-2"])
def test_gradients_of_several_heads_are_summed_for_every_input(name, device):
    """For gates too, though no rule of today shares one among heads."""
    draw, shape, _ = FRONTS[name]
    layout, proj, given, grads, (ours, *_), twin = draw(device, **shape | {"S": 5})
    make = torch.Generator().manual_seed(0)
    many = {}
    for number, output in enumerate(ours.section_outputs):
        heads, *width = output.shape
        for field in output.names:
            of_heads = (*proj.shape[1::-1], (2 + number % 2) * heads, *width)
            many[field] = torch.randn(of_heads, generator=make).to(device)
    found = []
    for front, dtype in ((ours, torch.float32), (twin, torch.float64)):
        rows, *parameters = (None if x is None else x.to(dtype) for x in (proj, *given))
        d_rows = torch.zeros_like(rows)
        of_rule = grads._replace(**many)
        found.append([d_rows, *front.backward(rows, parameters, of_rule, d_rows, None)])
    for number, (a, b) in enumerate(zip(*found, strict=True)):
        assert (a is None) == (b is None)
        if a is not None:
            assert_close(f"gradient {number}", a, b)


@pytest.mark.parametrize("kernels", ["triton", "torch"])
@pytest.mark.parametrize("name", ["KDA", "KDA, packed", "GDN-2"])
def test_gates_beside_the_rows_give_what_gates_in_the_rows_give(name, kernels, device):
    """KDA has one gate in the rows and one beside them. Equal to the bit, but for
    compiled kernels: rows of another stride are loaded in other groups."""
    draw, shape, lengths = FRONTS[name]
    layout, proj, given, grads, (ours,), twin = draw(device, **shape)
    front = {"triton": ours, "torch": twin}[kernels]
    documents = documents_of(lengths, device)
    main = proj[..., : layout.main_width].contiguous()
    apart = proj[..., layout.main_width :].contiguous()
    assert 0 < apart.shape[-1] < layout.width - layout.conv_width

    def run(rows, parameters):
        d_rows = torch.zeros_like(rows)
        made = front.forward(rows, parameters, documents)
        of_parameters = front.backward(rows, parameters, grads, d_rows, documents)
        return made, d_rows, of_parameters

    made, d_rows, of_parameters = run(proj, given)
    made_apart, d_main, (*of_same, d_apart) = run(main, [*given, apart])
    d_both = torch.cat([d_main, d_apart], dim=-1)
    pairs = zip(
        (*made, d_rows, *of_parameters), (*made_apart, d_both, *of_same), strict=True
    )
    for x, y in pairs:
        if x is None:
            continue
        room = 0.0
        if kernels == "triton" and not INTERPRETED:
            room = 2 * torch.finfo(x.dtype).eps * x.abs().max().item()
        torch.testing.assert_close(x, y, rtol=0, atol=room)
