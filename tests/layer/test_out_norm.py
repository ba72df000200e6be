"""The mixer computes a plain norm itself and calls every other; both keep the hooks'
contract."""

from types import MethodType

import pytest
import torch
import torch.distributed as dist
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from torch import nn

from megatron_gdn.compat.torch_norm import TorchRMSNorm
from megatron_gdn.mixers import hooks
from megatron_gdn.mixers.hooks import only_waits_for_parameters
from megatron_gdn.mixers.out_norm import (
    apply_gated_norm,
    gradients_summed,
    is_plain_norm,
)
from tests.distributed.layer_laws import NormInside, build_layer, randomise_, thd
from tests.distributed.mixers import BY_NAME, whole
from tests.parallel import assert_close, make_config

pytestmark = pytest.mark.usefixtures("one_rank")


def build(norm=TorchRMSNorm):
    return build_layer(make_config(), None, {}, out_norm=norm)


class DoubledOurs(TorchRMSNorm):
    def forward(self, x):
        return 2 * super().forward(x)


class DoubledTorchs(nn.RMSNorm):
    def __init__(self, config, hidden_size, eps):
        super().__init__(hidden_size, eps)

    def forward(self, x):
        return 2 * super().forward(x)


class DoubledInside(NormInside):
    def forward(self, x):
        return 2 * super().forward(x)


class Doubled(nn.Module):
    def forward(self, x):
        return 2 * x


def replace_forward(norm):
    plain = norm.forward
    norm.forward = MethodType(lambda self, x: 2 * plain(x), norm)


LATER = {
    "forward": replace_forward,
    "forward hook": lambda norm: norm.register_forward_hook(
        lambda module, args, out: 2 * out
    ),
    "parametrization": lambda norm: nn.utils.parametrize.register_parametrization(
        norm, "weight", Doubled()
    ),
}


@pytest.mark.parametrize("kind", BY_NAME)
def test_out_proj_gets_contiguous_rows_of_a_norm_that_gives_others(kind):
    """Transformer Engine's linears take views of their inputs."""
    layer = whole(kind)
    norm = getattr(layer, "norm", None) or layer.out_norm
    norm.register_forward_hook(lambda module, args, y: y.mT.contiguous().mT)
    seen = []
    layer.out_proj.register_forward_pre_hook(
        lambda module, args: seen.append(args[0].is_contiguous())
    )
    x = torch.randn(7, 2, layer.config.hidden_size)
    layer(x, packed_seq_params=None)
    layer(x[:, :1], packed_seq_params=thd((3, 4)))
    assert seen == [True, True]


@pytest.mark.parametrize("norm", [DoubledOurs, DoubledTorchs, DoubledInside])
def test_a_norm_that_is_not_plain_is_called(norm):
    doubled = build(norm)
    plain = build()
    x = torch.randn(7, 2, 24)
    doubled.load_state_dict(plain.state_dict(), strict=False)
    assert_close("output", doubled(x, None)[0], 2 * plain(x, None)[0], 1e-6)


def test_a_norm_without_an_eps_or_a_weight_of_one_head_is_called():
    """torch's class takes its eps from the dtype, and may have no weight or one of many
    dimensions."""
    assert is_plain_norm(nn.RMSNorm(12, 1e-6))
    assert not is_plain_norm(nn.RMSNorm(12))
    assert not is_plain_norm(nn.RMSNorm((3, 12), 1e-6))
    assert not is_plain_norm(nn.RMSNorm(12, 1e-6, elementwise_affine=False))


@pytest.mark.parametrize(
    "norm", [TorchRMSNorm, WrappedTorchNorm], ids=["ours", "torch's"]
)
@pytest.mark.parametrize("change", LATER)
def test_what_is_changed_after_the_layer_was_built_counts(norm, change):
    plain = build(norm)
    layer = build(norm)
    randomise_(plain)
    layer.load_state_dict(plain.state_dict())
    LATER[change](layer.out_norm)
    x = torch.randn(7, 2, 24)
    assert_close("output", layer(x, None)[0], 2 * plain(x, None)[0], 1e-6)


def test_a_class_whose_forward_was_replaced_is_called(monkeypatch):
    plain = build(WrappedTorchNorm)
    layer = build(WrappedTorchNorm)
    layer.load_state_dict(plain.state_dict())
    x = torch.randn(7, 2, 24)
    forward = nn.RMSNorm.forward
    expected = 2 * plain(x, None)[0]
    monkeypatch.setattr(nn.RMSNorm, "forward", lambda self, x: 2 * forward(self, x))
    assert_close("output", layer(x, None)[0], expected, 1e-6)


@pytest.mark.parametrize("why", ["one rank", "no gradient", "frozen"])
def test_a_norm_may_change_its_parameters_where_no_gradient_is_summed(why):
    """As torch's ``fully_shard`` of a norm alone does."""
    norm = TorchRMSNorm(make_config(), 8).requires_grad_(why != "frozen")
    new = nn.Parameter(torch.zeros(8))
    group = None if why == "one rank" else dist.group.WORLD
    with torch.set_grad_enabled(why != "no gradient"), gradients_summed(norm, group):
        norm.weight = new
    assert norm.weight is new


def test_hooks_get_what_the_norm_gets_and_its_gradient():
    layer = build()
    seen = []
    layer.out_norm.register_forward_pre_hook(
        lambda module, args: seen.append(args[0].shape)
    )
    layer.out_norm.register_full_backward_hook(
        lambda module, d_in, d_out: seen.append(len(d_in))
    )
    layer(torch.randn(7, 2, 24), None)[0].sum().backward()
    assert seen == [(2, 7, 8, 12), 1]


@pytest.mark.parametrize(
    "norm", [TorchRMSNorm, WrappedTorchNorm], ids=["ours", "torch's"]
)
def test_a_plain_norm_is_not_called(norm, monkeypatch):
    layer = build(norm)
    calls = []
    assert type(layer.out_norm) in (TorchRMSNorm, nn.RMSNorm)
    forward = nn.functional.rms_norm
    monkeypatch.setattr(
        nn.functional, "rms_norm", lambda *args: calls.append(args) or forward(*args)
    )
    x = torch.randn(7, 2, 24)
    expected, _ = layer(x, None)
    assert not calls
    waited = []
    waits = lambda *_: waited.append("for parameters")  # noqa: E731
    waits.__module__ = hooks._DDP_MODULE
    layer.out_norm.register_forward_pre_hook(waits)
    assert torch.equal(layer(x, None)[0], expected)
    assert not calls and len(waited) == 1
    layer.out_norm.register_forward_hook(lambda *_: None)
    layer(torch.randn(7, 2, 24), None)
    assert len(calls) == 1


def test_transformer_engines_norm_is_known_by_its_exact_class():
    """A stand-in of the same name: the package itself needs a GPU to be built."""

    def forward(self, x):
        return x

    def cls(name, base=nn.Module, module="transformer_engine.pytorch.module.rmsnorm"):
        own = type(forward)(forward.__code__, globals(), "forward")
        own.__module__ = module
        return type(name, (base,), {"__module__": module, "forward": own})

    theirs = cls("RMSNorm")

    def computed_by_kernels(norm_class):
        norm = norm_class()
        norm.weight = nn.Parameter(torch.ones(12))
        norm.eps = 1e-5
        return is_plain_norm(norm) and only_waits_for_parameters(norm)

    assert computed_by_kernels(theirs)
    assert not computed_by_kernels(cls("RMSNorm", theirs, "somebody.else"))
    assert not computed_by_kernels(cls("FusedResidualRMSNorm", theirs))
    assert not computed_by_kernels(cls("LayerNorm"))
    theirs.forward = lambda self, x: x
    assert not computed_by_kernels(theirs)


@pytest.mark.parametrize("keywords", [False, True])
def test_a_pre_hook_on_conv1d_sees_the_rows_that_the_convolution_reads(keywords):
    layer = build()
    seen = []
    rows = []
    layer.in_proj.register_forward_hook(lambda module, args, out: rows.append(out[0]))
    hook = lambda module, args, *kwargs: seen.append((args[0], *kwargs))  # noqa: E731
    layer.conv1d.register_forward_pre_hook(hook, with_kwargs=keywords)
    layer(torch.randn(7, 2, 24), None)
    given, *kwargs = seen[0]
    (proj,) = rows
    assert kwargs == ([{}] if keywords else [])
    assert torch.equal(given, proj.permute(1, 2, 0)[:, : layer.conv_dim])
    layer.conv1d(given)  # it is what the module takes


@pytest.mark.parametrize("keywords", [False, True])
def test_a_pre_hook_on_conv1d_may_return_what_it_was_given_and_nothing_else(keywords):
    layer = build()
    x = torch.randn(7, 2, 24)
    before = layer(x, None)[0]
    same = lambda module, args, *kwargs: (args, *kwargs) if kwargs else args  # noqa: E731
    layer.conv1d.register_forward_pre_hook(same, with_kwargs=keywords)
    assert torch.equal(layer(x, None)[0], before)
    changed = lambda module, args, *kwargs: (  # noqa: E731
        ((2 * args[0],), *kwargs) if kwargs else 2 * args[0]
    )
    layer.conv1d.register_forward_pre_hook(changed, with_kwargs=keywords)
    with pytest.raises(
        NotImplementedError, match="pre-hook of GatedDeltaNet's Conv1d.*in_proj"
    ):
        layer(x, None)


def test_hooks_on_conv1d_that_cannot_run_are_named_once(log):
    layer = build()
    layer.conv1d.register_forward_hook(lambda *_: None)
    for _ in range(2):
        layer(torch.randn(7, 2, 24), None)
    assert log.text.count("never calls it") == 1


def test_gate_and_product_of_a_module_are_rounded_once():
    x, gate = torch.randn(2, 50, 3, 12).bfloat16()
    got = apply_gated_norm(nn.Identity(), x, gate)
    exact = x.double() * nn.functional.silu(gate.double())
    # half a unit in the last place, and what fp32 may add
    assert ((got.double() - exact).abs() <= (2**-8 + 2**-20) * exact.abs()).all()
