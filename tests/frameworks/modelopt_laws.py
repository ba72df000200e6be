"""modelopt quantizes our layer's two projections."""

import io

import modelopt.torch.opt as mto
import modelopt.torch.quantization as mtq
import pytest
import torch
from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec
from megatron.core.post_training.modelopt.hybrid.model_specs import (
    get_hybrid_stack_modelopt_spec,
)

import megatron_gdn
from tests.frameworks import patch_laws
from tests.frameworks.patch_laws import logits

pytestmark = pytest.mark.usefixtures("patched")


def hybrid(spec=hybrid_stack_spec):
    return patch_laws.hybrid(spec, hidden_size=24, kv_channels=6)


def mixers(model):
    return [m for m in model.modules() if isinstance(m, megatron_gdn.GatedDeltaNet)]


def test_int8_is_of_the_projections_alone_and_is_restored():
    model = hybrid(get_hybrid_stack_modelopt_spec())
    exact = logits(model)
    quantized = mtq.quantize(model, mtq.INT8_DEFAULT_CFG, logits)
    (layer,) = mixers(quantized)
    on = {
        name
        for name, part in layer.named_modules()
        if getattr(part, "is_enabled", False)
    }
    assert on == {
        f"{a}_proj.{b}_quantizer" for a in ("in", "out") for b in ("input", "weight")
    }
    rounded = logits(quantized)
    # Each product rounds both factors to 1/254 of their largest number; ten products in
    # a row.
    assert 0 < (rounded - exact).norm() / exact.norm() < 10 * 2**0.5 / 127
    saved = io.BytesIO()
    mto.save(quantized, saved)
    saved.seek(0)
    again = mto.restore(hybrid(get_hybrid_stack_modelopt_spec()), saved)
    assert torch.equal(logits(again), rounded)


def test_a_quantized_convolution_is_refused():
    everything = {
        **mtq.INT8_DEFAULT_CFG,
        "quant_cfg": mtq.INT8_DEFAULT_CFG["quant_cfg"][:3],
    }
    with pytest.raises(
        NotImplementedError, match=r"modelopt's quantizers named '\*conv1d\*'"
    ):
        mtq.quantize(hybrid(get_hybrid_stack_modelopt_spec()), everything, logits)
