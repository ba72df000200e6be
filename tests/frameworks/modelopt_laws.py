"""modelopt quantizes our layer's two projections, and prunes the hidden size of models with it."""

import io

import modelopt.torch.opt as mto
import modelopt.torch.prune as mtp
import modelopt.torch.quantization as mtq
import pytest
import torch
from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec
from megatron.core.post_training.modelopt.hybrid.model_specs import get_hybrid_stack_modelopt_spec

import megatron_gdn
from tests.frameworks import patch_laws
from tests.frameworks.conftest import page_lines
from tests.frameworks.patch_laws import logits

WIDTH, PRUNED = 24, 16

pytestmark = pytest.mark.usefixtures("patched")


def hybrid(spec=hybrid_stack_spec):
    return patch_laws.hybrid(spec, hidden_size=WIDTH, kv_channels=6)


def gpt(width: int = WIDTH):
    return patch_laws.gpt(hidden_size=width, kv_channels=6)


def mixers(model):
    return [m for m in model.modules() if isinstance(m, megatron_gdn.GatedDeltaNet)]


def test_int8_is_of_the_projections_alone_and_is_restored():
    model = hybrid(get_hybrid_stack_modelopt_spec())
    exact = logits(model)
    quantized = mtq.quantize(model, mtq.INT8_DEFAULT_CFG, logits)
    (layer,) = mixers(quantized)
    on = {name for name, part in layer.named_modules() if getattr(part, "is_enabled", False)}
    assert on == {f"{a}_proj.{b}_quantizer" for a in ("in", "out") for b in ("input", "weight")}
    rounded = logits(quantized)
    # Each product rounds both factors to 1/254 of their largest number; ten products in a row.
    assert 0 < (rounded - exact).norm() / exact.norm() < 10 * 2**0.5 / 127
    saved = io.BytesIO()
    mto.save(quantized, saved)
    saved.seek(0)
    again = mto.restore(hybrid(get_hybrid_stack_modelopt_spec()), saved)
    assert torch.equal(logits(again), rounded)


def test_a_quantized_convolution_is_refused():
    everything = {**mtq.INT8_DEFAULT_CFG, "quant_cfg": mtq.INT8_DEFAULT_CFG["quant_cfg"][:3]}
    with pytest.raises(NotImplementedError, match=r"modelopt's quantizers named '\*conv1d\*'"):
        mtq.quantize(hybrid(get_hybrid_stack_modelopt_spec()), everything, logits)


def prune(model):
    (line,) = page_lines("modelopt")
    exec(line)
    minitron = mtp.mcore_minitron.get_mcore_minitron_config(
        hidden_size_divisor=8, ffn_hidden_size_divisor=8
    )
    mtp.prune(
        model, mode=[("mcore_minitron", minitron)], dummy_input=None,
        constraints={"export_config": {"hidden_size": PRUNED}}, config={"forward_loop": logits},
    )  # fmt: skip


def test_modelopt_prunes_no_hybrid_model_with_this_layer():
    """If this fails, it does: give the next law both, and say so on the page."""
    with pytest.raises(ValueError, match="Unsupported hybrid layer chars {'G'}"):
        prune(hybrid())


def test_a_pruned_model_is_the_narrow_model_with_columns_of_the_wide_one():
    model = gpt()
    wide = {name: x.clone() for name, x in model.state_dict().items() if torch.is_tensor(x)}
    prune(model)
    kept = model.state_dict()
    embedding = "embedding.word_embeddings.weight"
    columns = [
        (wide[embedding] == column[:, None]).all(0).nonzero().item() for column in kept[embedding].T
    ]
    assert len(columns) == PRUNED
    for name, x in wide.items():
        if ".in_proj." in name or ".conv1d." in name or ".out_" in name or "A_log" in name:
            sliced = x
            if name.endswith("in_proj.weight"):
                sliced = x[:, columns]
            elif name.endswith(("in_proj.layer_norm_weight", "out_proj.weight")):
                sliced = x[columns]
            assert torch.equal(kept[name], sliced), name
    narrow = gpt(PRUNED)
    narrow.load_state_dict(kept)
    assert torch.equal(logits(model), logits(narrow))
    for pruned, built in zip(mixers(model), mixers(narrow), strict=True):
        assert type(pruned) is megatron_gdn.GatedDeltaNet
        assert (pruned.dims, pruned.global_dims) == (built.dims, built.global_dims)
        assert pruned.hidden_size == PRUNED
    assert model.sharded_state_dict().keys() == narrow.sharded_state_dict().keys()
