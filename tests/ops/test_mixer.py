"""The mixer as one autograd function against the plain composition of its parts, in fp64 on CPU."""

from types import SimpleNamespace

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from megatron_gdn.gdn.api import recurrent_gated_delta_rule
from megatron_gdn.gdn.rule import resolve_rule
from megatron_gdn.ops import recompute as hand_over
from megatron_gdn.ops.conv import causal_conv1d
from megatron_gdn.ops.delta_rule.base import HeadSizes
from megatron_gdn.ops.documents import Documents
from megatron_gdn.ops.elementwise import decay_and_write_gates, l2norm, rms_norm_gated
from megatron_gdn.ops.parts import GatedNorm
from megatron_gdn.ops.recompute import RefilledOutput
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
        torch.randn(S, B, sizes.width, **wide),
        torch.randn(sizes.conv_width, 1, 4, **wide) * 0.5,
        torch.randn(sizes.conv_width, **wide) if bias else None,
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
    assert (d_proj[..., sizes.conv_width : sizes.beta_column] == 0).all()
    assert d_proj.isfinite().all()


def test_recomputing_keeps_every_bit_and_saves_k_and_v_too():
    sizes = HeadSizes(1, 2, 16, 16)
    leaves, _ = make_inputs(sizes, S=64)
    usual, again = (mixed_by(None, leaves, sizes, recompute_qkv=x) for x in (False, True))
    assert torch.equal(usual, again)
    assert_equal(gradients(usual, leaves), gradients(again, leaves))
    saved, saved_less = (
        saved_bytes(lambda x=x: mixed_by(None, leaves, sizes, recompute_qkv=x))
        for x in (False, True)
    )
    key, value = sizes.layout.widths[1:3]
    assert saved - saved_less == 64 * (key + value) * 8  # of 64 tokens in fp64; q never is saved


@pytest.mark.parametrize("least", [0, None], ids=["handed over", "kept"])
def test_a_dropped_output_is_filled_again_for_the_reader_of_it(monkeypatch, least):
    if least is not None:
        monkeypatch.setattr(hand_over, "LEAST", least)
    sizes = HeadSizes(1, 2, 4, 6)
    weight = torch.randn(12, 12, dtype=torch.float64, requires_grad=True)

    def run(refilled):
        leaves, _ = make_inputs(sizes, S=9, B=2)
        mixed = mixed_by(None, leaves, sizes, refilled=refilled)
        out = mixed @ weight
        storage = mixed.untyped_storage()
        if refilled is not None:
            refilled.drop_until_backward_of(out)
            assert storage.nbytes() == 0
        grads = gradients(out.sin(), [weight, *leaves])
        assert storage.nbytes() > 0
        return grads

    assert_equal(run(None), run(RefilledOutput()))


class _LateCopies:
    """An asynchronous offload: what autograd saves is copied some time after it was handed over."""

    def __init__(self) -> None:
        self.boxes = []

    def pack(self, x):
        self.boxes.append([x, None])
        return self.boxes[-1]

    def transfer(self) -> None:
        for box in self.boxes:
            box[1] = box[0].detach().clone()
            box[0] = None

    @staticmethod
    def unpack(box):
        return box[1]


@pytest.mark.parametrize("keeper", ["checkpoint", "offload"])
def test_an_output_that_others_keep_is_not_dropped(keeper):
    sizes = HeadSizes(1, 2, 4, 6)
    weight = torch.randn(12, 12, dtype=torch.float64, requires_grad=True)

    def block(refill, *leaves):
        refilled = RefilledOutput() if refill else None
        mixed = mixed_by(None, leaves, sizes, refilled=refilled)
        out, storage = mixed @ weight, mixed.untyped_storage()
        if refilled is not None:
            refilled.drop_until_backward_of(out)
            assert storage.nbytes() > 0
        return out.sin()

    def run(refill, kept_by):
        leaves, _ = make_inputs(sizes, S=9, B=2)
        if kept_by == "checkpoint":
            out = checkpoint(block, refill, *leaves, use_reentrant=False)
        elif kept_by == "offload":
            late = _LateCopies()
            with saved_tensors_hooks(late.pack, late.unpack):
                out = block(refill, *leaves)
            late.transfer()
        else:
            out = block(refill, *leaves)
        return gradients(out, [weight, *leaves])

    assert_equal(run(False, None), run(True, keeper))


@pytest.mark.parametrize("with_norm", [True, False], ids=["norm", "no norm"])
@pytest.mark.parametrize(("S", "B", "packed"), [(0, 2, False), (5, 0, False), (0, 1, True)])
def test_no_tokens_are_nobodys_work_and_every_gradient_is_zero(S, B, packed, with_norm):
    sizes = HeadSizes(2, 4, 6, 5)
    leaves, _ = make_inputs(sizes, S=S, B=B, bias=True, lengths=(0, 0) if packed else None)
    *tensors, gamma = leaves
    rule = SimpleNamespace(operand_dtype=None, batch_invariant=False)  # and nothing that runs
    out = gated_delta_mixer(
        *tensors, sizes, rule=rule, norm=GatedNorm(gamma) if with_norm else None,
        documents=Documents.from_cu_seqlens([0, 0, 0], 0) if packed else None,
    )  # fmt: skip
    if with_norm:
        assert out.shape == (S, B, 20)
    else:
        assert [x.shape for x in out] == [(B, S, 4, 5)] * 2
        out, leaves = out[0] * out[1], tensors
    assert out.dtype == torch.float64
    grads = torch.autograd.grad(out.sum(), leaves)
    for leaf, grad in zip(leaves, grads, strict=True):
        assert grad.shape == leaf.shape and grad.dtype == leaf.dtype and (grad == 0).all()


def test_without_grad_nothing_is_kept():
    sizes = HeadSizes(1, 1, 4, 4)
    leaves, _ = make_inputs(sizes, S=5)
    with torch.no_grad():
        assert mixed_by(None, leaves, sizes).grad_fn is None


def test_wrong_shapes_say_what_is_expected():
    sizes = HeadSizes(1, 2, 4, 6)
    (proj, *others), _ = make_inputs(sizes, S=5, B=2)
    with pytest.raises(ValueError, match=rf"\[S, B, {sizes.width}\]"):
        mixed_by(None, [proj[..., 1:], *others], sizes)
    with pytest.raises(ValueError, match="batch of 1"):
        mixed_by(None, [proj, *others], sizes, documents_of([5]))
    with pytest.raises(ValueError, match="cover all of it"):
        mixed_by(None, [proj[:, :1], *others], sizes, documents_of([4]))
