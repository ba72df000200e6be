"""The holder of the fp32 gates by itself: what it computes, keeps and refuses."""

import pytest
import torch
import torch.nn.functional as F

from megatron_gdn.hf import CPAwareGatedDeltaNet, patch
from megatron_gdn.hf.drop_in import SSMGate, install_ssm_gate
from tests.hf.drop_in.conftest import DENSE, NEXT
from tests.hf.tiny_models import build
from tests.parallel import assert_close


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", [DENSE, NEXT])
def test_the_gate_is_that_of_float64_to_fp32_for_inputs_of_any_dtype(fresh, family, dtype):
    model = fresh(family).to(dtype)
    patch(model)
    layer = model.model.layers[0].linear_attn
    a = (torch.randn(2, 5, 8) * 30).to(dtype)
    g = layer._compute_gate(a)
    assert isinstance(layer._fp32_params, SSMGate) and torch.equal(layer._fp32_params(a), g)
    assert g.dtype == torch.float32 and g.shape == a.shape
    truth = -layer.A_log.double().exp() * F.softplus(a.double() + layer.dt_bias.double())
    assert_close("gate", g, truth.clamp(min=-104), 1e-6)  # exp of less is 0 in fp32
    g.sum().backward()
    assert layer.A_log.grad.dtype == layer.dt_bias.grad.dtype == torch.float32


def test_a_gate_is_valid_before_it_is_filled():
    gate = SSMGate(3)
    assert [(n, tuple(p.shape), p.dtype) for n, p in gate.named_parameters()] == [
        ("A_log", (3,), torch.float32),
        ("dt_bias", (3,), torch.float32),
    ]
    assert torch.equal(gate(torch.zeros(1, 3)), -F.softplus(torch.ones(1, 3)))
    with pytest.raises(ValueError, match=r"gates of dtype torch\.bfloat16"):
        SSMGate(3, torch.bfloat16)


def test_bare_parameters_move_into_the_holder_as_the_same_objects():
    module = torch.nn.Module()
    A_log = module.A_log = torch.nn.Parameter(torch.randn(3, dtype=torch.bfloat16))
    dt_bias = module.dt_bias = torch.nn.Parameter(torch.randn(3))
    before = A_log.detach().clone(), dt_bias.detach().clone(), dt_bias.data_ptr()
    with pytest.raises(ValueError, match="gates of dtype"):
        install_ssm_gate(module, torch.float16)
    gate = install_ssm_gate(module)
    assert gate is module._fp32_params and not module._parameters
    assert gate.A_log is A_log and gate.dt_bias is dt_bias
    assert torch.equal(A_log, before[0].float()) and A_log.dtype == torch.float32
    assert torch.equal(dt_bias, before[1]) and dt_bias.data_ptr() == before[2]
    with pytest.raises(KeyError):
        install_ssm_gate(module)


@pytest.mark.parametrize("asked", ["bfloat16", torch.float16])
def test_a_narrow_mamba_ssm_dtype_is_told_of_and_not_taken(asked, caplog):
    config = build(DENSE).config
    with caplog.at_level("INFO"):
        for given in ("float32", torch.float32, None):
            config.mamba_ssm_dtype = given
            CPAwareGatedDeltaNet(config, 0)
        assert "mamba_ssm_dtype" not in caplog.text
        config.mamba_ssm_dtype = asked
        layer = CPAwareGatedDeltaNet(config, 0)
    name = str(asked).removeprefix("torch.")
    assert f"mamba_ssm_dtype='{name}' of the config is not taken" in caplog.text
    assert layer.A_log.dtype == layer.dt_bias.dtype == torch.float32
