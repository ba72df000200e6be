"""The preparation kernels against their plain-torch twin in fp64, at sizes that divide
nothing."""

from dataclasses import replace
from typing import NamedTuple

import pytest
import torch

from megatron_gdn.gdn.front import gdn_table
from megatron_gdn.ops.delta_rule.base import HeadSizes, RuleGrads
from megatron_gdn.ops.front.plain import front_of
from megatron_gdn.ops.kernels.tiles import FrontTile
from megatron_gdn.ops.rules.base import Bits

from .conftest import INTERPRETED
from .kernel_cases import DEFAULT_SIZES, Case, assert_close

# several segments, and three tiles of 65 tokens
SMALL_WALK = FrontTile(rows=8, steps=4, warps=4)
# documents shorter than the taps
PACKED = {"S": 69, "lengths": (1, 2, 3, 1, 27, 0, 2, 33)}

CASES = {
    "S1": {"S": 1},
    "S2-B2": {"S": 2, "B": 2, "sizes": HeadSizes(2, 2, 16, 8), "bias": True},
    "S3": {"S": 3, "sizes": HeadSizes(1, 4, 12, 20), "taps": 3},
    "S63-3to6": {"S": 63, "sizes": HeadSizes(3, 6, 8, 16)},
    "S65-B2": {"S": 65, "B": 2, "sizes": HeadSizes(1, 2, 8, 16), "bias": True},
    "S69-1to4": {"S": 69, "sizes": HeadSizes(1, 4, 12, 20), "taps": 3},
    "packed": {**PACKED, "sizes": HeadSizes(1, 2, 8, 16)},
    "packed-1to3": {**PACKED, "sizes": HeadSizes(1, 3, 16, 8), "bias": True},
    "packed-2taps": {**PACKED, "sizes": HeadSizes(1, 1, 16, 16), "taps": 2},
    "packed-5taps": {**PACKED, "sizes": HeadSizes(1, 1, 8, 8), "taps": 5},
    # the same in both rows
    "packed-B2": {**PACKED, "B": 2, "sizes": HeadSizes(1, 2, 8, 16)},
    "one-document": {"S": 9, "lengths": (9,)},
    "olmo-hybrid": {"S": 9, "sizes": HeadSizes(1, 1, 96, 192)},
}


@pytest.fixture(params=CASES)
def case(request, device):
    return Case(device, **CASES[request.param])


def few(*names: str):
    """Of the cases, for laws that each shape does not change."""
    return pytest.mark.parametrize("case", names, indirect=True)


class ParameterGrads(NamedTuple):
    conv_weight: torch.Tensor
    conv_bias: torch.Tensor | None
    A_log: torch.Tensor
    dt_bias: torch.Tensor
    gates: torch.Tensor | None = None


def front(kernels, case, dtype=None, tile=None, bits=Bits.FREE, **options):
    kind = "cpu", torch.float32, case.conv_weight.shape[-1], kernels, bits, dtype
    made = front_of(gdn_table(case.sizes.layout, **options), *kind)
    return made if tile is None else replace(made, tile=tile)


def forward(kernels, case, rows=None, gates=None, only=None, **options):
    rows = case.proj if rows is None else rows
    parameters = case.parameters if gates is None else (*case.parameters, gates)
    return front(kernels, case, **options).forward(
        rows, parameters, case.documents, only
    )


def backward(
    kernels, case, grads, rows=None, d_rows=None, gates=None, factor=None, **options
):
    """The rows' gradient, NaN where nothing was written, and the parameters'."""
    rows = case.proj if rows is None else rows
    d_rows = torch.full_like(rows, torch.nan) if d_rows is None else d_rows
    if rows.dtype == torch.float64:
        grads = [x.double() for x in grads]
    parameters = case.parameters if gates is None else (*case.parameters, gates)
    grads = RuleGrads(*grads, factor=factor)
    made = front(kernels, case, **options)
    return d_rows, ParameterGrads(
        *made.backward(rows, parameters, grads, d_rows, case.documents)
    )


def assert_rows_close(case, d_rows, exact) -> None:
    """Of q, k, v and the gates; the columns between belong to the gated norm."""
    z = case.sizes.layout.conv_width
    rest = case.sizes.layout.columns("beta").start
    assert d_rows[..., z:rest].isnan().all() and exact[..., z:rest].isnan().all()
    assert_close("d_proj qkv", d_rows[..., :z], exact[..., :z])
    assert_close("d_proj gates", d_rows[..., rest:], exact[..., rest:])


def assert_all_close(got, exact) -> None:
    for name in got._fields:
        if getattr(exact, name) is not None:
            assert_close(name, getattr(got, name), getattr(exact, name))


@pytest.mark.each_value
@pytest.mark.parametrize("tile", [None, SMALL_WALK], ids=["table", "small"])
def test_forward_equals_the_twin(case, tile):
    got = forward("triton", case, bits=Bits(tile is not None), tile=tile)
    assert all(x.is_contiguous() for x in got)
    assert_all_close(got, forward("torch", case.double()))


@pytest.mark.each_value
@pytest.mark.parametrize(
    ("tile", "per_value_head", "batch_invariant"),
    [(None, False, False), (SMALL_WALK, True, True)],
    ids=["table", "small, one path"],
)
def test_every_gradient_equals_autograd_through_the_twin(
    case, per_value_head, batch_invariant, tile
):
    grads = case.grads(per_value_head)
    d_proj, got = backward("triton", case, grads, bits=Bits(batch_invariant), tile=tile)
    exact_d_proj, exact = backward("torch", case.double(), grads)
    assert_rows_close(case, d_proj, exact_d_proj)
    assert_all_close(got, exact)
    assert (got.conv_bias is None) == (case.conv_bias is None)


@pytest.mark.parametrize("tile", [None, SMALL_WALK], ids=["table", "small"])
def test_a_document_of_one_token_that_holds_nan_changes_no_other_gradient(device, tile):
    """The tokens after it do not exist, and read no token before them."""
    case = Case(device, S=9, lengths=(8, 1), sizes=HeadSizes(1, 2, 8, 16))
    grads = case.grads(False)
    clean, _ = backward("triton", case, grads, tile=tile)
    case.proj[-1] = torch.nan
    spoilt, _ = backward("triton", case, grads, tile=tile)
    assert torch.equal(spoilt[:-1].nan_to_num(7), clean[:-1].nan_to_num(7))
    assert spoilt[-1].isnan().all()


@few("S63-3to6", "packed-1to3")
def test_write_strengths_up_to_2_and_their_gradient_equal_the_twin(case):
    options = {"allow_neg_eigval": True}
    twin = case.double()
    got = forward("triton", case, **options)
    exact = forward("torch", twin, **options)
    raw = twin.proj[..., case.sizes.layout.columns("beta").start :][
        ..., : case.sizes.value_heads
    ]
    assert_close("the twin's beta", exact.beta, 2 * raw.transpose(0, 1).sigmoid())
    assert_close("beta", got.beta, exact.beta)
    grads = case.grads(per_value_head=False)
    d_proj, _ = backward("triton", case, grads, **options)
    assert_rows_close(case, d_proj, backward("torch", twin, grads, **options)[0])


@few("S63-3to6", "packed-1to3")
def test_parameters_in_bf16_are_computed_with_in_fp32(case):
    for name in ("conv_weight", "A_log", "dt_bias"):
        setattr(case, name, getattr(case, name).bfloat16())
    twin = case.double()
    assert_all_close(forward("triton", case), forward("torch", twin))
    grads = case.grads(per_value_head=False)
    d_proj, got = backward("triton", case, grads)
    exact_d_proj, exact = backward("torch", twin, grads)
    assert_rows_close(case, d_proj, exact_d_proj)
    # The results are in bf16; Triton's interpreter cuts them off and rounds nothing.
    for name in ("conv_weight", "A_log", "dt_bias"):
        assert_close(name, getattr(got, name), getattr(exact, name), 2**-7)


@pytest.mark.parametrize("boundary", [29, 30, 64, 66, 67])
def test_walks_see_a_boundary_as_far_as_the_taps_reach(boundary, device):
    """The middle one of three walks of 32 tokens reads the tokens 29 to 66: it needs no
    mask of tokens at 29 and 67, and at 29 a mask of channels."""
    sizes = HeadSizes(1, 2, 12, 20) if boundary == 29 else DEFAULT_SIZES
    case = Case(device, S=96, lengths=(boundary, 96 - boundary), sizes=sizes)
    grads = case.grads(per_value_head=False)
    twin = case.double()
    assert_close(
        "q", forward("triton", case, tile=SMALL_WALK).q, forward("torch", twin).q
    )
    d_proj, _ = backward("triton", case, grads, tile=SMALL_WALK)
    assert_rows_close(case, d_proj, backward("torch", twin, grads)[0])


@few("S2-B2", "S63-3to6", "packed-1to3")
def test_fp16_gradients_with_a_factor_per_head_equal_the_twin(case):
    G, H = case.sizes[:2]
    factor = (2.0 ** torch.arange(-20, G - 20, device=case.device)).repeat_interleave(
        H // G
    )
    *grads, dg, dbeta = case.grads(per_value_head=True)
    grads = [*(x.half() for x in grads), dg, dbeta]
    d_proj, got = backward("triton", case, grads, tile=SMALL_WALK, factor=factor)
    exact_d_proj, exact = backward("torch", case.double(), grads, factor=factor)
    # Head by head, since their gradients are of different sizes.
    for section, heads in zip((0, 1, 2, 4, 5), (G, G, H, H, H), strict=True):
        both = (
            x.split(case.sizes.layout.widths, -1)[section]
            for x in (d_proj, exact_d_proj)
        )
        for x, y in zip(
            *(x.unflatten(-1, (heads, -1)).unbind(2) for x in both), strict=True
        ):
            assert_close(f"d_proj of section {section}", x, y)
    assert_all_close(got, exact)


def test_without_l2norm(device):
    case = Case(device, S=37)
    options = {"normalise_qk": False}
    grads = case.grads(per_value_head=True)
    twin = case.double()
    exact = forward("torch", twin, **options)
    assert_close("q", forward("triton", case, **options).q, exact.q)
    d_proj, _ = backward("triton", case, grads, **options)
    assert_rows_close(case, d_proj, backward("torch", twin, grads, **options)[0])


def test_gates_keep_their_digits_where_softplus_is_tiny_or_huge(device):
    case = Case(device, S=9)
    alpha = torch.linspace(-80, 80, 9, device=device)[:, None, None]
    case.proj[..., case.sizes.layout.columns("alpha").start :] = alpha
    got = forward("triton", case)
    exact = forward("torch", case.double())
    # per token: one large g must not hide the relative error of a tiny one
    for t in range(9):
        # Held where the decay is 0 in fp32.
        assert_close(f"g at {t}", got.g[:, t], exact.g[:, t].clamp(min=-104))


each_twin = pytest.mark.parametrize("kernels", ["triton", "torch"])


@pytest.mark.each_value
@each_twin
@pytest.mark.parametrize(
    "only", ["", "q", "k", "v", "q k", "q k v", "k v", "v g", "g", "beta", "g beta"]
)
def test_only_the_parts_asked_for_are_made_and_they_keep_their_bits(
    only, kernels, device
):
    case = Case(device, S=21, B=2, sizes=HeadSizes(2, 6, 8, 16), bias=True)
    only = only.split()
    full = forward(kernels, case)
    part = forward(kernels, case, only=tuple(only))
    for name in full._fields:
        if name in only:
            assert torch.equal(getattr(part, name), getattr(full, name)), name
            assert getattr(part, name).is_contiguous(), name
        else:
            assert getattr(part, name) is None, name


def test_changing_one_document_leaves_the_others_bitwise_unchanged(device):
    grads = Case(device, S=33).grads(per_value_head=True)

    def run(change: bool):
        case = Case(device, S=33, lengths=(5, 2, 9, 17))
        if change:
            case.proj[5:7] += 1
        zeros = torch.zeros_like(case.proj)
        d_proj, _ = backward("triton", case, grads, d_rows=zeros, tile=SMALL_WALK)
        return [*(x.transpose(0, 1) for x in forward("triton", case)), d_proj]

    others = torch.tensor([t for t in range(33) if not 5 <= t < 7])
    for before, after in zip(run(False), run(True), strict=True):
        assert torch.equal(before[others], after[others])
        assert not torch.equal(before[5:7], after[5:7])


def test_wide_rows_go_with_half_precision_parameters_and_gradients(device):
    """fp32 rows give what fp16 ones give, before its rounding."""
    case = Case(device, S=12, lengths=(6, 2, 4), dtype=torch.float16, bias=True)
    rows = case.proj.float()
    wide = forward("triton", case, rows, only=("q", "k", "v"))
    half = forward("triton", case, only=("q", "k", "v"))
    for name in "qkv":
        assert getattr(wide, name).dtype == torch.float32
        assert torch.equal(getattr(wide, name).half(), getattr(half, name)), name

    grads = [x.half() for x in case.grads(per_value_head=True)[:3]]
    gates = [x.new_zeros(x.shape, dtype=torch.float32) for x in case.grads(True)[3:]]
    d_rows, got = backward("triton", case, [*grads, *gates], rows)
    exact, _ = backward("torch", case.double(), [*grads, *gates])
    z = case.sizes.layout.conv_width
    assert_close("d_rows", d_rows[..., :z], exact[..., :z])
    assert (got.A_log == 0).all() and (got.dt_bias == 0).all()


def test_tokens_so_far_apart_that_a_tile_of_them_leaves_32_bits(device):
    """Rows of a large batch; the memory between them is never touched."""
    if device.type == "cuda" and torch.cuda.mem_get_info()[0] < 10 << 30:
        pytest.skip("needs 10 GiB")
    case = Case(device, S=19, sizes=HeadSizes(1, 1, 16, 16), dtype=torch.float16)
    stride = 2**27

    def spread(rows):
        room = torch.empty(18 * stride + rows.shape[2], dtype=rows.dtype, device=device)
        return room.as_strided(rows.shape, (stride, rows.shape[2], 1)).copy_(rows)

    narrow = case.proj.contiguous()
    wide = spread(case.proj)
    made = [forward("triton", case, rows) for rows in (narrow, wide)]
    assert all(torch.equal(a, b) for a, b in zip(*made, strict=True))
    grads = case.grads(per_value_head=True)
    tile = FrontTile(rows=2, steps=16, warps=4)
    # One of the two at a time: either stride must be minded.
    for rows, d_rows in ((wide, torch.zeros_like(narrow)), (narrow, spread(narrow))):
        _, got = backward("triton", case, grads, rows, d_rows, tile=tile)
        exact_d_rows, exact = backward("triton", case, grads, narrow, tile=tile)
        rest = case.sizes.layout.columns("beta").start
        for start, end in ((0, case.sizes.layout.conv_width), (rest, None)):
            assert torch.equal(d_rows[..., start:end], exact_d_rows[..., start:end])
        for name in ("conv_weight", "A_log", "dt_bias"):
            # Rounded to the parameter's type, after sums in tiles of another size.
            tolerance = 2**-10 if name == "conv_weight" else 1e-5
            assert_close(name, getattr(got, name), getattr(exact, name), tolerance)


def test_half_precision_rounds_once(device):
    """fp16 output differs from the fp64 one by one rounding, 2^-11 relative per
    element."""
    case = Case(device, S=40, dtype=torch.float16)
    got = forward("triton", case)
    exact = forward("torch", case.double())
    for name in "qkv":
        assert getattr(got, name).dtype == torch.float16
        error = (getattr(got, name).double() - getattr(exact, name)).abs()
        assert (error <= 2**-11 * getattr(exact, name).abs() * 1.01 + 2**-24).all(), (
            name
        )
    assert got.g.dtype == torch.float32 and got.beta.dtype == torch.float32


@each_twin
@pytest.mark.parametrize("only", [("q",), None])
def test_another_dtype_of_q_k_and_v_is_one_rounding_away(only, kernels, device):
    case = Case(device, S=21, B=2, sizes=HeadSizes(2, 6, 8, 16), bias=True)
    wide = forward(kernels, case, only=only)
    half = forward(kernels, case, only=only, dtype=torch.float16)
    for name in only or "qkv":
        assert (
            getattr(half, name).dtype == torch.float16
            and getattr(half, name).is_contiguous()
        )
        assert torch.equal(getattr(half, name), getattr(wide, name).half()), name
    if only is None:
        assert torch.equal(half.g, wide.g) and torch.equal(half.beta, wide.beta)


@pytest.mark.parametrize("A_log", [89.0, 1e30, float("nan")])
def test_gates_of_any_decay_rate_are_the_twins(A_log, device):
    """In fp32 on both sides: in fp64 log-decays are held at another bound."""
    case = Case(device, S=37)
    case.A_log[1:3] = A_log
    alpha = case.sizes.layout.columns("alpha")
    case.proj[:5, :, alpha] = -200  # softplus is 0
    case.proj[5, :, alpha] = 3e38
    got, twin = (forward(module, case) for module in ("triton", "torch"))
    torch.testing.assert_close(got.g, twin.g, rtol=1e-5, atol=0, equal_nan=True)
    if A_log != A_log:
        return
    grads = case.grads(per_value_head=False)
    (d_got, got), (d_twin, twin) = (
        backward(m, case, grads) for m in ("triton", "torch")
    )
    gates = [x[..., case.sizes.layout.columns("beta").start :] for x in (d_got, d_twin)]
    close = {"rtol": 1e-4, "atol": 1e-5, "equal_nan": True}
    torch.testing.assert_close(*gates, **close)
    torch.testing.assert_close(got.A_log, twin.A_log, **close)
    torch.testing.assert_close(got.dt_bias, twin.dt_bias, **close)
    assert all(x.isfinite().all() for x in (*gates, twin.A_log))


@pytest.mark.each_value
@each_twin
@few("S1", "S65-B2", "packed-1to3", "packed-B2")
def test_gates_beside_the_rows_give_what_gates_in_the_rows_give(case, kernels):
    """To the bit, but for compiled kernels: rows of another stride are loaded in other
    groups."""
    rest = case.sizes.layout.columns("beta").start
    grads = case.grads(per_value_head=False)
    main = case.proj[..., :rest].contiguous()
    gates = case.proj[..., rest:].contiguous()
    exact = INTERPRETED or kernels == "torch"

    def assert_same(x, y) -> None:
        # One rounding of the largest sum, once on either side.
        room = 0.0 if exact else 2 * torch.finfo(x.dtype).eps * x.abs().max().item()
        torch.testing.assert_close(x, y, rtol=0, atol=room)

    for x, y in zip(
        forward(kernels, case), forward(kernels, case, main, gates), strict=True
    ):
        assert_same(x, y)
    d_proj = torch.zeros_like(case.proj)
    d_main = torch.zeros_like(main)
    _, whole = backward(kernels, case, grads, d_rows=d_proj)
    _, apart = backward(kernels, case, grads, main, d_main, gates)
    assert_same(d_proj, torch.cat([d_main, apart.gates], dim=-1))
    for x, y in zip(whole[:4], apart[:4], strict=True):
        if x is not None:
            assert_same(x, y)
