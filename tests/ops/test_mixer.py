"""The mixer as one autograd function against the plain composition of its parts, in fp64 on CPU."""

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from megatron_gdn.gdn.api import recurrent_gated_delta_rule
from megatron_gdn.gdn.rule import resolve_rule
from megatron_gdn.ops.conv import causal_conv1d
from megatron_gdn.ops.delta_rule.base import HeadSizes
from megatron_gdn.ops.elementwise import l2norm, rms_norm_gated
from megatron_gdn.ops.front.gates import decay_and_write_gates
from megatron_gdn.ops.parts import GatedNorm
from tests.gdn_mixer import gated_delta_mixer
from tests.ops.delta_rule.states import documents_of

NAMES = ("proj", "conv_weight", "conv_bias", "A_log", "dt_bias", "gamma")
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
    return [x if x is None else x.requires_grad_() for x in leaves], documents_of(lengths)


def composed(leaves, sizes, documents):
    """conv -> l2norm -> gates -> token recurrence -> gated norm, one op at a time."""
    proj, weight, bias, A_log, dt_bias, gamma = leaves
    rows = proj.transpose(0, 1)
    q, k, v, z, b, alpha = rows.split(sizes.layout.widths, dim=-1)
    qkv, _ = causal_conv1d(torch.cat([q, k, v], -1), weight[:, 0], bias, cu_seqlens=documents)
    q, k, v = qkv.split(sizes.layout.widths[:3], dim=-1)
    q, k = (l2norm(x.unflatten(-1, (sizes.key_heads, -1))) for x in (q, k))
    v, z = (x.unflatten(-1, (sizes.value_heads, -1)) for x in (v, z))
    g, beta = decay_and_write_gates(alpha, b, A_log, dt_bias)
    o, _ = recurrent_gated_delta_rule(q, k, v, g, beta, cu_seqlens=documents)
    return rms_norm_gated(o, z, gamma).flatten(2).transpose(0, 1)


def plain_rule(sizes):
    return resolve_rule("reference", device="cpu", dtype=torch.float64, sizes=sizes).rule


def mixed_by(rule, leaves, sizes, documents=None, **options):
    *tensors, gamma = leaves
    rule = plain_rule(sizes) if rule is None else rule
    return gated_delta_mixer(
        *tensors, sizes, rule=rule, norm=GatedNorm(gamma), documents=documents, **options
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


@pytest.mark.parametrize("recompute", [False, True], ids=["saved", "recomputed"])
@pytest.mark.parametrize("name", CASES)
def test_mixer_and_every_gradient_equal_the_composition(name, recompute):
    sizes = CASES[name]["sizes"]
    leaves, documents = make_inputs(**CASES[name])
    mixed = mixed_by(None, leaves, sizes, documents, recompute_qkv=recompute)
    expected = composed(leaves, sizes, documents)
    torch.testing.assert_close(mixed, expected, rtol=1e-10, atol=1e-10)
    got, exact = gradients(mixed, leaves), gradients(expected, leaves)
    present = [n for n, x in zip(NAMES, leaves, strict=True) if x is not None]
    for label, a, b in zip(present, got, exact, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9, msg=lambda m, n=label: f"{n}: {m}")


def test_without_norm_o_and_z_carry_the_whole_gradient():
    sizes = HeadSizes(2, 4, 4, 6)
    leaves, _ = make_inputs(sizes, S=37, B=2)
    *tensors, gamma = leaves
    o, z = gated_delta_mixer(*tensors, sizes, rule=plain_rule(sizes), norm=None)
    mixed = rms_norm_gated(o, z, gamma).flatten(2).transpose(0, 1)
    expected = composed(leaves, sizes, None)
    torch.testing.assert_close(mixed, expected, rtol=1e-10, atol=1e-10)
    for a, b in zip(gradients(mixed, leaves), gradients(expected, leaves), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def test_an_unused_z_gets_a_zero_gradient():
    sizes = HeadSizes(1, 1, 4, 4)
    leaves, _ = make_inputs(sizes, S=5)
    o, _ = gated_delta_mixer(*leaves[:5], sizes, rule=plain_rule(sizes), norm=None)
    (d_proj,) = torch.autograd.grad(o.sum(), leaves[:1])
    assert (d_proj[..., sizes.layout.conv_width : sizes.layout.columns("beta").start] == 0).all()
    assert d_proj.isfinite().all()


def test_wrong_shapes_say_what_is_expected():
    sizes = HeadSizes(1, 2, 4, 6)
    (proj, *others), _ = make_inputs(sizes, S=5, B=2)
    with pytest.raises(ValueError, match=rf"\[S, B, {sizes.layout.width}\]"):
        mixed_by(None, [proj[..., 1:], *others], sizes)
    with pytest.raises(ValueError, match="batch of 1"):
        mixed_by(None, [proj, *others], sizes, documents_of([5]))
    with pytest.raises(ValueError, match="cover all of it"):
        mixed_by(None, [proj[:, :1], *others], sizes, documents_of([4]))
