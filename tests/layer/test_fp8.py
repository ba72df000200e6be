"""What a layer in FP8 refuses, and what it computes again."""

import copy
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from megatron.core.enums import Fp8Recipe
from megatron.core.quantization.utils import get_quant_config_or_none
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
)
from megatron.core.transformer.spec_utils import ModuleSpec, build_module

from megatron_gdn.compat.torch_linear import DuplicatedLinear
from megatron_gdn.inference.generate import evaluating
from megatron_gdn.mixers.fp8 import (
    GatesOutsideFP8,
    OutsideFP8,
    SectionOutsideFP8,
    keep_unquantised_input,
)
from megatron_gdn.ops.layout import SizeError
from megatron_gdn.specs import gated_delta_net_spec, kimi_delta_attention_spec
from tests.distributed.layer_laws import forward_backward
from tests.fp8_twin import (
    Fp8Column,
    Fp8Duplicated,
    Fp8NormedColumn,
    fp8_on,
    recipe,
    rounded,
)
from tests.parallel import assert_close, make_config

pytestmark = pytest.mark.usefixtures("one_rank")


NAME = "decoder.layers.0.self_attention"


class Row(RowParallelLinear):
    """With the attributes of ``TERowParallelLinear``."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.fp8_meta = {}
        self.save_original_input = False

    def will_execute_quantized(self, is_context_quantized):
        return is_context_quantized


def layer_of(
    recipe="tensorwise", settings=(), name=None, kda=False, in_proj=Fp8Column, **options
):
    config = make_config(fp8="hybrid", fp8_recipe=Fp8Recipe[recipe])
    vars(config).update(settings)
    spec = (kimi_delta_attention_spec if kda else gated_delta_net_spec)(
        "local", **options
    )
    for place, linear in vars(spec.submodules).items():
        if linear is ColumnParallelLinear:
            setattr(spec.submodules, place, in_proj)
        if linear is DuplicatedLinear:
            setattr(spec.submodules, place, Fp8Duplicated)
    spec.submodules.out_proj = Row
    return build_module(spec, config, layer_number=1, name=name)


class RememberingColumn(Fp8Column):
    """Knows the class of which its constructor was called."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.built_as = type(self)


def test_in_proj_keeps_the_class_that_it_was_built_with():
    linear = layer_of(in_proj=RememberingColumn).in_proj
    assert isinstance(linear, GatesOutsideFP8)
    assert type(linear) is linear.built_as


def test_in_proj_keeps_the_arguments_of_its_spec():
    spec = ModuleSpec(module=RememberingColumn, params={"stride": 2})
    linear = layer_of(in_proj=spec).in_proj
    assert isinstance(linear, GatesOutsideFP8)
    assert linear.weight.partition_stride == 2


def test_linears_without_fp8_drop_the_input_that_is_computed_again():
    config = make_config(fp8="hybrid", fp8_recipe=Fp8Recipe.delayed)
    spec = gated_delta_net_spec("local", recompute="light")
    assert build_module(spec, config, layer_number=1).recompute_norm_out


@pytest.mark.parametrize("kda", [False, True], ids=["gdn", "kda"])
@pytest.mark.parametrize("why", ["no gradient", "frozen"])
def test_weights_without_gradients_need_no_buffer_for_them(kda, why):
    layer = layer_of(kda=kda)
    x = torch.randn(16, 1, 24)
    with fp8_on():
        expected, _ = layer(x)
        layer.in_proj.fuse_wgrad_accumulation = True
        layer.requires_grad_(why != "frozen")
        with torch.set_grad_enabled(why == "frozen"):
            assert torch.equal(layer(x)[0], expected)


@pytest.mark.parametrize("kda", [False, True], ids=["gdn", "kda"])
@pytest.mark.parametrize(
    ("scaling", "drops"), [("tensorwise", True), ("delayed", False)]
)
def test_out_proj_keeps_the_input_that_is_computed_again(scaling, drops, kda):
    """Else it would keep an FP8 copy, and nobody would read what was computed again."""
    layer = layer_of(scaling, (), NAME, kda, recompute="light")
    assert layer.recompute_norm_out == layer.out_proj.save_original_input == drops
    assert kda or not layer_of(scaling).out_proj.save_original_input


def test_out_proj_of_an_older_transformer_engine_is_not_computed_again():
    linear = SimpleNamespace(fp8_meta={})
    config = make_config(fp8="hybrid", fp8_recipe=Fp8Recipe.tensorwise)
    assert not keep_unquantised_input(linear, config)
    assert vars(linear) == {"fp8_meta": {}}


def test_megatron_fsdp_is_refused_before_it_loses_a_gradient():
    layer = layer_of()
    layer.in_proj.weight.__fsdp_param__ = True
    with (
        fp8_on(),
        pytest.raises(NotImplementedError, match="FP8 under Megatron-FSDP: .* or keep"),
    ):
        layer(torch.randn(16, 1, 24))


@pytest.mark.parametrize("kind", [Fp8Column, Fp8NormedColumn])
def test_the_gates_share_is_added_to_the_gradient_that_in_proj_gives(kind, monkeypatch):
    """Autograd's sum of two gradients would make a third one of all rows."""
    linear = layer_of(in_proj=kind).in_proj
    read = []
    forward = kind.forward

    def watched(self, x, *args, **options):
        read.append(x)
        return forward(self, x, *args, **options)

    monkeypatch.setattr(kind, "forward", watched)
    x = torch.randn(16, 1, 24, requires_grad=True)
    with fp8_on():
        out = linear(x)[0]
    (given,) = read
    assert given is not x and given.data_ptr() == x.data_ptr()
    gradients = []
    given.register_hook(lambda gradient: gradients.append(gradient.data_ptr()))
    (d_x,) = torch.autograd.grad(out.sum(), x)
    assert gradients == [d_x.data_ptr()]


def test_a_copied_layer_computes_the_same():
    layer = layer_of()
    x = torch.randn(16, 1, 24)
    with fp8_on():
        assert torch.equal(copy.deepcopy(layer)(x)[0], layer(x)[0])


# Megatron's checkpoint runs a layer again outside of its FP8 context.
IN_A_CHECKPOINT = {"recompute_granularity": "selective", "recompute_modules": ["gdn"]}


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"delay_wgrad_compute": True}, "delay_wgrad_compute with FP8: .* Switch one"),
        (IN_A_CHECKPOINT, "gdn with fp8: .* Take 'gdn' out"),
        ({"fp8": None, "fp4": "e2m1"}, "fp4='e2m1': the gates of GatedDeltaNet"),
    ],
)
def test_what_fp8_cannot_run_with_is_refused(settings, said):
    with pytest.raises(NotImplementedError, match=said):
        layer_of(settings=settings)


def test_generation_is_outside_of_fp8_and_training_in_it_again():
    layer = layer_of(
        settings={"quant_recipe": recipe("*.in_proj", **FP8_TOO)}, name=NAME
    )
    modules = [
        module for module in layer.modules() if getattr(module, "te_quant_params", None)
    ]
    assert modules
    given = [module.te_quant_params for module in modules]
    with evaluating(layer):
        assert layer.config.fp8 is None
        assert not any(module.te_quant_params for module in modules)
    assert layer.config.fp8 == "hybrid" and layer.training
    assert [module.te_quant_params for module in modules] == given


def test_linears_of_gates_compute_in_the_dtype_of_their_weights():
    layer = layer_of(kda=True, forget_rank=16, output_rank=16)
    outside = {
        name: linear
        for name, linear in layer.named_children()
        if isinstance(linear, OutsideFP8)
    }
    assert outside.keys() == {"f_a_proj", "f_b_proj", "beta_proj"}
    for linear in outside.values():
        x = torch.randn(16, 1, linear.weight.shape[1])
        with fp8_on():
            assert torch.equal(linear(x)[0], x @ linear.weight.t())


def test_tokens_that_were_padded_for_fp8_leave_no_gates_behind():
    """Megatron's padding for inference crops the first tensor of a linear alone."""
    layer = layer_of()
    x = torch.randn(12, 2, 24)
    with fp8_on():
        expected, _ = layer(x)
        rows, gates = layer.in_proj(x, together=False)
        longer = torch.cat([gates, torch.ones(4, *gates.shape[1:])])
        layer.in_proj.forward = lambda *_, **__: (rows, longer)
        assert torch.equal(layer(x)[0], expected)


# By Megatron's quantization recipe, of linears by their names
FP8_TOO = {
    "fp8_quantization_recipe": Fp8Recipe.tensorwise,
    "override_nonquantized_autocast": True,
}


def rows_of(layer):
    """Of the whole in_proj: as it is, and in the weights' dtype."""
    x = torch.randn(16, 1, 24)
    return layer.in_proj(x)[0], x @ layer.in_proj.weight.t(), x


def test_a_recipe_that_keeps_in_proj_out_of_fp8_is_followed():
    """Also by 1 / 4 of the heads, whose columns FP8 refuses."""
    sizes = {"linear_num_key_heads": 1, "linear_num_value_heads": 2}
    settings = {"quant_recipe": recipe("*.in_proj"), **sizes}
    layer = layer_of(settings=settings, name=NAME)
    with fp8_on():
        found, exact, _ = rows_of(layer)
    assert torch.equal(found, exact)


@pytest.mark.parametrize("name", [NAME, None], ids=["when it is built", "afterwards"])
def test_gates_stay_apart_where_only_a_recipe_switches_fp8_on(name):
    """GPTModel builds layers without names, and names their linears when they are
    there."""
    settings = {"fp8": None, "quant_recipe": recipe("*.in_proj", **FP8_TOO)}
    layer = layer_of(settings=settings, name=name)
    if name is None:
        found, exact, _ = rows_of(layer)
        assert torch.equal(found, exact)
        config = get_quant_config_or_none("decoder.in_proj", layer.config.quant_recipe)
        layer.in_proj.finish_init(config)
    found, exact, x = rows_of(layer)
    first = layer.dims.layout.main_width
    assert_close("gates", found[..., first:], exact[..., first:], 1e-5)  # 0.03 in FP8
    fp8 = rounded(x) @ rounded(layer.in_proj.weight[:first].detach()).t()
    assert torch.equal(found[..., :first], fp8)


def test_out_proj_keeps_its_input_where_a_recipe_quantises_it():
    """Whatever recipe the config names for FP8 that is off."""
    settings = {"fp8": None, "quant_recipe": recipe("*.out_proj", **FP8_TOO)}
    for named in ("tensorwise", "delayed"):
        layer = layer_of(named, settings=settings, recompute="light")
        assert layer.out_proj.save_original_input


FP4 = {"fp4_quantization_recipe": "nvfp4"}


@pytest.mark.parametrize("when", ["training_recipe", "evaluation_recipe"])
@pytest.mark.parametrize("named", ["when it is built", "afterwards"])
def test_fp4_of_in_proj_by_a_recipe_is_refused(when, named):
    given = recipe("*.in_proj", when, **FP4)
    name = NAME if named == "when it is built" else None
    with pytest.raises(NotImplementedError, match="computes in_proj in FP4"):
        layer = layer_of(settings={"fp8": None, "quant_recipe": given}, name=name)
        layer.in_proj.finish_init(get_quant_config_or_none(f"{NAME}.in_proj", given))


def test_late_weight_gradients_are_refused_where_a_recipe_quantises_in_proj():
    late = {"fp8": None, "delay_wgrad_compute": True}
    with pytest.raises(NotImplementedError, match="delay_wgrad_compute with FP8"):
        layer_of(
            settings={**late, "quant_recipe": recipe("*.in_proj", **FP8_TOO)}, name=NAME
        )
    layer_of(
        settings={**late, "quant_recipe": recipe("*.linear_fc1", **FP8_TOO)}, name=NAME
    )


@pytest.mark.parametrize("linear", ["in_proj", "out_proj"])
def test_a_weight_that_a_recipe_stores_in_fp8_is_refused(monkeypatch, linear):
    shape = getattr(layer_of(), linear).weight.shape
    monkeypatch.setattr(
        "megatron_gdn.mixers.fp8.stored_quantised", lambda w: w.shape == shape
    )
    with pytest.raises(
        NotImplementedError, match="fp8_param: true.* Set fp8_param to false"
    ):
        layer_of(
            settings={"fp8": None, "quant_recipe": recipe("*", **FP8_TOO)}, name=NAME
        )


class Adapted(torch.nn.Module):
    """As Bridge's adapters: the linear is a child."""

    def __init__(self, linear):
        super().__init__()
        self.to_wrap = linear

    def forward(self, x):
        return self.to_wrap(x)


RANKS = {
    "low ranks": {"forget_rank": 4, "output_rank": 16},
    "full forget gate": {"output_rank": 32},
    "full output gate": {"forget_rank": 3},
}
# Sums of 24 products in fp32, in another order on each path.
FP32 = 1e-5


@pytest.mark.parametrize("ranks", RANKS)
def test_kimi_delta_attention_has_forget_gate_and_strength_in_the_weights_dtype(ranks):
    """Query, key, value and output gate are FP8 products; gradients of the others do
    not pass FP8."""
    layer = layer_of(kda=True, **RANKS[ranks])
    layout = layer.dims.layout
    x = torch.randn(16, 2, 24)
    found = {}
    for fp8 in (False, True):
        leaf = x.clone().requires_grad_()
        layer.zero_grad()
        with fp8_on() if fp8 else nullcontext():
            rows = layer.project(leaf)
            exact = [rows[..., layout.columns(name)] for name in ("g", "beta")]
            sum(columns.square().sum() for columns in exact).backward()
        grads = {n: p.grad for n, p in layer.named_parameters() if n.startswith("f_")}
        found[fp8] = rows.detach(), leaf.grad, grads
    rows, d_x, grads = found[True]
    exact_rows, exact_d_x, exact_grads = found[False]
    for name in layout.names:
        same = torch.equal(
            rows[..., layout.columns(name)], exact_rows[..., layout.columns(name)]
        )
        assert same is (name in ("g", "beta")), name
    assert_close("input", d_x, exact_d_x, FP32)
    assert grads
    for name, gradient in grads.items():
        assert torch.equal(gradient, exact_grads[name]), name
    weight = layer.in_proj.weight.detach()
    fp8 = rounded(x) @ rounded(weight).t()
    assert_close("q, k, v", rows[..., : len(weight)], fp8, FP32)


def test_a_recipe_does_not_bring_a_forget_gate_into_fp8():
    settings = {"fp8": None, "quant_recipe": recipe("*", **FP8_TOO)}
    layer = layer_of(settings=settings, name=NAME, kda=True, forget_rank=4)
    for name, linear in layer._projections().items():
        kept_out = name.startswith(("f_", "beta"))
        assert linear.will_execute_quantized(True) is not kept_out, name


@pytest.mark.parametrize(
    ("options", "settings", "said"),
    [
        (
            {},
            {"linear_num_key_heads": 1, "linear_num_value_heads": 1},
            "query, key and value of in_proj has .* columns",
        ),
        ({"output_rank": 12}, {}, r"g_a_proj \(output_rank\) has 12 columns"),
    ],
)
def test_what_fp8_of_kimi_delta_attention_needs_is_said(options, settings, said):
    with pytest.raises((NotImplementedError, SizeError), match=said):
        layer_of(kda=True, settings=settings, **options)


def test_mxfp8_is_refused_where_the_gpu_has_none(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (10, 0))
    layer_of("mxfp8")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    with pytest.raises(NotImplementedError, match="MXFP8 needs .* this GPU has 9.0"):
        layer_of("mxfp8")


def full_gates(x, layer, rounds):
    """The rows of in_proj with full gates, as products of the given precision."""
    layout = layer.dims.in_proj_layout
    weight = layer.in_proj.weight.detach()
    g = layout.columns("g")
    before, section, after = weight.tensor_split((g.start, g.stop))
    fp8 = [rounds(x) @ rounds(rows).t() for rows in (before, after)]
    return fp8[0], x @ section.t(), fp8[1]


@pytest.mark.parametrize("scaling", ["tensorwise", "delayed", "blockwise"])
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
def test_full_gates_are_three_products_of_rows_of_one_weight(scaling, bias):
    layer = layer_of(scaling, kda=True, bias=bias)
    assert isinstance(layer.in_proj, SectionOutsideFP8)
    assert [name for name, _ in layer.in_proj.named_parameters()] == [
        "weight",
        *(["bias"] if bias else []),
    ]
    x = torch.randn(16, 2, 24)
    expected = torch.cat(full_gates(x, layer, rounded), -1)
    if bias:
        torch.nn.init.normal_(layer.in_proj.bias)
        expected = expected + layer.in_proj.bias.detach()
    exact, _ = layer.in_proj(x)
    with fp8_on():
        for in_proj in (layer.in_proj, Adapted(layer.in_proj)):
            rows, _ = in_proj(x)
            assert_close("rows", rows, expected, FP32)
    assert (rows - exact).abs().max() > 100 * FP32


def test_gradients_of_a_full_forget_gate_do_not_pass_fp8():
    layer = layer_of(kda=True)
    columns = layer.dims.in_proj_layout.columns("g")
    x = torch.randn(16, 2, 24, requires_grad=True)
    with fp8_on():
        rows, _ = layer.in_proj(x)
    d_g = torch.randn_like(rows[..., columns])
    rows[..., columns].backward(d_g)
    weight = layer.in_proj.weight
    exact = d_g.flatten(0, 1).t() @ x.detach().flatten(0, 1)
    assert_close("weight", weight.grad[columns], exact, FP32)
    assert not weight.grad[: columns.start].any()
    assert not weight.grad[columns.stop :].any()
    assert_close("x", x.grad, d_g @ weight.detach()[columns], FP32)


class CachingColumn(Fp8Column):
    """Keeps the weight in FP8 between micro-batches, as Transformer Engine's linears
    do, and says which calls were in FP8."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self._fp8_workspaces = {}
        self.is_first_microbatch = True
        self.calls = []
        self.rounded_weights = 0

    def forward(self, x, *args, **options):
        is_first = self.is_first_microbatch
        self.is_first_microbatch = False
        fp8 = self.will_execute_quantized(False)
        self.calls.append((fp8, is_first))
        if not fp8:
            return super().forward(x, *args, **options)
        if is_first or "weight" not in self._fp8_workspaces:
            self._fp8_workspaces["weight"] = rounded(self.weight.detach())
            self.rounded_weights += 1
        return rounded(x) @ self._fp8_workspaces["weight"].t(), None


def test_each_product_of_full_gates_keeps_its_own_weight_in_fp8():
    """Of a later micro-batch too, which rounds no weight again."""
    layer = layer_of(kda=True, in_proj=CachingColumn)
    linear = layer.in_proj
    x = torch.randn(16, 2, 24)
    for step in range(2):
        linear.is_first_microbatch = True
        linear.weight.data.mul_(1 + step)
        expected = torch.cat(full_gates(x, layer, rounded), -1)
        for first in (True, False):
            linear.calls.clear()
            with fp8_on():
                rows, _ = linear(x)
            assert_close("rows", rows, expected, FP32)
            assert linear.calls == [(False, first), (True, first), (True, first)]
            assert linear.rounded_weights == 2 * (step + 1)
    assert {name: len(kept) for name, kept in linear._fp8_workspaces.items()} == {
        "weight": layer.dims.layout.conv_width,
        "rows_after": layer.dims.layout.mixed_width,
    }


class Recomputed(CachingColumn):
    """Where Transformer Engine runs a checkpoint again, its linears do not ask whether
    FP8 is on: they do what their latest call did. Each call takes the scales that a
    call of the first run left."""

    again = False

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.fp8 = self.fp8_initialized = False
        self.fp8_meta = {"fp8_checkpoint": False}
        self.scales = []

    def will_execute_quantized(self, is_context_quantized):
        asked = super().will_execute_quantized(is_context_quantized)
        return self.fp8 if self.again and self.fp8 else asked

    def forward(self, x, *args, **options):
        fp8 = self.will_execute_quantized(False)
        if not (self.again and self.fp8):
            self.fp8 = self.fp8_initialized = self.fp8_meta["fp8_checkpoint"] = fp8
            if fp8:
                self.scales.append(len(self.scales))
        elif fp8:
            self.scales.pop(0)
        return super().forward(x, *args, **options)


def test_full_gates_are_the_same_products_where_a_checkpoint_runs_them_again():
    layer = layer_of(kda=True, in_proj=Recomputed)
    linear = layer.in_proj
    x = torch.randn(16, 2, 24)
    for _micro_batch in range(2):
        with fp8_on():
            first, _ = linear(x)
        calls = [fp8 for fp8, _ in linear.calls]
        assert linear.fp8 and linear.fp8_initialized
        assert linear.fp8_meta["fp8_checkpoint"]
        linear.calls.clear()
        linear.again = True
        # Megatron's checkpoint of a layer restores the context of FP8
        with fp8_on():
            again, _ = linear(x)
        linear.again = False
        assert [fp8 for fp8, _ in linear.calls] == calls == [False, True, True]
        assert torch.equal(again, first)
        assert not linear.scales
        linear.calls.clear()


def test_a_recipe_decides_about_in_proj_of_full_gates_but_not_about_its_forget_gate():
    for fp8, of_in_proj, in_fp8 in (("hybrid", {}, False), (None, FP8_TOO, True)):
        settings = {"fp8": fp8, "quant_recipe": recipe("*.in_proj", **of_in_proj)}
        layer = layer_of(settings=settings, name=NAME, kda=True)
        x = torch.randn(16, 1, 24)
        rounds = rounded if in_fp8 else lambda x: x
        expected = torch.cat(full_gates(x, layer, rounds), -1)
        with fp8_on() if fp8 else nullcontext():
            assert_close("rows", layer.in_proj(x)[0], expected, FP32)
            assert layer(x)[0].isfinite().all()


@pytest.mark.slow
@pytest.mark.parametrize(
    "opaque", [True, False], ids=["as Transformer Engine's", "traceable"]
)
def test_a_compiled_layer_has_the_gradients_of_the_layer(opaque):
    """Dynamo may not capture how in_proj comes in two parts: it would lose gradients of
    both."""

    class Column(Fp8Column):
        def forward(self, *args, **kwargs):
            run = super().forward
            return (torch.compiler.disable(run) if opaque else run)(*args, **kwargs)

    layer = layer_of(in_proj=Column)
    x = torch.randn(16, 1, 24)

    def gradients(run):
        with fp8_on():
            return forward_backward(layer, x, run=run)

    expected = gradients(layer)
    torch._dynamo.reset()
    try:
        with torch.compiler.set_stance("default"):
            found = gradients(torch.compile(layer, backend="eager"))
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0, (
            "nothing captured"
        )
    finally:
        torch._dynamo.reset()
    for name, gradient in expected.items():
        assert_close(name, found[name], gradient, 1e-6)
