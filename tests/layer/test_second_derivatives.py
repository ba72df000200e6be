"""``create_graph=True`` is refused by every backward that autograd cannot
differentiate: its gradients would be constants in silence. The other backwards are
differentiated right."""

import importlib
import pkgutil

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import megatron_gdn
from megatron_gdn import ops
from megatron_gdn.gdn import api
from megatron_gdn.mixers.out_norm import with_summed_gradient
from megatron_gdn.ops.autograd import output_without_tokens
from megatron_gdn.ops.conv import causal_conv1d
from megatron_gdn.ops.delta_rule.plain import PlainRule
from megatron_gdn.ops.readout.base import grouped_rms_norm
from tests.distributed.layer_laws import by_megatron, checkpointed, reentrant
from tests.distributed.mixers import whole

pytestmark = pytest.mark.usefixtures("one_rank")

# Their backwards are made of differentiable operations. The law of each:
EXCHANGES = "tests/distributed/test_exchange.py"
DIFFERENTIABLE = {
    "_ExchangeFunction": EXCHANGES,
    "_StoreGradient": "hands the gradient on to a backward that refuses it",
}


def heads(*shape):
    return torch.randn(1, 13, *shape)


def rule_inputs():
    q = F.normalize(heads(2, 8), dim=-1)
    k = F.normalize(heads(2, 8), dim=-1)
    v = heads(4, 6)
    return q, k, v, -heads(4).square(), heads(4).sigmoid()


def operation(name):
    """What is differentiated: a function, and its input."""
    rows = torch.randn(13, 1, 24)
    match name:
        case "fused layer" | "layer of modules":
            layer = whole(
                "gdn", recompute="light" if name == "layer of modules" else "none"
            )
            return lambda x: layer(x, None)[0], rows
        case "Mamba2":
            mixer = whole("mamba2")
            return lambda x: mixer(x)[0], torch.randn(13, 1, mixer.config.hidden_size)
        case "causal_conv1d":
            weight = torch.randn(6, 4)
            return lambda x: causal_conv1d(x, weight)[0], heads(6)
        case "grouped_rms_norm":
            return lambda x: grouped_rms_norm(x, torch.ones(6), 2, 1e-5), heads(6)
        case "delta rule by name":
            q, *rest = rule_inputs()
            return lambda x: ops.gated_delta_rule(x, *rest, backend="reference")[0], q
        case "delta rule of a layer":
            q, *rest = rule_inputs()
            return lambda x: api.run_rule(PlainRule(), api.RuleInputs(x, *rest), None)[
                0
            ], q
        case "sum over ranks":
            return lambda x: 3 * with_summed_gradient(x, dist.group.WORLD), torch.randn(
                5
            )
        case "no tokens":
            return lambda x: output_without_tokens(x, width=4), torch.randn(0, 1, 8)
    raise AssertionError(name)


OPERATIONS = [
    "fused layer",
    "layer of modules",
    "Mamba2",
    "causal_conv1d",
    "grouped_rms_norm",
    "delta rule by name",
    "delta rule of a layer",
    "sum over ranks",
    "no tokens",
]


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_gradient_that_is_to_be_differentiated_is_refused(name):
    """The scalar is linear in the output, so no gradient that arrives needs a
    gradient."""
    function, x = operation(name)
    x.requires_grad_()
    (first,) = torch.autograd.grad(function(x).sum(), x, materialize_grads=True)
    assert first.shape == x.shape
    with pytest.raises(NotImplementedError, match="create_graph"):
        torch.autograd.grad(function(x).sum(), x, create_graph=True)


def test_every_other_backward_of_the_package_refuses():
    for module in pkgutil.walk_packages(megatron_gdn.__path__, "megatron_gdn."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    functions = [
        function
        for function in torch.autograd.Function.__subclasses__()
        if function.__module__.startswith("megatron_gdn.")
    ]
    assert {function.__name__ for function in functions} > set(DIFFERENTIABLE)
    for function in functions:
        if function.__name__ not in DIFFERENTIABLE:
            with (
                torch.enable_grad(),
                pytest.raises(NotImplementedError, match="create_graph"),
            ):
                function.backward(None)


def plain(function, x):
    return function(x)


def compiled(function, x):
    torch._dynamo.reset()
    return torch.compile(function, backend="aot_eager")(x)


AROUND = [plain, checkpointed, reentrant, by_megatron, compiled]


@pytest.mark.each_value
@pytest.mark.parametrize("name", [name for name in OPERATIONS if name != "no tokens"])
@pytest.mark.parametrize("around", AROUND)
def test_a_first_gradient_is_none_of_that(name, around):
    """Whatever runs the backward, and whether gradients are enabled around it."""
    function, x = operation(name)
    expected = x.clone().requires_grad_()
    x_in = x.clone().requires_grad_()
    function(expected).sum().backward()
    out = around(function, x_in)
    with torch.enable_grad():
        out.sum().backward()
    torch.testing.assert_close(x_in.grad, expected.grad)


@pytest.mark.parametrize("around", [reentrant, by_megatron])
def test_a_checkpoint_that_cannot_be_differentiated_twice_says_so_itself(around):
    """torch's and Megatron's reentrant checkpoints take ``backward()`` alone."""
    function, x = operation("fused layer")
    with pytest.raises(RuntimeError):
        torch.autograd.grad(
            around(function, x.requires_grad_()).sum(), x, create_graph=True
        )


def test_a_gradient_inside_a_backward_is_a_first_gradient():
    """A function that computes its forward again, as checkpoints do, with gradients
    enabled."""
    layer = whole("gdn")
    x = torch.randn(13, 1, 24, requires_grad=True)

    class Again(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            with torch.no_grad():
                return layer(x, None)[0]

        @staticmethod
        def backward(ctx, gradient):
            (x,) = ctx.saved_tensors
            with torch.enable_grad():
                x = x.detach().requires_grad_()
                return torch.autograd.grad(layer(x, None)[0], x, gradient)[0]

    Again.apply(x).square().sum().backward()
    expected = x.detach().requires_grad_()
    layer(expected, None)[0].square().sum().backward()
    torch.testing.assert_close(x.grad, expected.grad)


def test_moved_rows_are_differentiated_twice():
    x = torch.randn(3, 2, 4, dtype=torch.float64, requires_grad=True)
    mask = torch.tensor([[1, 1, 0], [1, 2, 2]])
    assert torch.autograd.gradgradcheck(
        lambda x: megatron_gdn.pack_rows(x, mask)[0].pow(3), x
    )
