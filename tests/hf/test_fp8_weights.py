"""Weights that are stored in FP8, as ``--fp8-param-gather`` stores those of most
linears."""

from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from megatron_gdn.hf import (
    load_hf_weights,
    megatron_model,
    read_hf_config,
    save_hf_weights,
)
from megatron_gdn.hf.safetensors_files import SafetensorsFolder
from megatron_gdn.mixers import tensor_map
from tests.hf.model_laws import build_megatron, megatron_state
from tests.parallel import parallel

FC2 = "decoder.layers.1.mlp.linear_fc2.weight"
KEY = "model.layers.0.mlp.down_proj.weight"
E4M3_MAX = 448.0


class StoredInFP8(Tensor):
    """Values in e4m3 with one scale, as Transformer Engine's; ``copy_`` quantises."""

    @staticmethod
    def __new__(cls, weight: Tensor):
        made = Tensor._make_wrapper_subclass(cls, weight.shape, dtype=weight.dtype)
        made.scale = weight.abs().max().float() / E4M3_MAX
        made.data8 = (weight.float() / made.scale).to(torch.float8_e4m3fn)
        return made

    def dequantize(self) -> Tensor:
        return (self.data8.float() * self.scale).to(self.dtype)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        first = args[0]
        if func is torch.ops.aten.detach.default:
            return cls(first.dequantize())
        if func is torch.ops.aten.copy_.default and isinstance(first, cls):
            vars(first).update(vars(cls(args[1])))
            return first
        args, kwargs = tree_map(
            lambda x: x.dequantize() if isinstance(x, cls) else x, (args, kwargs or {})
        )
        return func(*args, **kwargs)


@contextmanager
def loaded(folder: Path):
    engine = {
        "transformer_engine.pytorch.tensor": SimpleNamespace(
            QuantizedTensor=StoredInFP8
        )
    }
    with parallel(), patch.object(tensor_map, "sys", SimpleNamespace(modules=engine)):
        model = build_megatron(
            read_hf_config(folder), "hybrid", params_dtype=torch.bfloat16
        )
        linear = model.decoder.layers[1].mlp.linear_fc2
        first = linear.weight.detach().clone()
        linear.weight = nn.Parameter(StoredInFP8(first))
        linear.weight.get_high_precision_init_val = lambda: first
        load_hf_weights(model, folder)
        yield model


def exports_have_its_values(folder: Path, target: Path) -> None:
    source = SafetensorsFolder(folder)
    with loaded(folder) as model:
        weight = model.get_parameter(FC2)
        assert isinstance(weight, StoredInFP8)
        # Megatron's optimizer starts its fp32 copy from the file's values, not from
        # those in FP8.
        assert torch.equal(weight.get_high_precision_init_val(), source.read(KEY))
        values = weight.dequantize()
        assert not torch.equal(values, source.read(KEY))
        state = megatron_state(model)
        assert type(state[FC2]) is Tensor
        assert torch.equal(state[FC2], values)
        save_hf_weights(model, target, like=folder)
        saved = SafetensorsFolder(target)
    for key in source.specs:
        expected = values if key == KEY else source.read(key)
        assert torch.equal(saved.read(key), expected), key


def test_a_weight_whose_initial_values_were_cleared_is_filled():
    """As Transformer Engine's after the optimizer took them."""
    weight = nn.Parameter(torch.zeros(2))
    weight.get_high_precision_init_val = lambda: None
    assert megatron_model._copy_values(weight, torch.ones(2))
    assert torch.equal(weight, torch.ones(2))


def test_an_export_has_the_values_of_weights_stored_in_fp8(pools, hf_folder, tmp_path):
    pools(1).run(exports_have_its_values, hf_folder("dense"), tmp_path / "saved")
