"""A layer built in one place and dtype and run in another; a model that calls its
spec."""

from dataclasses import fields

import pytest
import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer import transformer_block
from megatron.core.transformer.module import Float16Module
from megatron.training.utils import to_empty_if_meta_device

import megatron_gdn
from megatron_gdn import GatedDeltaNet
from megatron_gdn.compat.torch_norm import TorchRMSNorm
from megatron_gdn.gdn import layer as layer_module
from megatron_gdn.mixers.attention import TorchSelfAttention
from megatron_gdn.mixers.tensor_parallel import fill_share
from megatron_gdn.specs import gpt_block_spec
from tests.distributed.gpt_laws import gpt_config
from tests.distributed.layer_laws import build
from tests.distributed.mixers import BY_NAME
from tests.parallel import alone, make_config

pytestmark = pytest.mark.usefixtures("one_rank")


@pytest.fixture
def asked(monkeypatch):
    """What the delta rule was chosen for, in order."""
    requests = []
    choose = layer_module.resolve_rule

    def watched(backend, *, device, dtype, bits, **options):
        requests.append((device.type, dtype, bits))
        return choose(backend, device=device, dtype=dtype, bits=bits, **options)

    monkeypatch.setattr(layer_module, "resolve_rule", watched)
    return requests


@pytest.mark.parametrize("kind", BY_NAME)
def test_without_initialization_no_weight_is_given_to_the_configs_functions(kind):
    def refuse(weight):
        raise AssertionError("initialised")

    functions = {"init_method": refuse, "output_layer_init_method": refuse}
    config = BY_NAME[kind].config(use_cpu_initialization=True, **functions)
    with pytest.raises(AssertionError, match="initialised"):
        BY_NAME[kind].build(config, alone())
    config.perform_initialization = False
    BY_NAME[kind].build(config, alone())


def test_the_rule_is_chosen_once_for_every_kind_of_rows(asked):
    # the parameters are fp32: params_dtype is not given
    layer = build(make_config(bf16=True))
    assert asked == [("cpu", torch.bfloat16, False)]
    x = torch.randn(5, 1, 24)
    for _ in range(2):
        layer(x, None)
    assert asked[1:] == [("cpu", torch.float32, False)]
    layer.double()(x.double(), None)
    torch.use_deterministic_algorithms(True)
    try:
        layer(x.double(), None)
    finally:
        torch.use_deterministic_algorithms(False)
    assert asked[2:] == [("cpu", torch.float64, False), ("cpu", torch.float64, True)]


def test_a_device_of_another_type_is_another_kind(asked):
    layer = build()
    layer.micro_batches.of(None, torch.empty(5, 1, layer.in_proj_dim, device="meta"))
    assert asked == [("cpu", torch.float32, False), ("meta", torch.float32, False)]


def within(x, low, high):
    """In the range, and over most of it: of more than a hundred draws some lie near
    each end."""
    margin = 0.1 * (high - low)
    assert low <= x.min() < low + margin and high - margin < x.max() <= high, (
        x.min(),
        x.max(),
    )


@pytest.mark.parametrize(
    ("options", "rates", "bound"),
    [({}, (1, 16), 0.5), ({"A_init_range": (2, 3), "conv_init": 0.2}, (2, 3), 0.2)],
    ids=["defaults", "options"],
)
def test_parameters_start_in_their_ranges(options, rates, bound):
    sizes = {"linear_num_value_heads": 128, "linear_value_head_dim": 2}
    layer = build(make_config(**sizes), conv_bias=True, **options)
    within(layer.A_log.exp(), *rates)
    within(layer.conv1d.weight, -bound, bound)
    within(layer.conv1d.bias, -bound, bound)
    assert (layer.dt_bias == 1).all()
    assert layer.A_log.dtype == layer.dt_bias.dtype == torch.float32


def test_an_fp16_model_keeps_its_gates_and_their_gradients_in_fp32():
    config = make_config(fp16=True, params_dtype=torch.float16)
    model = Float16Module(config, build(config))
    layer = model.module
    gates = {name: layer.get_parameter(name) for name in ("A_log", "dt_bias")}
    before = layer.A_log.clone()
    x = torch.randn(70, 1, 24).half().requires_grad_()
    out = layer(x, None)[0]
    out.float().sum().backward()
    assert (
        out.dtype
        == layer.conv1d.weight.dtype
        == layer.conv1d.weight.grad.dtype
        == torch.float16
    )
    for gate in gates.values():
        assert gate.dtype == gate.grad.dtype == torch.float32
        assert gate.grad.isfinite().all() and gate.grad.abs().max() > 0
    # Not a value that passed through fp16 on its way.
    assert torch.equal(layer.A_log, before)
    assert not torch.equal(before, before.half().float())
    assert x.grad.isfinite().all()


def initialised_as_on_a_gpu(kind, **changes):
    config = BY_NAME[kind].config(use_cpu_initialization=False, **changes)
    return BY_NAME[kind].build(config, alone())


each_mixer = pytest.mark.parametrize("kind", BY_NAME)


def require_equal(landed, here):
    for name, parameter in here.named_parameters():
        other = landed.get_parameter(name)
        assert other.dtype == parameter.dtype and torch.equal(other, parameter), name
        for mark in (
            "tensor_model_parallel",
            "partition_dim",
            "partition_stride",
            "keep_in_fp32",
        ):
            assert getattr(other, mark, None) == getattr(parameter, mark, None), (
                name,
                mark,
            )


@each_mixer
def test_under_megatrons_meta_device_a_layer_is_the_one_built_here(kind):
    """Megatron builds under ``torch.device("meta")``, moves what is there, and resets
    nothing."""
    torch.manual_seed(3)
    here = initialised_as_on_a_gpu(kind)
    torch.manual_seed(3)
    with torch.device("meta"):
        layer = initialised_as_on_a_gpu(kind, init_model_with_meta_device=True)
    require_equal(to_empty_if_meta_device(layer, device=torch.device("cpu")), here)


@each_mixer
def test_a_layer_that_was_emptied_is_reset_to_the_one_built_here(kind):
    here, layer = (initialised_as_on_a_gpu(kind) for _ in range(2))
    layer.to("meta").to_empty(device="cpu")
    for one in (here, layer):
        torch.manual_seed(3)
        one.reset_parameters()
    # a module's own initialisation is not the layer's
    for module in layer.children():
        if isinstance(module, TorchRMSNorm):
            module.reset_parameters()
    require_equal(layer, here)


def test_a_method_that_reads_its_values_is_not_called_on_the_meta_device():
    """Transformer Engine does not call it there either. Later parameters get the values
    that they have in a model built here."""

    def of_norm_one(x):
        x.normal_()
        x.div_(x.norm().item())

    later = []
    for device in ("cpu", "meta"):
        torch.manual_seed(3)
        fill_share(None, torch.zeros(2, 2, device=device), of_norm_one, 0, (2,))
        later.append(torch.zeros(2, 2))
        fill_share(None, later[-1], of_norm_one, 0, (2,))
    assert torch.equal(*later) and later[0].all()


def mixers(spec) -> list[type]:
    config = gpt_config((1, 0, 1, 0), linear_attention_freq=2)
    model = GPTModel(config, spec, vocab_size=32, max_sequence_length=8)
    return [type(layer.self_attention) for layer in model.decoder.layers]


def of_its_own(config):
    return gpt_block_spec(config, backend="reference")


def of_a_stage(config, vp_stage=None):
    assert vp_stage is None
    return gpt_block_spec(config, vp_stage=vp_stage)


@pytest.mark.parametrize("spec", [gpt_block_spec, of_its_own, of_a_stage])
def test_a_model_calls_a_function_given_as_its_spec(spec):
    assert mixers(spec) == [GatedDeltaNet, TorchSelfAttention] * 2


def test_it_hands_on_the_stages_that_the_function_takes():
    config = make_config()
    asked = []

    def spec(config, vp_stage, pp_rank):
        asked.append((config, vp_stage, pp_rank))
        return transformer_block.TransformerBlockSubmodules(layer_specs=[])

    transformer_block._get_block_submodules(config, spec, 1, pp_rank=0)
    assert asked == [(config, 1, 0)]


def test_what_is_no_spec_is_refused_as_before():
    with pytest.raises(Exception, match="specialize for int"):
        mixers(3)


LACKS = {
    "GatedDeltaNet": set(),
    "GatedDeltaNet2": {"rule_operands"},
    "GatedDeltaProduct": {"rule_operands"},
    "KimiDeltaAttention": {"rule_operands"},
    "Mamba2Mixer": {"rule_operands", "recompute"},
}


@pytest.mark.parametrize("mixer", LACKS)
def test_an_option_that_a_mixer_lacks_is_refused(mixer):
    options = getattr(megatron_gdn, mixer).options_class
    every = {field.name for field in fields(options)}
    assert every - options.names() == LACKS[mixer]
    for name in LACKS[mixer]:
        with pytest.raises(TypeError, match=f"unknown arguments {name}"):
            options.of({name: None})
