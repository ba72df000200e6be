"""Plain linears are computed inside the mixer's function, with the bits of the modules; all others
are called."""

from types import MethodType

import pytest
import torch
from megatron.core import utils
from megatron.core.tensor_parallel import layers
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.transformer.spec_utils import build_module
from torch import nn
from torch.utils.checkpoint import checkpoint

from megatron_gdn.ops import hand_over
from megatron_gdn.specs import gated_delta_net_spec
from tests.distributed.layer_laws import randomise_, thd
from tests.parallel import make_config

pytestmark = pytest.mark.usefixtures("one_rank")


def build(config=None, **options):
    spec = gated_delta_net_spec("local", **options)
    layer = build_module(spec, config or make_config(), layer_number=1)
    randomise_(layer)
    return layer


def inside(layer, x) -> bool:
    return layer.mixer.around(layer, x) is not None


def all_that_comes_out(layer, x, packed):
    """The output and every gradient, of a dense one and of one repeated; None if none is needed."""
    leaves, found = [x, *layer.parameters()], []
    for d_out in (torch.randn(x.shape, generator=torch.Generator().manual_seed(3)), torch.ones(())):
        for leaf in leaves:
            leaf.grad = None
        out, bias = layer(x, None, packed_seq_params=packed)
        assert bias is None
        out.backward(d_out.to(out).expand(out.shape))
        found += [out, *(leaf.grad for leaf in leaves)]
    return found


FROZEN = {
    "nothing": (),
    "the input": ("x",),
    "in_proj": ("in_proj.weight",),
    "out_proj": ("out_proj.weight",),
    "both and the input": ("x", "in_proj.weight", "out_proj.weight"),
}


def freeze(layer, x, names):
    named = {"x": x, **dict(layer.named_parameters())}
    for name in names:
        named[name].requires_grad_(False)


# Strides of the input; a batch of one row that was [1, S, D] has some of no meaning.
INPUTS = {
    "packed": lambda dtype: torch.randn(29, 1, 24, dtype=dtype),
    "batch": lambda dtype: torch.randn(29, 2, 24, dtype=dtype),
    "transposed": lambda dtype: torch.randn(2, 29, 24, dtype=dtype).transpose(0, 1),
    "one row, transposed": lambda dtype: torch.randn(1, 29, 24, dtype=dtype).transpose(0, 1),
}


@pytest.mark.parametrize("frozen", FROZEN)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("kind", INPUTS)
def test_the_bits_are_those_of_the_modules(kind, dtype, frozen):
    layer = build(make_config(params_dtype=dtype, bf16=dtype is torch.bfloat16))
    packed = thd((3, 0, 20, 6)) if kind == "packed" else None
    x = INPUTS[kind](dtype).requires_grad_()
    freeze(layer, x, FROZEN[frozen])
    assert inside(layer, x)
    ours = all_that_comes_out(layer, x, packed)
    layer.in_proj.register_forward_hook(lambda *_: None)
    assert not inside(layer, x)
    for one, other in zip(ours, all_that_comes_out(layer, x, packed), strict=True):
        assert (one is None) == (other is None)
        assert one is None or torch.equal(one, other)


ALL_BUT_OUT_PROJ = (
    "x", "in_proj.weight", "conv1d.weight", "A_log", "dt_bias", "out_norm.weight",
)  # fmt: skip


@pytest.mark.parametrize("frozen", [*FROZEN.values(), ALL_BUT_OUT_PROJ], ids=str)
def test_no_more_is_saved_than_by_the_modules(frozen):
    layer = build()
    x = torch.randn(29, 2, 24, requires_grad=True)
    freeze(layer, x, frozen)

    def saved() -> int:
        memory = {}

        def pack(tensor):
            storage = tensor.untyped_storage()
            memory[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            layer(x, None)
        return sum(memory.values())

    assert inside(layer, x)
    ours = saved()
    layer.in_proj.register_forward_hook(lambda *_: None)
    assert ours <= saved()


def test_many_rows_take_the_modules_whose_gradients_do_not_wait_for_each_other(monkeypatch):
    layer = build()
    mixed = layer.out_proj.weight.shape[1] * 4  # bytes of a row
    monkeypatch.setattr(hand_over, "LEAST", 58 * mixed)
    assert inside(layer, torch.randn(57, 1, 24))
    assert not inside(layer, torch.randn(29, 2, 24))


def test_a_second_backward_gives_the_same_and_a_second_derivative_is_refused():
    layer = build()
    x = torch.randn(29, 2, 24, requires_grad=True)
    loss = layer(x, None)[0].square().sum()
    leaves = [x, *layer.parameters()]
    first = torch.autograd.grad(loss, leaves, retain_graph=True)
    for one, other in zip(first, torch.autograd.grad(loss, leaves), strict=True):
        assert torch.equal(one, other)
    with pytest.raises(NotImplementedError, match="create_graph"):
        torch.autograd.grad(layer(x, None)[0].square().sum(), x, create_graph=True)


def doubled(forward):
    return lambda self, rows: (2 * forward(rows)[0], None)


def replace_forward(layer, _):
    layer.in_proj.forward = MethodType(doubled(layer.in_proj.forward), layer.in_proj)


def replace_what_the_forward_calls(layer, _):
    product = layer.in_proj._forward_impl
    layer.in_proj._forward_impl = lambda *args, **kwargs: 2 * product(*args, **kwargs)


def replace_what_every_linear_calls(_, monkeypatch):
    name = "linear_with_grad_accumulation_and_async_allreduce"
    product = getattr(layers, name)

    def double_in_proj(input, weight, *args, **kwargs):
        factor = 2 if weight.shape[1] == 24 else 1
        return factor * product(input, weight, *args, **kwargs)

    double_in_proj.warned = True  # Megatron keeps it there whether it has warned
    monkeypatch.setattr(layers, name, double_in_proj)


def replace_forward_of_the_class(_, monkeypatch):
    forward = ColumnParallelLinear.forward
    monkeypatch.setattr(
        ColumnParallelLinear, "forward", lambda self, rows: (2 * forward(self, rows)[0], None)
    )


def hook(layer, _):
    layer.in_proj.register_forward_hook(lambda module, args, out: (2 * out[0], None))


def pre_hook(layer, _):
    layer.in_proj.register_forward_pre_hook(lambda module, args: (2 * args[0],))


def hook_of_all_modules(layer, _):
    def double(module, args, out):
        return (2 * out[0], None) if module is layer.in_proj else None

    nn.modules.module.register_module_forward_hook(double)


def another_module(layer, _):
    linear = layer.in_proj

    class Wrapped(nn.Module):
        def forward(self, rows):
            return 2 * linear(rows)[0], None

    layer.in_proj = Wrapped()


class Twice(nn.Module):
    def forward(self, weight):
        return 2 * weight


def parametrisation(layer, _):
    nn.utils.parametrize.register_parametrization(layer.in_proj, "weight", Twice())


DOUBLE_IN_PROJ = [
    replace_forward,
    replace_what_the_forward_calls,
    replace_what_every_linear_calls,
    replace_forward_of_the_class,
    hook,
    pre_hook,
    hook_of_all_modules,
    another_module,
    parametrisation,
]


@pytest.mark.parametrize("change", DOUBLE_IN_PROJ, ids=lambda change: change.__name__)
def test_what_is_changed_after_the_first_forward_counts(change, monkeypatch):
    layer, x = build(), torch.randn(9, 2, 24)
    assert inside(layer, x)
    layer(x, None)
    before = {name: value.detach().clone() for name, value in layer.named_parameters()}
    doubled_rows = 2 * layer.in_proj(x)[0]
    change(layer, monkeypatch)
    try:
        out, _ = layer(x, None)
    finally:
        nn.modules.module._global_forward_hooks.clear()
    monkeypatch.undo()
    twice = build()
    twice.load_state_dict(before, strict=False)  # without Megatron's empty extra states
    with torch.no_grad():
        twice.in_proj.weight.mul_(2)
    assert torch.equal(doubled_rows, twice.in_proj(x)[0])  # a power of two: exact
    assert torch.equal(out, twice(x, None)[0])


def set_on_config(name, value):
    return lambda layer: setattr(layer.in_proj.config, name, value)


def set_on(linear, name):
    return lambda layer: setattr(getattr(layer, linear), name, True)


class Group:
    def size(self):
        return 2


def another_group(layer):
    layer.out_proj = build().out_proj
    layer.out_proj.tp_group = Group()


def built_with(name):
    def change(layer):
        layer.in_proj = build().in_proj
        setattr(layer.in_proj, name, True)

    return change


NOT_PLAIN = {
    "bias": lambda layer: layer.in_proj.register_parameter("bias", nn.Parameter(torch.zeros(3))),
    "late bias": lambda layer: setattr(layer.out_proj, "bias", nn.Parameter(torch.zeros(3))),
    "main_grad": set_on("out_proj", "gradient_accumulation_fusion"),
    "sequence parallel": built_with("sequence_parallel"),
    "experts": built_with("explicit_expert_comm"),
    "two ranks": another_group,
    "offload": set_on_config("_cpu_offloading_context", object()),
    "another dtype": lambda layer: layer.out_proj.to(torch.bfloat16),
    "conv1d's hook": lambda layer: layer.conv1d.register_forward_pre_hook(lambda *_: None),
    "the norm's hook": lambda layer: layer.out_norm.register_forward_hook(lambda *_: None),
}


@pytest.mark.parametrize("reason", NOT_PLAIN)
def test_other_layers_call_their_linears(reason):
    layer, x = build(), torch.randn(9, 2, 24)
    assert inside(layer, x)
    NOT_PLAIN[reason](layer)
    assert not inside(layer, x)


def test_so_do_layers_that_recompute_the_norm_under_autocast_without_tokens_and_in_a_profile(
    monkeypatch,
):
    layer, x = build(), torch.randn(9, 2, 24)
    assert inside(layer, x)
    assert not inside(layer, x[:0])
    with torch.autocast("cpu", torch.bfloat16):
        assert not inside(layer, x)
    monkeypatch.setattr(utils, "_nvtx_enabled", True)
    assert not inside(layer, x)
    monkeypatch.undo()
    assert not inside(build(recompute_norm_out=True), x)


def test_weights_of_other_heads_are_refused_as_with_the_modules():
    x = torch.randn(9, 2, 24)
    narrow, wide, strided = build(), build(), build()
    narrow.in_proj.weight = nn.Parameter(narrow.in_proj.weight[:-1].clone())
    with pytest.raises(ValueError, match=r"the weight of in_proj must be \[272, D\]"):
        narrow(x, None)
    weight = wide.conv1d.weight
    wide.conv1d.weight = nn.Parameter(torch.cat([weight, weight]))
    strides = strided.conv1d.weight.permute(2, 1, 0).contiguous().permute(2, 1, 0)
    strided.conv1d.weight = nn.Parameter(strides)
    for layer in (wide, strided):
        assert inside(layer, x)
        with pytest.raises(ValueError, match="conv_weight must be contiguous"):
            layer(x, None)


def test_autocast_that_is_entered_for_the_backward_changes_nothing():
    layer = build()
    x = torch.randn(9, 2, 24, requires_grad=True)
    leaves = [x, *layer.parameters()]
    expected = torch.autograd.grad(layer(x, None)[0].sum(), leaves)
    out = layer(x, None)[0].sum()
    with torch.autocast("cpu", torch.bfloat16):
        found = torch.autograd.grad(out, leaves)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_around_the_layer_changes_no_bit(reentrant):
    layer = build()
    x = torch.randn(9, 2, 24, requires_grad=True)
    leaves = [x, *layer.parameters()]

    def gradients(run):
        for leaf in leaves:
            leaf.grad = None
        run(x).square().sum().backward()
        return [leaf.grad for leaf in leaves]

    expected = gradients(lambda x: layer(x, None)[0])
    again = gradients(lambda x: checkpoint(lambda x: layer(x, None)[0], x, use_reentrant=reentrant))
    assert all(torch.equal(a, b) for a, b in zip(again, expected, strict=True))
