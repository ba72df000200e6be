"""Plain linears are computed inside the mixer's function, with the bits of the modules; all others
are called."""

from types import MethodType

import pytest
import torch
from megatron.core import utils
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.transformer.spec_utils import build_module
from torch import nn

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
    """The output and every gradient; None for what needs none."""
    leaves = [x, *layer.parameters()]
    for leaf in leaves:
        leaf.grad = None
    out, bias = layer(x, None, packed_seq_params=packed)
    assert bias is None
    out.float().square().sum().backward()
    return [out, *(leaf.grad for leaf in leaves)]


FROZEN = {
    "nothing": (),
    "the input": ("x",),
    "in_proj": ("in_proj.weight",),
    "out_proj": ("out_proj.weight",),
    "both and the input": ("x", "in_proj.weight", "out_proj.weight"),
}


@pytest.mark.parametrize("frozen", FROZEN)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("lengths", [None, (3, 0, 20, 6)], ids=["batch", "packed"])
def test_the_bits_are_those_of_the_modules(lengths, dtype, frozen):
    config = make_config(params_dtype=dtype, bf16=dtype is torch.bfloat16)
    layer = build(config, A_init_range=(1, 16))
    packed = None if lengths is None else thd(lengths)
    x = torch.randn(29, 2 if lengths is None else 1, 24, dtype=dtype, requires_grad=True)
    named = {"x": x, **dict(layer.named_parameters())}
    for name in FROZEN[frozen]:
        named[name].requires_grad_(False)
    assert inside(layer, x)
    ours = all_that_comes_out(layer, x, packed)
    layer.in_proj.register_forward_hook(lambda *_: None)
    assert not inside(layer, x)
    for one, other in zip(ours, all_that_comes_out(layer, x, packed), strict=True):
        assert (one is None) == (other is None)
        assert one is None or torch.equal(one, other)


def test_no_more_is_saved_than_by_the_modules():
    layer = build()
    x = torch.randn(29, 2, 24, requires_grad=True)

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


def test_a_second_backward_gives_the_same_and_a_second_derivative_is_refused():
    layer = build()
    x = torch.randn(29, 2, 24, requires_grad=True)
    loss = layer(x, None)[0].square().sum()
    leaves = [x, *layer.parameters()]
    first = torch.autograd.grad(loss, leaves, retain_graph=True)
    for one, other in zip(first, torch.autograd.grad(loss, leaves), strict=True):
        assert torch.equal(one, other)
    (d_x,) = torch.autograd.grad(layer(x, None)[0].square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        d_x.sum().backward()


def doubled(forward):
    return lambda self, rows: (2 * forward(rows)[0], None)


def replace_forward(layer, _):
    layer.in_proj.forward = MethodType(doubled(layer.in_proj.forward), layer.in_proj)


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
    layer(x, None)
    linear, weight = layer.in_proj, layer.in_proj.weight
    expected_way = 2 * linear(x)[0]
    change(layer, monkeypatch)
    try:
        out, _ = layer(x, None)
    finally:
        nn.modules.module._global_forward_hooks.clear()
    monkeypatch.undo()
    twice = build()
    twice.load_state_dict(layer_state(layer, weight, linear))
    with torch.no_grad():
        twice.in_proj.weight.mul_(2)
    assert torch.equal(expected_way, twice.in_proj(x)[0])  # a power of two: exact
    assert torch.equal(out, twice(x, None)[0])


def layer_state(layer, weight, linear):
    """As before the change to in_proj."""
    kept = {k: v for k, v in layer.state_dict().items() if not k.startswith("in_proj")}
    return {**kept, "in_proj.weight": weight.detach()}


def set_on_config(name, value):
    return lambda layer: setattr(layer.in_proj.config, name, value)


def set_on(linear, name):
    return lambda layer: setattr(getattr(layer, linear), name, True)


class Group:
    def size(self):
        return 2


NOT_PLAIN = {
    "bias": lambda layer: layer.in_proj.register_parameter("bias", nn.Parameter(torch.zeros(3))),
    "main_grad": set_on("out_proj", "gradient_accumulation_fusion"),
    "sequence parallel": set_on("in_proj", "sequence_parallel"),
    "experts": set_on("in_proj", "explicit_expert_comm"),
    "two ranks": lambda layer: setattr(layer.out_proj, "tp_group", Group()),
    "gathered weights": lambda layer: setattr(layer.in_proj, "gtp_remat_size", 2),
    "offload": set_on_config("_cpu_offloading_context", object()),
    "deferred": set_on_config("defer_embedding_wgrad_compute", True),
    "another dtype": lambda layer: layer.out_proj.to(torch.bfloat16),
    "conv1d's hook": lambda layer: layer.conv1d.register_forward_pre_hook(lambda *_: None),
    "the norm's hook": lambda layer: layer.out_norm.register_forward_hook(lambda *_: None),
}


@pytest.mark.parametrize("reason", NOT_PLAIN)
def test_other_layers_call_their_linears(reason):
    layer, x = build(), torch.randn(9, 2, 24)
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
