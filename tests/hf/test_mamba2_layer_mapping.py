"""The laws of a Mamba2 mixer's weight mapping: nothing but torch, at sizes where mistakes show."""

import pytest
import torch

from megatron_gdn.hf import mamba2_layer_from_hf, mamba2_layer_to_hf
from megatron_gdn.mamba2.hf import mamba2_layer_maps
from megatron_gdn.mamba2.sizes import Mamba2Dims

DIMS = Mamba2Dims(
    hidden_size=7, num_heads=12, num_groups=4, head_dim=3, state_dim=5, conv_kernel_dim=4
)


def random_file(conv_bias=True, dtype=torch.bfloat16, wide=()):
    torch.manual_seed(0)
    return {
        source.key: torch.randn(source.shape).to(torch.float32 if source.key in wide else dtype)
        for entry in mamba2_layer_maps("", "", DIMS, conv_bias)
        for source in entry.sources
    }


@pytest.mark.parametrize("tp_size", [1, 2, 4])
@pytest.mark.parametrize("conv_bias", [True, False], ids=["conv bias", "no conv bias"])
@pytest.mark.parametrize("wide", [(), ("A_log", "D")], ids=["all bf16", "some fp32"])
def test_file_to_shards_to_file_is_equal_in_bits_and_dtype(tp_size, conv_bias, wide):
    file = random_file(conv_bias, wide=wide)
    ranks = mamba2_layer_from_hf(file, DIMS, tp_size)
    for rank in ranks:
        assert {rank[name].dtype for name in ("A_log", "dt_bias", "D")} == {torch.float32}
        assert rank["in_proj.weight"].shape == (DIMS.shard(tp_size).layout.width, 7)
    back = mamba2_layer_to_hf(ranks, DIMS, {key: tensor.dtype for key, tensor in file.items()})
    assert back.keys() == file.keys()
    for key, tensor in file.items():
        assert back[key].dtype == tensor.dtype and torch.equal(back[key], tensor), key


def test_a_ranks_rows_are_its_share_of_every_section():
    file = random_file()
    z, x, B, C, dt = file["in_proj.weight"].split(DIMS.layout.widths)
    for rank, state in enumerate(mamba2_layer_from_hf(file, DIMS, 2)):
        expected = torch.cat([section.chunk(2)[rank] for section in (z, x, B, C, dt)])
        assert torch.equal(state["in_proj.weight"], expected)


def test_what_does_not_fit_is_named():
    file = random_file()
    with pytest.raises(ValueError, match=r"not known \['in_proj.bias'\]"):
        mamba2_layer_from_hf({**file, "in_proj.bias": torch.zeros(3)}, DIMS)
    with pytest.raises(ValueError, match="D has shape .3,., but the layer's sizes ask for .12,."):
        mamba2_layer_from_hf({**file, "D": torch.zeros(3)}, DIMS)
    with pytest.raises(ValueError, match="tensor_model_parallel_size=3 cannot split 4 groups"):
        mamba2_layer_from_hf(file, DIMS, 3)
