"""Rows that kernels write in FP8: those of the plain twin, and its amax."""

from __future__ import annotations

import pytest
import torch

from megatron_gdn.ops.documents import Documents
from megatron_gdn.ops.fp8_rows import WIDE, Fp8Operands, Fp8Rows, Scaling, quantised
from megatron_gdn.ops.gdn import front_triton
from megatron_gdn.ops.gdn.parts import gdn_parts
from megatron_gdn.ops.gdn.rule.resolve import resolve_rule
from megatron_gdn.ops.gdn.sizes import HeadSizes
from megatron_gdn.ops.kernels.tiles import Block
from megatron_gdn.ops.mixer import mix
from megatron_gdn.ops.neighbours import ALONE, Neighbours
from megatron_gdn.ops.parts import GatedNorm
from megatron_gdn.ops.readout.per_head_triton import TritonPerHead

from .kernel_cases import Case

CASES = {
    "S1": {"S": 1, "sizes": HeadSizes(1, 1, 8, 128)},
    "S37-B2": {"S": 37, "B": 2, "sizes": HeadSizes(1, 3, 12, 20), "bias": True},
    "packed": {"S": 65, "lengths": [1, 30, 2, 32]},
}
KINDS = [torch.float8_e5m2, torch.float8_e4m3fn]
# What the largest number takes of the range: all numbers fit, or the largest are clamped.
USED = {"inside": 0.7, "beyond": 3.0}

of_kinds = pytest.mark.parametrize("kind", KINDS, ids=["e5m2", "e4m3"])
of_scales = pytest.mark.parametrize("used", USED.values(), ids=USED)


@pytest.fixture(params=CASES)
def case(request, device):
    return Case(device, **CASES[request.param])


def scaling_of(wide: torch.Tensor, kind: torch.dtype, used: float, amax: float = 0.0) -> Scaling:
    """A scale under which the largest number is ``used`` times the largest of ``kind``."""
    scale = used * torch.finfo(kind).max / wide.abs().amax().float()
    return Scaling(scale.reshape(1), torch.full((1,), amax, device=wide.device))


def assert_quantised(found, wide, kind, used, run) -> None:
    """Bit for bit: the numbers in front of the rounding are those of the same kernel in fp32."""
    ours, twin = scaling_of(wide, kind, used), scaling_of(wide, kind, used)
    run(found, ours)
    expected = quantised(wide, twin, kind)
    assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))
    assert torch.equal(ours.amax, twin.amax) and ours.amax.item() == wide.abs().max()


@of_scales
@of_kinds
@pytest.mark.parametrize("scaled", [False, True], ids=["", "factor"])
def test_the_convolved_columns_of_d_proj(case, kind, used, scaled):
    S, B = case.proj.shape[:2]
    G, H, K, V = case.sizes
    width, convolved = case.sizes.layout.main_width, case.sizes.conv_width
    gates = case._normal(S, B, 2 * H)
    factor = torch.full((H,), 0.5, device=case.device) if scaled else None

    def run(d_proj, scaling):
        front_triton.prepare_backward(
            case.proj[..., :width], *case.parameters, case.sizes, *grads, d_proj,
            documents=case.documents, gates=gates, d_gates=torch.empty_like(gates),
            factor=factor, scaling=scaling,
        )  # fmt: skip

    grads = case.grads(per_value_head=True)
    wide = torch.zeros(S, B, width, device=case.device)
    run(wide, None)
    found = torch.zeros(S, B, width, device=case.device).to(kind)
    assert_quantised(found, wide, kind, used, run)
    assert not found[..., convolved:].float().any(), "z's columns are the readout's to write"


@of_scales
@of_kinds
def test_zs_columns_of_d_proj(case, kind, used):
    S, B = case.proj.shape[:2]
    H, V, width = case.sizes.value_heads, case.sizes.value_dim, case.sizes.layout.main_width
    readout = TritonPerHead(case.sizes.layout.gate_columns)
    o, d_out = case._normal(B, S, H, V), case._normal(S, B, H * V)

    def run(d_proj, scaling):
        tile = Block(16, 3, 4)
        readout.backward(d_out, o, case.proj, case.gamma, d_proj, tile=tile, scaling=scaling)

    wide = torch.zeros(S, B, width, device=case.device)
    run(wide, None)
    found = torch.zeros(S, B, width, device=case.device).to(kind)
    assert_quantised(found, wide, kind, used, run)


@of_scales
def test_the_rows_for_out_proj(case, used):
    S, B = case.proj.shape[:2]
    H, V, kind = case.sizes.value_heads, case.sizes.value_dim, torch.float8_e4m3fn
    readout = TritonPerHead(case.sizes.layout.gate_columns)
    o = case._normal(B, S, H, V)
    wide = readout.forward(o, case.proj, case.gamma)

    def run(out, scaling):
        readout.forward(o, case.proj, case.gamma, out=out, scaling=scaling)

    assert_quantised(torch.zeros_like(wide).to(kind), wide, kind, used, run)


def test_an_amax_is_raised_and_never_lowered(device):
    case = Case(device, S=3)
    readout = TritonPerHead(case.sizes.layout.gate_columns)
    H, V = case.sizes.value_heads, case.sizes.value_dim
    wide = readout.forward(o := case._normal(1, 3, H, V), case.proj, case.gamma)
    for amax in (1e-3, 1e6):
        scaling = scaling_of(wide, torch.float8_e4m3fn, 0.5, amax)
        out = torch.empty_like(wide).to(torch.float8_e4m3fn)
        readout.forward(o, case.proj, case.gamma, out=out, scaling=scaling)
        assert scaling.amax.item() == max(amax, wide.abs().max().item())


def test_numbers_that_are_not_finite_stay_so(device):
    """NaN is not clamped to the range's end; infinity is, as by Transformer Engine's cast."""
    case = Case(device, S=3)
    readout, kind = TritonPerHead(case.sizes.layout.gate_columns), torch.float8_e5m2
    H, V = case.sizes.value_heads, case.sizes.value_dim
    o = case._normal(1, 3, H, V)
    o[0, 1, 0, 0] = float("nan")
    out = torch.empty(3, 1, H * V, device=device).to(kind)
    scaling = Scaling(torch.ones(1, device=device), torch.zeros(1, device=device))
    readout.forward(o, case.proj, case.gamma, out=out, scaling=scaling)
    assert out[1, 0, :V].float().isnan().all()
    assert out[0].float().isfinite().all() and out[2].float().isfinite().all()


class Rounded(torch.Tensor):
    """As Transformer Engine's: it shows the shape and dtype of the rows that it was made from.

    Any operator would be an error: nobody may read it on its way to the linear.
    """

    @staticmethod
    def __new__(cls, data: torch.Tensor, dtype: torch.dtype):
        made = torch.Tensor._make_wrapper_subclass(cls, data.shape, dtype=dtype, device=data.device)
        made.rows = data
        return made

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise AssertionError(f"{func} of a gradient in FP8")


class InProj(torch.autograd.Function):
    """Hands rows on, and keeps the gradient that comes back."""

    @staticmethod
    def forward(ctx, rows, kept):
        ctx.kept = kept
        return rows.clone()

    @staticmethod
    def backward(ctx, d_rows):
        ctx.kept.append(d_rows)
        return None, None


class OutProj(torch.autograd.Function):
    """Keeps the rows that come, whose gradient is ``d_mixed``."""

    @staticmethod
    def forward(ctx, mixed, d_mixed, kept):
        ctx.d_mixed = d_mixed
        kept.append(mixed)
        return d_mixed.new_zeros(())

    @staticmethod
    def backward(ctx, _):
        return ctx.d_mixed, None, None


@pytest.mark.parametrize("again", [False, True], ids=["", "again"])
@pytest.mark.parametrize("lengths", [None, [5, 28, 4]], ids=["dense", "packed"])
def test_the_linears_around_a_mixer_get_their_operands_in_fp8(device, lengths, again):
    """And every other gradient is as it is without; by plain kernels all is wide."""
    S = 37
    case = Case(device, S=S, sizes=HeadSizes(1, 2, 12, 20))
    H, V, width = case.sizes.value_heads, case.sizes.value_dim, case.sizes.layout.main_width
    near, gates = case.proj[..., :width].contiguous(), case._normal(S, 1, 2 * H)
    d_mixed = case._normal(S, 1, H * V)
    rule = resolve_rule("reference", device=device, dtype=near.dtype, sizes=case.sizes).rule
    neighbours = ALONE
    if lengths is not None:
        offsets = torch.tensor([0, *lengths]).cumsum(0).tolist()
        neighbours = Neighbours(Documents.from_cu_seqlens(offsets, S, device=device))

    def run(kernels, fp8):
        """The rows for out_proj, the gradient of in_proj's, and all others."""
        leaves = [near, gates, case.conv_weight, case.A_log, case.dt_bias, case.gamma]
        leaves = [leaf.clone().requires_grad_() for leaf in leaves]
        rows, of_gates, weight, A_log, dt_bias, gamma = leaves
        kept = []
        rows = InProj.apply(rows, kept)
        parts = gdn_parts(
            rows, weight, None, A_log, dt_bias, case.sizes, rule=rule, norm=GatedNorm(gamma),
            gates=of_gates, kernels=kernels, recompute_rule=again,
        )  # fmt: skip
        OutProj.apply(mix(rows, parts, neighbours, fp8=fp8), d_mixed, kept).backward()
        return kept, [leaf.grad for leaf in leaves[1:]]

    (mixed, d_rows), others = run("triton", WIDE)
    wide = {torch.float8_e5m2: d_rows, torch.float8_e4m3fn: mixed}
    ours = {kind: scaling_of(rows, kind, 0.9) for kind, rows in wide.items()}
    fp8 = Fp8Operands(*(
        Fp8Rows(kind, lambda kind=kind: ours[kind], lambda data: Rounded(data, torch.float32))
        for kind in wide
    ))  # fmt: skip
    (mixed, d_rows), others_found = run("triton", fp8)
    for kind, found in zip(wide, (d_rows, mixed), strict=True):
        assert isinstance(found, Rounded)
        twin = scaling_of(wide[kind], kind, 0.9)
        expected = quantised(wide[kind], twin, kind)
        assert torch.equal(found.rows.view(torch.uint8), expected.view(torch.uint8))
        assert torch.equal(ours[kind].amax, twin.amax)
    for a, b in zip(others_found, others, strict=True):
        assert torch.equal(a, b)
    assert {type(rows) for rows in run("torch", fp8)[0]} == {torch.Tensor}
