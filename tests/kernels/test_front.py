"""The preparation kernels against their plain-torch twin in fp64, at sizes that divide nothing."""

from __future__ import annotations

import pytest
import torch

from megatron_gdn.ops.delta_rule import front_torch as prepare_torch
from megatron_gdn.ops.delta_rule import front_triton as prepare
from megatron_gdn.ops.delta_rule.base import HeadSizes
from megatron_gdn.ops.kernels.tiles import Walk

from .kernel_cases import Case, assert_close

SMALL_WALK = Walk(rows=8, steps=4, warps=4)  # several segments, and three tiles of 65 tokens
PACKED = {"S": 69, "lengths": (1, 2, 3, 1, 27, 0, 2, 33)}  # documents shorter than the taps

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
    "packed-B2": {**PACKED, "B": 2, "sizes": HeadSizes(1, 2, 8, 16)},  # the same in both rows
    "one-document": {"S": 9, "lengths": (9,)},
    "olmo-hybrid": {"S": 9, "sizes": HeadSizes(1, 1, 96, 192)},
}


@pytest.fixture(params=CASES)
def case(request, device):
    return Case(device, **CASES[request.param])


@pytest.mark.parametrize("tile", [None, SMALL_WALK], ids=["table", "small"])
def test_forward_equals_the_twin(case, tile):
    got = prepare.prepare_forward(
        case.proj, *case.parameters, case.sizes,
        documents=case.documents, batch_invariant=tile is not None, tile=tile,
    )  # fmt: skip
    twin = case.double()
    exact = prepare_torch.prepare_forward(
        twin.proj, *twin.parameters, twin.sizes, documents=twin.documents
    )
    for name in got._fields:
        assert getattr(got, name).is_contiguous()
        assert_close(name, getattr(got, name), getattr(exact, name))


@pytest.mark.parametrize(
    ("tile", "per_value_head", "batch_invariant"),
    [(None, False, False), (SMALL_WALK, True, True)],
    ids=["table", "small, one path"],
)
def test_every_gradient_equals_autograd_through_the_twin(
    case, per_value_head, batch_invariant, tile
):
    grads = case.grads(per_value_head)
    d_proj = torch.full_like(case.proj, float("nan"))
    got = prepare.prepare_backward(
        case.proj, *case.parameters, case.sizes, *grads, d_proj,
        documents=case.documents, batch_invariant=batch_invariant, tile=tile,
    )  # fmt: skip
    twin = case.double()
    exact_d_proj = torch.full_like(twin.proj, float("nan"))
    exact = prepare_torch.prepare_backward(
        twin.proj, *twin.parameters, twin.sizes, *(x.double() for x in grads), exact_d_proj,
        documents=twin.documents,
    )  # fmt: skip
    z, rest = case.sizes.conv_width, case.sizes.beta_column
    assert d_proj[..., z:rest].isnan().all(), "z's columns belong to the gated norm"
    assert_close("d_proj qkv", d_proj[..., :z], exact_d_proj[..., :z])
    assert_close("d_proj gates", d_proj[..., rest:], exact_d_proj[..., rest:])
    for name in got._fields:
        if getattr(exact, name) is not None:
            assert_close(name, getattr(got, name), getattr(exact, name))
    assert (got.conv_bias is None) == (case.conv_bias is None)


def test_write_strengths_up_to_2_and_their_gradient_equal_the_twin(case):
    options = {"documents": case.documents, "allow_neg_eigval": True}
    got = prepare.prepare_forward(case.proj, *case.parameters, case.sizes, **options)
    grads, twin = case.grads(per_value_head=False), case.double()
    d_proj, exact_d_proj = torch.zeros_like(case.proj), torch.zeros_like(twin.proj)
    prepare.prepare_backward(case.proj, *case.parameters, case.sizes, *grads, d_proj, **options)
    exact = prepare_torch.prepare_forward(twin.proj, *twin.parameters, twin.sizes, **options)
    prepare_torch.prepare_backward(
        twin.proj, *twin.parameters, twin.sizes, *(x.double() for x in grads), exact_d_proj,
        **options,
    )  # fmt: skip
    raw = twin.proj[..., case.sizes.beta_column :][..., : case.sizes.value_heads]
    assert_close("the twin's beta", exact.beta, 2 * raw.transpose(0, 1).sigmoid())
    assert_close("beta", got.beta, exact.beta)
    assert_close("d_proj", d_proj, exact_d_proj)


@pytest.mark.parametrize("boundary", [29, 30, 64, 66, 67])
def test_walks_see_a_boundary_as_far_as_the_taps_reach(boundary, device):
    """The middle one of three walks of 32 tokens reads the tokens 29 to 66."""
    case = Case(device, S=96, lengths=(boundary, 96 - boundary))
    got = prepare.prepare_forward(
        case.proj, *case.parameters, case.sizes, documents=case.documents, tile=SMALL_WALK
    )
    grads, twin = case.grads(per_value_head=False), case.double()
    d_proj, exact_d_proj = torch.zeros_like(case.proj), torch.zeros_like(twin.proj)
    prepare.prepare_backward(
        case.proj, *case.parameters, case.sizes, *grads, d_proj,
        documents=case.documents, tile=SMALL_WALK,
    )  # fmt: skip
    exact = prepare_torch.prepare_forward(
        twin.proj, *twin.parameters, twin.sizes, documents=twin.documents
    )
    prepare_torch.prepare_backward(
        twin.proj, *twin.parameters, twin.sizes, *(x.double() for x in grads), exact_d_proj,
        documents=twin.documents,
    )  # fmt: skip
    assert_close("q", got.q, exact.q)
    assert_close("d_proj", d_proj, exact_d_proj)


def test_fp16_gradients_with_a_factor_per_head_equal_the_twin(case):
    G, H = case.sizes[:2]
    factor = (2.0 ** torch.arange(-20, G - 20, device=case.device)).repeat_interleave(H // G)
    *grads, dg, dbeta = case.grads(per_value_head=True)
    grads = [*(x.half() for x in grads), dg, dbeta]
    d_proj = torch.full_like(case.proj, float("nan"))
    options = {"documents": case.documents, "factor": factor}
    got = prepare.prepare_backward(
        case.proj, *case.parameters, case.sizes, *grads, d_proj, tile=SMALL_WALK, **options
    )
    twin = case.double()
    exact_d_proj = torch.full_like(twin.proj, float("nan"))
    exact = prepare_torch.prepare_backward(
        twin.proj, *twin.parameters, twin.sizes, *(x.double() for x in grads), exact_d_proj,
        **options,
    )  # fmt: skip
    # Head by head, since their gradients are of different sizes.
    for section, heads in zip((0, 1, 2, 4, 5), (G, G, H, H, H), strict=True):
        both = (x.split(case.sizes.layout.widths, -1)[section] for x in (d_proj, exact_d_proj))
        for x, y in zip(*(x.unflatten(-1, (heads, -1)).unbind(2) for x in both), strict=True):
            assert_close(f"d_proj of section {section}", x, y)
    for name in got._fields:
        if getattr(exact, name) is not None:
            assert_close(name, getattr(got, name), getattr(exact, name))


def test_the_twin_takes_a_factor_out_of_every_gradient(case):
    """By linearity: the gradients times the factor, without one."""
    G, H = case.sizes[:2]
    factor = (2.0 ** torch.arange(3, G + 3, device=case.device)).repeat_interleave(H // G)
    twin, results = case.double(), []
    dq, dk, dv, dg, dbeta = (x.double() for x in case.grads(per_value_head=True))
    scaled = [x * factor[:, None] for x in (dq, dk, dv)] + [x * factor for x in (dg, dbeta)]
    for given, grads in ((factor, (dq, dk, dv, dg, dbeta)), (None, scaled)):
        d_proj = torch.zeros_like(twin.proj)
        made = prepare_torch.prepare_backward(
            twin.proj, *twin.parameters, twin.sizes, *grads, d_proj,
            documents=twin.documents, factor=given,
        )  # fmt: skip
        results.append([d_proj, *(x for x in made if x is not None)])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_without_l2norm(device):
    case = Case(device, S=37)
    grads = case.grads(per_value_head=True)
    d_proj, exact_d_proj = torch.zeros_like(case.proj), torch.zeros_like(case.double().proj)
    got = prepare.prepare_forward(case.proj, *case.parameters, case.sizes, normalise_qk=False)
    prepare.prepare_backward(
        case.proj, *case.parameters, case.sizes, *grads, d_proj, normalise_qk=False
    )
    twin = case.double()
    exact = prepare_torch.prepare_forward(
        twin.proj, *twin.parameters, twin.sizes, normalise_qk=False
    )
    prepare_torch.prepare_backward(
        twin.proj, *twin.parameters, twin.sizes, *grads, exact_d_proj, normalise_qk=False
    )
    assert_close("q", got.q, exact.q)
    assert_close("d_proj", d_proj, exact_d_proj)


def test_gates_keep_their_digits_where_softplus_is_tiny_or_huge(device):
    case = Case(device, S=9)
    case.proj[..., case.sizes.layout.columns("alpha").start :] = torch.linspace(
        -80, 80, 9, device=device
    )[:, None, None]
    got = prepare.prepare_forward(case.proj, *case.parameters, case.sizes)
    twin = case.double()
    exact = prepare_torch.prepare_forward(twin.proj, *twin.parameters, twin.sizes)
    for t in range(9):  # per token: one large g must not hide the relative error of a tiny one
        # Held where the decay is 0 in fp32.
        assert_close(f"g at {t}", got.g[:, t], exact.g[:, t].clamp(min=-104))


@pytest.mark.parametrize("module", [prepare, prepare_torch], ids=["triton", "torch"])
@pytest.mark.parametrize("parts", ["q", "k", "v", "qk", "qkv", "kv", "vg", "g"])
def test_only_the_parts_asked_for_are_made_and_they_keep_their_bits(parts, module, device):
    case = Case(device, S=21, B=2, sizes=HeadSizes(2, 6, 8, 16), bias=True)
    full = module.prepare_forward(case.proj, *case.parameters, case.sizes)
    part = module.prepare_forward(case.proj, *case.parameters, case.sizes, parts=parts)
    for name in full._fields:
        if (name in parts) or (name == "beta" and "g" in parts):
            assert torch.equal(getattr(part, name), getattr(full, name)), name
            assert getattr(part, name).is_contiguous(), name
        else:
            assert getattr(part, name) is None, name


def test_changing_one_document_leaves_the_others_bitwise_unchanged(device):
    lengths = (5, 2, 9, 17)
    grads = Case(device, S=33).grads(per_value_head=True)

    def run(change: bool):
        case = Case(device, S=33, lengths=lengths)
        if change:
            case.proj[5:7] += 1
        out = prepare.prepare_forward(
            case.proj, *case.parameters, case.sizes, documents=case.documents
        )
        d_proj = torch.zeros_like(case.proj)
        prepare.prepare_backward(
            case.proj, *case.parameters, case.sizes, *grads, d_proj,
            documents=case.documents, tile=SMALL_WALK,
        )  # fmt: skip
        return [*(x.transpose(0, 1) for x in out), d_proj]

    others = torch.tensor([t for t in range(33) if not 5 <= t < 7])
    for before, after in zip(run(False), run(True), strict=True):
        assert torch.equal(before[others], after[others])
        assert not torch.equal(before[5:7], after[5:7])


def test_wide_rows_go_with_half_precision_parameters_and_gradients(device):
    """What chunkwise context parallelism asks at the edges of a piece: fp32 rows, fp16 the rest.

    The outputs are those of fp16 rows before their rounding, the gradient keeps fp32's digits.
    """
    case = Case(device, S=12, lengths=(6, 2, 4), dtype=torch.float16, bias=True)
    parts = {"documents": case.documents, "parts": "qkv"}
    rows = case.proj.float()
    wide = prepare.prepare_forward(rows, *case.parameters, case.sizes, **parts)
    half = prepare.prepare_forward(case.proj, *case.parameters, case.sizes, **parts)
    for name in "qkv":
        assert getattr(wide, name).dtype == torch.float32
        assert torch.equal(getattr(wide, name).half(), getattr(half, name)), name

    grads = [x.half() for x in case.grads(per_value_head=True)[:3]]
    gates = [x.new_zeros(x.shape, dtype=torch.float32) for x in case.grads(True)[3:]]
    d_rows = torch.full_like(rows, float("nan"))
    got = prepare.prepare_backward(
        rows, *case.parameters, case.sizes, *grads, *gates, d_rows, documents=case.documents
    )
    twin = case.double()
    exact_d_rows = torch.zeros_like(twin.proj)
    prepare_torch.prepare_backward(
        twin.proj, *twin.parameters, twin.sizes, *(x.double() for x in (*grads, *gates)),
        exact_d_rows, documents=twin.documents,
    )  # fmt: skip
    z = case.sizes.conv_width
    assert_close("d_rows", d_rows[..., :z], exact_d_rows[..., :z])
    assert (got.A_log == 0).all() and (got.dt_bias == 0).all()


def test_tokens_so_far_apart_that_a_tile_of_them_leaves_32_bits(device):
    """Rows of a large batch; the memory between them is never touched."""
    if device.type == "cuda" and torch.cuda.mem_get_info()[0] < 10 << 30:
        pytest.skip("needs 10 GiB")
    case, stride = Case(device, S=19, sizes=HeadSizes(1, 1, 16, 16), dtype=torch.float16), 2**27

    def spread(rows):
        room = torch.empty(18 * stride + rows.shape[2], dtype=rows.dtype, device=device)
        return room.as_strided(rows.shape, (stride, rows.shape[2], 1)).copy_(rows)

    narrow, wide = case.proj.contiguous(), spread(case.proj)
    made = [prepare.prepare_forward(x, *case.parameters, case.sizes) for x in (narrow, wide)]
    assert all(torch.equal(a, b) for a, b in zip(*made, strict=True))
    grads, tile = case.grads(per_value_head=True), Walk(rows=2, steps=16, warps=4)
    # One of the two at a time: either stride must be minded.
    for proj, d_proj in ((wide, torch.zeros_like(narrow)), (narrow, spread(narrow))):
        got = prepare.prepare_backward(
            proj, *case.parameters, case.sizes, *grads, d_proj, tile=tile
        )
        exact_d_proj = torch.zeros_like(narrow)
        exact = prepare.prepare_backward(
            narrow, *case.parameters, case.sizes, *grads, exact_d_proj, tile=tile
        )
        for start, end in ((0, case.sizes.conv_width), (case.sizes.beta_column, None)):
            assert torch.equal(d_proj[..., start:end], exact_d_proj[..., start:end])
        for name in ("conv_weight", "A_log", "dt_bias"):
            # Rounded to the parameter's type, after sums in tiles of another size.
            tolerance = 2**-10 if name == "conv_weight" else 1e-5
            assert_close(name, getattr(got, name), getattr(exact, name), tolerance)


def test_half_precision_rounds_once(device):
    """fp16 output differs from the fp64 one by one rounding, 2^-11 relative per element."""
    case = Case(device, S=40, dtype=torch.float16)
    got = prepare.prepare_forward(case.proj, *case.parameters, case.sizes)
    twin = case.double()
    exact = prepare_torch.prepare_forward(twin.proj, *twin.parameters, twin.sizes)
    for name in "qkv":
        assert getattr(got, name).dtype == torch.float16
        error = (getattr(got, name).double() - getattr(exact, name)).abs()
        assert (error <= 2**-11 * getattr(exact, name).abs() * 1.01 + 2**-24).all(), name
    assert got.g.dtype == torch.float32 and got.beta.dtype == torch.float32


@pytest.mark.parametrize("module", [prepare, prepare_torch], ids=["triton", "torch"])
@pytest.mark.parametrize("parts", ["q", "qkvg"])
def test_another_dtype_of_q_k_and_v_is_one_rounding_away(parts, module, device):
    case = Case(device, S=21, B=2, sizes=HeadSizes(2, 6, 8, 16), bias=True)
    wide = module.prepare_forward(case.proj, *case.parameters, case.sizes, parts=parts)
    half = module.prepare_forward(
        case.proj, *case.parameters, case.sizes, parts=parts, dtype=torch.float16
    )
    for name in parts.rstrip("g"):
        assert getattr(half, name).dtype == torch.float16 and getattr(half, name).is_contiguous()
        assert torch.equal(getattr(half, name), getattr(wide, name).half()), name
    if "g" in parts:
        assert torch.equal(half.g, wide.g) and torch.equal(half.beta, wide.beta)


@pytest.mark.parametrize("A_log", [89.0, 1e30, float("nan")])
def test_gates_of_any_decay_rate_are_the_twins(A_log, device):
    """In fp32 on both sides: in fp64 log-decays are held at another bound."""
    case = Case(device, S=37)
    case.A_log[1:3] = A_log
    case.proj[:5, :, case.sizes.beta_column + case.sizes.value_heads :] = -200  # softplus is 0
    case.proj[5, :, case.sizes.beta_column + case.sizes.value_heads :] = 3e38
    arguments = (case.proj, *case.parameters, case.sizes)
    got, twin = prepare.prepare_forward(*arguments), prepare_torch.prepare_forward(*arguments)
    torch.testing.assert_close(got.g, twin.g, rtol=1e-5, atol=0, equal_nan=True)
    grads, d_projs = case.grads(per_value_head=False), torch.zeros(2, *case.proj.shape).to(device)
    if A_log != A_log:
        return
    got, twin = (
        rule.prepare_backward(*arguments, *grads, d_proj)
        for rule, d_proj in zip((prepare, prepare_torch), d_projs, strict=True)
    )
    gates = d_projs[..., case.sizes.beta_column :]
    close = {"rtol": 1e-4, "atol": 1e-5, "equal_nan": True}
    torch.testing.assert_close(gates[0], gates[1], **close)
    torch.testing.assert_close(got.A_log, twin.A_log, **close)
    torch.testing.assert_close(got.dt_bias, twin.dt_bias, **close)
    assert gates.isfinite().all() and twin.A_log.isfinite().all()


@pytest.mark.parametrize("module", [prepare, prepare_torch], ids=["triton", "torch"])
def test_gates_beside_the_rows_give_the_bits_of_gates_in_the_rows(case, module):
    rest = case.sizes.beta_column
    main, gates = case.proj[..., :rest].contiguous(), case.proj[..., rest:].contiguous()
    given = {"documents": case.documents}
    whole = module.prepare_forward(case.proj, *case.parameters, case.sizes, **given)
    apart = module.prepare_forward(main, *case.parameters, case.sizes, gates=gates, **given)
    assert all(torch.equal(x, y) for x, y in zip(whole, apart, strict=True))
    grads = case.grads(per_value_head=False)
    d_proj, d_main = torch.zeros_like(case.proj), torch.zeros_like(main)
    d_gates = torch.full_like(gates, float("nan"))
    whole = module.prepare_backward(
        case.proj, *case.parameters, case.sizes, *grads, d_proj, **given
    )
    apart = module.prepare_backward(
        main, *case.parameters, case.sizes, *grads, d_main, gates=gates, d_gates=d_gates, **given
    )
    assert torch.equal(d_proj, torch.cat([d_main, d_gates], dim=-1))
    found = zip(whole, apart, strict=True)
    assert all(x is None or torch.equal(x, y) for x, y in found)
