"""On one GPU with Transformer Engine: in_proj in FP8 by each recipe, the rule's gates in bf16."""

import pytest
import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.enums import Fp8Recipe
from megatron.core.fp8_utils import get_fp8_context
from torch import nn

from megatron_gdn.mixers.fp8 import GatesApart
from tests.distributed.fp8_laws import build
from tests.mamba_mixers import alone
from tests.parallel import make_config, parallel

pytestmark = pytest.mark.gpu
pytest.importorskip("transformer_engine")

from megatron.core.extensions import transformer_engine as te  # noqa: E402

RECIPES = ["tensorwise", "delayed", "blockwise"]
SIZES = {
    "hidden_size": 256, "linear_num_key_heads": 4, "linear_num_value_heads": 8,
    "linear_key_head_dim": 64, "linear_value_head_dim": 64, "mamba_num_heads": 16,
    "mamba_num_groups": 2, "mamba_head_dim": 64, "mamba_state_dim": 64,
}  # fmt: skip
TOKENS = 512
# Two roundings to bf16 (2^-9 each, of the product's operands and result) against fp64, of which
# the square mean of many is far less; e4m3 has 3 bits of mantissa: 2^-4 at most for one operand.
BF16, FP8 = 2 * 2.0**-9, 2 * 2.0**-4


@pytest.fixture(autouse=True)
def megatron(gpus):
    """Megatron's state in this process, over one rank."""
    if not torch.distributed.is_initialized():
        store = torch.distributed.HashStore()
        torch.distributed.init_process_group("nccl", store=store, rank=0, world_size=1)
    with parallel():
        yield


def layer_of(mixer: str, recipe: str | None, **changes) -> nn.Module:
    torch.manual_seed(3)
    settings = {"use_cpu_initialization": False, "bf16": True, "params_dtype": torch.bfloat16}
    settings["gradient_accumulation_fusion"] = True
    settings["init_method_std"] = 0.02
    if recipe is not None:
        settings |= {"fp8": "hybrid", "fp8_recipe": Fp8Recipe[recipe]}
    config = make_config(**{**SIZES, **settings, **changes})
    layer = build(mixer, config, alone(), te.TELayerNormColumnParallelLinear)
    return layer.cuda()


def wrapped(layer: nn.Module) -> DistributedDataParallel:
    config = DistributedDataParallelConfig(grad_reduce_in_fp32=True, overlap_grad_reduce=True)
    ddp = DistributedDataParallel(layer.config, config, layer)
    ddp.zero_grad_buffer()
    return ddp


def error(found, exact) -> float:
    return ((found.double() - exact).norm() / exact.norm()).item()


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("mixer", ["gdn", "mamba2"])
def test_gates_and_their_gradients_are_bf16s_and_the_rest_is_fp8s(mixer, recipe):
    layer = layer_of(mixer, recipe)
    wrapped(layer)
    linear, first = layer.in_proj, layer.dims.layout.main_width
    assert isinstance(linear, GatesApart)
    x = torch.randn(TOKENS, 1, 256, device="cuda", dtype=torch.bfloat16).requires_grad_()
    of_gates = torch.zeros(TOKENS, 1, layer.dims.layout.width, device="cuda", dtype=torch.bfloat16)
    of_gates[..., first:].normal_()
    normed = torch.nn.functional.rms_norm(x[:, 0].double(), (256,), eps=linear.eps)
    exact, d_weight = normed @ linear.weight.double().t(), of_gates[:, 0].double().t() @ normed
    for step in range(1, 4):  # the second has a cached weight, and adds to main_grad
        with get_fp8_context(layer.config):
            rows, _ = linear(x)
        rows.backward(of_gates)
        assert error(rows[:, 0, first:], exact[:, first:]) < BF16
        assert 2.0**-9 < error(rows[:, 0, :first], exact[:, :first]) < FP8
        assert error(linear.weight.main_grad[first:], step * d_weight[first:]) < BF16
        assert not linear.weight.main_grad[:first].any()


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("mixer", ["gdn", "mamba2"])
def test_a_layer_trains_in_fp8_near_its_bf16_self(mixer, recipe):
    """Output and gradients within FP8's rounding of the few products on their way."""
    found = []
    for kind in (None, recipe):
        layer = layer_of(mixer, kind)
        ddp = wrapped(layer)
        torch.manual_seed(5)
        x = torch.randn(TOKENS, 1, 256, device="cuda", dtype=torch.bfloat16).requires_grad_()
        for _ in range(2):  # delayed scaling knows no amax before the first
            ddp.zero_grad_buffer()
            x.grad = None
            with get_fp8_context(layer.config):
                out, _ = ddp(x)
            out.backward(torch.ones_like(out))
            ddp.finish_grad_sync()
        grads = {name: p.main_grad.clone() for name, p in layer.named_parameters()}
        found.append({"out": out.detach(), "x": x.grad, **grads})
    for name, tensor in found[1].items():
        assert error(tensor, found[0][name].double()) < 4 * FP8, name


def test_weights_stay_in_bf16_where_others_are_fp8():
    """Under ``--fp8-param-gather``."""
    config = make_config(**SIZES, fp8="hybrid", fp8_recipe=Fp8Recipe.tensorwise, fp8_param=True)
    with get_fp8_context(config, is_init=True):
        layer = layer_of("gdn", "tensorwise", fp8_param=True)
        other = te.te.pytorch.Linear(256, 256, params_dtype=torch.bfloat16)
    assert type(layer.in_proj.weight) is nn.Parameter and type(other.weight) is not nn.Parameter


def test_eight_ranks_shares_of_a_row_are_aligned_without_the_gates():
    """1544 rows are refused by cuBLAS, 1536 are not."""
    sizes = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 128}
    layer = layer_of("gdn", "tensorwise", **sizes, linear_value_head_dim=128)
    assert layer.dims.layout.width % 16 and not layer.dims.layout.main_width % 16
    x = torch.randn(TOKENS, 1, 256, device="cuda", dtype=torch.bfloat16).requires_grad_()
    wrapped(layer)
    with get_fp8_context(layer.config):
        layer(x)[0].sum().backward()
    assert x.grad.isfinite().all()
