"""On one GPU with Transformer Engine: in_proj in FP8 by each recipe, the rule's gates
in bf16."""

import math

import pytest
import torch
import torch.nn.functional as F
from megatron.core.distributed import DistributedDataParallel
from megatron.core.enums import Fp8Recipe
from megatron.core.fp8_utils import get_fp8_context
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.spec_utils import build_module
from torch import nn

from megatron_gdn.mixers.fp8 import GatesOutsideFP8, SectionOutsideFP8
from megatron_gdn.specs import (
    gated_delta_net_spec,
    kimi_delta_attention_spec,
    mamba2_spec,
)
from tests.parallel import in_ddp, make_config

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("transformer_engine", "world")]

RECIPES = ["tensorwise", "delayed", "blockwise"]
HIDDEN = 256
TOKENS = 512
SIZES = {
    "hidden_size": HIDDEN,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "mamba_num_heads": 16,
    "mamba_num_groups": 2,
    "mamba_head_dim": 64,
    "mamba_state_dim": 64,
}
# Kimi Delta Attention, with both gates in full width and with gates of low rank.
KDA = {
    "kda": {},
    "kda, low rank": {"forget_rank": 128, "output_rank": 128},
}
# bf16 rounds an operand by 2^-9 at most and e4m3 by 2^-4; a product has two of them.
BF16 = 2 * 2.0**-9
FP8 = 2 * 2.0**-4


def layer_of(mixer: str, recipe: str | None, **changes) -> nn.Module:
    torch.manual_seed(3)
    settings = {
        "use_cpu_initialization": False,
        "bf16": True,
        "params_dtype": torch.bfloat16,
        "gradient_accumulation_fusion": True,
        "init_method_std": 0.02,
        "add_bias_linear": False,
    }
    if recipe is not None:
        settings |= {"fp8": "hybrid", "fp8_recipe": Fp8Recipe[recipe]}
    config = make_config(**{**SIZES, **settings, **changes})
    groups = ProcessGroupCollection.use_mpu_process_groups(["tp", "cp"])
    if mixer == "mamba2":
        spec = mamba2_spec("te")
        sizes = {"d_model": HIDDEN}
    elif mixer in KDA:
        spec = kimi_delta_attention_spec("te", **KDA[mixer])
        sizes = {}
    else:
        spec = gated_delta_net_spec("te")
        sizes = {}
    layer = build_module(
        spec, config, layer_number=1, pg_collection=groups, **sizes
    ).cuda()
    with torch.no_grad():  # a state lives over some 100 tokens
        layer.A_log.fill_(math.log(0.01))
    return layer


def wrapped(layer: nn.Module) -> DistributedDataParallel:
    ddp = in_ddp(layer, grad_reduce_in_fp32=True)
    ddp.zero_grad_buffer()
    return ddp


def bf16(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def error(found: torch.Tensor, exact: torch.Tensor) -> float:
    return ((found.double() - exact).norm() / exact.norm()).item()


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("mixer", ["gdn", "mamba2"])
def test_gates_and_their_gradients_are_bf16s_and_the_rest_is_fp8s(mixer, recipe):
    """Of three micro-batches: from the second on the linear adds with a weight that it
    kept."""
    layer = layer_of(mixer, recipe)
    ddp = wrapped(layer)
    linear = layer.in_proj
    first = layer.dims.layout.main_width
    assert isinstance(linear, GatesOutsideFP8)
    x = bf16(TOKENS, 1, HIDDEN).requires_grad_()
    d_rows = bf16(TOKENS, 1, layer.dims.layout.width)
    d_rows[..., :first] = 0
    normed = F.rms_norm(x[:, 0].double(), (HIDDEN,), eps=linear.eps)
    exact = normed @ linear.weight.double().t()
    d_weight = d_rows[:, 0].double().t() @ normed
    for step in range(1, 4):
        with get_fp8_context(ddp.config):
            rows, _ = linear(x)
        rows.backward(d_rows)
        assert error(rows[:, 0, first:], exact[:, first:]) < BF16
        # Before its second call delayed scaling knows no amax.
        if recipe != "delayed" or step > 1:
            assert BF16 < error(rows[:, 0, :first], exact[:, :first]) < FP8
        assert error(linear.weight.main_grad[first:], step * d_weight[first:]) < BF16
        assert not linear.weight.main_grad[:first].any()


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_full_forget_gate_and_its_gradients_are_bf16s_and_the_rest_is_fp8s(recipe):
    """Of three micro-batches: from the second on the linear multiplies by weights that
    it kept, one for the rows before the gate's and one for the rows after them."""
    layer = layer_of("kda", recipe)
    ddp = wrapped(layer)
    linear = layer.in_proj
    assert isinstance(linear, SectionOutsideFP8)
    g = layer.dims.in_proj_layout.columns("g")
    before, after = slice(0, g.start), slice(g.stop, None)
    x = bf16(TOKENS, 1, HIDDEN).requires_grad_()
    d_rows = bf16(TOKENS, 1, layer.dims.in_proj_layout.width)
    d_rows[..., before] = 0
    d_rows[..., after] = 0
    exact = x[:, 0].double() @ linear.weight.double().t()
    d_weight = d_rows[:, 0].double().t() @ x[:, 0].double()
    for step in range(1, 4):
        with get_fp8_context(ddp.config):
            rows, _ = linear(x)
        rows.backward(d_rows)
        assert error(rows[:, 0, g], exact[:, g]) < BF16
        # Before its second call delayed scaling knows no amax.
        if recipe != "delayed" or step > 1:
            assert BF16 < error(rows[:, 0, before], exact[:, before]) < FP8
            assert BF16 < error(rows[:, 0, after], exact[:, after]) < FP8
        assert error(linear.weight.main_grad[g], step * d_weight[g]) < BF16
        assert not linear.weight.main_grad[before].any()
        assert not linear.weight.main_grad[after].any()


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("mixer", ["gdn", "mamba2", *KDA])
def test_a_layer_trains_in_fp8_near_its_bf16_self(mixer, recipe):
    """Within FP8's rounding of the operands of two products in a row, each way."""
    found = []
    for kind in (None, recipe):
        layer = layer_of(mixer, kind)
        ddp = wrapped(layer)
        torch.manual_seed(5)
        x = bf16(TOKENS, 1, HIDDEN).requires_grad_()
        d_out = bf16(TOKENS, 1, HIDDEN)
        out = x
        for _ in range(2):
            ddp.zero_grad_buffer()
            x.grad = None
            with get_fp8_context(layer.config):
                out, _ = ddp(x)
            out.backward(d_out)
        names = ("in_proj.weight", "out_proj.weight")
        grads = {name: layer.get_parameter(name).main_grad.clone() for name in names}
        found.append({"out": out.detach(), "x": x.grad, **grads})
    for name, tensor in found[1].items():
        assert error(tensor, found[0][name].double()) < 2 * FP8, name


@pytest.mark.parametrize("mixer", ["gdn", "mamba2"])
def test_the_gates_share_is_added_to_the_linears_gradient_of_x(mixer):
    """Current scaling: equal gradients of the other columns have equal scales."""
    layer = layer_of(mixer, "tensorwise")
    linear = layer.in_proj
    first = layer.dims.layout.main_width
    x = bf16(TOKENS, 1, HIDDEN)
    d_rows = bf16(TOKENS, 1, layer.dims.layout.width)
    wrapped(layer)
    found = {}
    for part in ("main", "gates", "both"):
        leaf = x.clone().requires_grad_()
        given = d_rows.clone()
        if part != "both":
            given[..., slice(first, None) if part == "main" else slice(first)] = 0
        with get_fp8_context(layer.config):
            rows, _ = linear(leaf)
        rows.backward(given)
        found[part] = leaf.grad.double()
    # Three roundings to bf16 at most, each of 2^-9.
    assert error(found["both"], found["main"] + found["gates"]) < 3 * 2.0**-9
    assert error(found["both"], found["main"]) > 2.0**-6, "the gates have no share"


def test_weights_stay_in_bf16_where_others_are_fp8():
    """Under ``--fp8-param-gather``."""
    import transformer_engine.pytorch as te

    config = make_config(
        **SIZES, fp8="hybrid", fp8_recipe=Fp8Recipe.tensorwise, fp8_param=True
    )
    with get_fp8_context(config, is_init=True):
        layer = layer_of("gdn", "tensorwise", fp8_param=True)
        other = te.Linear(HIDDEN, HIDDEN, params_dtype=torch.bfloat16)
    assert type(layer.in_proj.weight) is nn.Parameter
    assert type(layer.out_proj.weight) is nn.Parameter
    assert type(other.weight) is not nn.Parameter


def test_a_row_of_few_heads_is_aligned_without_its_gates():
    """1544 rows of tp 8 are refused by cuBLAS, 1536 are not."""
    layer = layer_of("gdn", "tensorwise")
    assert layer.dims.layout.width == 1544 and layer.dims.layout.main_width == 1536
    x = bf16(TOKENS, 1, HIDDEN).requires_grad_()
    ddp = wrapped(layer)
    with get_fp8_context(layer.config):
        ddp(x)[0].sum().backward()
    assert x.grad.isfinite().all()


@pytest.mark.parametrize("recompute", ["light", "full"])
@pytest.mark.parametrize("recipe", ["tensorwise", "delayed"])
def test_what_is_computed_again_changes_no_gradient(recipe, recompute):
    """With the plain rule; FlashQLA rounds states elsewhere under "full"."""
    found = []
    for level in ("none", recompute):
        layer = layer_of("gdn", recipe)
        spec = gated_delta_net_spec("te", recompute=level, backend="reference")
        torch.manual_seed(3)
        layer = build_module(spec, layer.config, layer_number=1).cuda()
        ddp = wrapped(layer)
        torch.manual_seed(5)
        x = bf16(TOKENS, 1, HIDDEN).requires_grad_()
        d_out = bf16(TOKENS, 1, HIDDEN)
        with get_fp8_context(layer.config):
            out, _ = ddp(x)
        out.backward(d_out)
        grads = {name: p.main_grad.clone() for name, p in layer.named_parameters()}
        assert all(grad.any() for grad in grads.values())
        found.append({"out": out.detach(), "x": x.grad, **grads})
    for name, tensor in found[0].items():
        assert torch.equal(found[1][name], tensor), name
