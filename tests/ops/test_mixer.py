"""Gated DeltaNet's mixer as one autograd function; tests/layer/test_equation.py has its
law."""

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from megatron_gdn.gdn.front import gdn_table
from megatron_gdn.gdn.rule import resolve_rule
from megatron_gdn.ops.delta_rule.base import HeadSizes
from megatron_gdn.ops.front.plain import front_of
from megatron_gdn.ops.stages import GatedNorm, stages_of
from tests.gdn_mixer import gated_delta_mixer
from tests.ops.delta_rule.states import documents_of

CASES = {
    "3to6": {"sizes": HeadSizes(3, 6, 8, 4), "S": 65, "B": 2},
    "2to2": {"sizes": HeadSizes(2, 2, 4, 8), "S": 63},
    "1to4": {"sizes": HeadSizes(1, 4, 6, 5), "S": 3, "B": 3, "bias": True},
    "S1": {"sizes": HeadSizes(1, 2, 4, 4), "S": 1},
    "packed": {"sizes": HeadSizes(1, 3, 4, 6), "S": 70, "lengths": (1, 2, 3, 0, 59, 5)},
}


def make_inputs(sizes, S, B=1, bias=False, lengths=None):
    torch.manual_seed(0)
    wide = {"dtype": torch.float64}
    leaves = [
        torch.randn(S, B, sizes.layout.width, **wide),
        torch.randn(sizes.layout.conv_width, 1, 4, **wide) * 0.5,
        torch.randn(sizes.layout.conv_width, **wide) if bias else None,
        torch.randn(sizes.value_heads, **wide),
        torch.randn(sizes.value_heads, **wide),
        1 + 0.3 * torch.randn(sizes.value_dim, **wide),
    ]
    return [x if x is None else x.requires_grad_() for x in leaves], documents_of(
        lengths
    )


def plain_rule(sizes):
    return resolve_rule(
        "reference", device="cpu", dtype=torch.float64, sizes=sizes
    ).rule


def mixed_by(rule, leaves, sizes, documents=None, **options):
    *tensors, gamma = leaves
    rule = plain_rule(sizes) if rule is None else rule
    return gated_delta_mixer(
        *tensors,
        sizes,
        rule=rule,
        norm=GatedNorm(gamma),
        documents=documents,
        **options,
    )


def gradients(out, leaves):
    present = [x for x in leaves if x is not None]
    torch.manual_seed(1)
    return torch.autograd.grad(out, present, torch.randn(out.shape, dtype=out.dtype))


def assert_equal(one, other) -> None:
    for a, b in zip(one, other, strict=True):
        assert torch.equal(a, b)


def saved_bytes(run) -> int:
    """Of all tensors that autograd saves in ``run``, each storage once."""
    kept = {}

    def pack(x):
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with saved_tensors_hooks(pack, lambda x: x):
        held = run()
    del held
    return sum(kept.values())


def test_an_unused_z_gets_a_zero_gradient():
    sizes = HeadSizes(1, 1, 4, 4)
    leaves, _ = make_inputs(sizes, S=5)
    o, _ = gated_delta_mixer(*leaves[:5], sizes, rule=plain_rule(sizes), norm=None)
    (d_proj,) = torch.autograd.grad(o.sum(), leaves[:1])
    assert (
        d_proj[..., sizes.layout.conv_width : sizes.layout.columns("beta").start] == 0
    ).all()
    assert d_proj.isfinite().all()


def test_wrong_shapes_say_what_is_expected():
    sizes = HeadSizes(1, 2, 4, 6)
    (proj, *others), _ = make_inputs(sizes, S=5, B=2)
    apart = torch.stack([proj, proj], -1)[..., 0]  # columns are not side by side
    for rows in (proj[..., 1:], proj[..., None], apart):
        with pytest.raises(ValueError, match=rf"\[S, B, {sizes.layout.width}\]"):
            mixed_by(None, [rows, *others], sizes)
    weight, *others = others
    wide = torch.stack([weight, weight], -1)[..., 0]
    for wrong in (weight[1:], wide):
        with pytest.raises(ValueError, match="conv_weight must be contiguous"):
            mixed_by(None, [proj, wrong, *others], sizes)
    layout = sizes.layout
    front = front_of(gdn_table(layout), "cpu", torch.float64, weight.shape[-1])
    main = proj[..., : layout.main_width]
    for gates in (proj[..., layout.main_width + 1 :], proj[1:, :, layout.main_width :]):
        with pytest.raises(ValueError, match=r"gates must be \[5, 2, 4\] beside rows"):
            stages_of(front, plain_rule(sizes), main, (weight,), None, gates=gates)
    others = [weight, *others]
    with pytest.raises(ValueError, match="batch of 1"):
        mixed_by(None, [proj, *others], sizes, documents_of([5]))
    with pytest.raises(ValueError, match="cover the whole buffer"):
        mixed_by(None, [proj[:, :1], *others], sizes, documents_of([4]))
