"""On one GPU in bf16: Transformer Engine's modules, and a hybrid model beside
upstream's layer."""

import pytest
import torch

from tests.gpu.parallel_laws import rms
from tests.parallel import make_config

pytestmark = pytest.mark.gpu


SIZES = {
    "hidden_size": 256,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}


def config_for(**changes):
    settings = {
        "use_cpu_initialization": False,
        "init_method_std": 0.02,
        "gated_linear_unit": True,
        "add_bias_linear": False,
        "bf16": True,
        "params_dtype": torch.bfloat16,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    }
    return make_config(**{**SIZES, **settings, **changes})


@pytest.mark.parametrize("packed", [False, True], ids=["batch", "packed"])
@pytest.mark.parametrize("zero_centered", [False, True], ids=["", "zero-centred"])
def test_transformer_engines_modules_equal_local_ones_within_bf16_error(
    world, packed, zero_centered
):
    """Each bf16 layer's error against fp32 is the yardstick for the other's."""
    pytest.importorskip("transformer_engine")
    from megatron.core.transformer.identity_op import IdentityOp

    from megatron_gdn.compat.torch_norm import TorchRMSNorm
    from megatron_gdn.specs import gated_delta_net_spec
    from tests.distributed.layer_laws import thd, transformer_layer

    def build(backend, **changes):
        config = config_for(layernorm_zero_centered_gamma=zero_centered, **changes)
        norm = TorchRMSNorm if backend == "local" else IdentityOp
        return transformer_layer(config, gated_delta_net_spec(backend), norm).cuda()

    exact = build("local", bf16=False, params_dtype=torch.float32)
    with torch.no_grad():
        for parameter in exact.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
            parameter.copy_(parameter.bfloat16())  # what both bf16 layers can hold
    state = dict(exact.named_parameters())
    norm = "self_attention.in_proj.layer_norm_weight"
    lengths = (100, 1, 300, 111)
    rows = (sum(lengths), 1) if packed else (512, 2)
    x = torch.randn(*rows, 256, device="cuda").bfloat16()
    weight = torch.randn(x.shape, device="cuda")

    def run(layer, x):
        x = x.clone().requires_grad_()
        params = thd(lengths, "cuda") if packed else None
        out, _ = layer(x, attention_mask=None, packed_seq_params=params)
        (out.float() * weight).sum().backward()
        results = {"output": out.detach(), "dx": x.grad}
        for name, parameter in layer.named_parameters():
            results[name.replace("input_layernorm.weight", norm)] = parameter.grad
        return results

    truth = run(exact, x.float())
    errors = {}
    for backend in ("local", "te"):
        layer = build(backend)
        with torch.no_grad():
            for name, parameter in layer.named_parameters():
                source = "input_layernorm.weight" if name == norm else name
                parameter.copy_(state[source])
        errors[backend] = {
            name: rms(value.float() - truth[name]) / rms(truth[name])
            for name, value in run(layer, x).items()
        }
    assert errors["te"].keys() == errors["local"].keys() == truth.keys()
    for name, local in errors["local"].items():
        te = errors["te"][name]
        print(f"{name}: te {te:.2e} local {local:.2e}")
        assert te <= 1.5 * local + 2**-9, name
    assert errors["local"]["output"] <= 2**-7


@pytest.mark.parametrize("again", [None, "gdn_norm_out", "gdn"])
def test_delayed_weight_gradients_have_the_bits_of_those_at_once(world, again):
    pytest.importorskip("transformer_engine")
    from megatron.core.transformer.spec_utils import build_module

    from megatron_gdn.specs import gated_delta_net_spec

    def layer(delayed: bool):
        config = config_for()
        # Its constructor asks for experts beside it, which one layer does not have.
        config.delay_wgrad_compute = delayed
        if again:
            config.recompute_granularity = "selective"
            config.recompute_modules = [again]
        torch.manual_seed(3)
        return build_module(gated_delta_net_spec("te"), config, layer_number=1).cuda()

    late = layer(delayed=True)
    at_once = layer(delayed=False)
    at_once.load_state_dict(late.state_dict())
    x = torch.randn(256, 2, 256, device="cuda", dtype=torch.bfloat16)
    for one in (late, at_once):
        out, _ = one(x.clone().requires_grad_(), None)
        out.float().square().sum().backward()
    missing = {name for name, p in late.named_parameters() if p.grad is None}
    assert missing == {"in_proj.weight", "out_proj.weight"}
    late.backward_dw()
    for name, parameter in late.named_parameters():
        assert torch.equal(parameter.grad, at_once.get_parameter(name).grad), name
