"""The laws of layers' weight mappings: nothing but torch, at sizes where mistakes
show."""

from typing import get_args

import pytest
import torch

from megatron_gdn.gdn.hf import PROJECTIONS, gdn_layer_maps
from megatron_gdn.hf import layer_from_hf, layer_to_hf
from megatron_gdn.hf.layers import _layer_maps
from megatron_gdn.kda.hf import KDAFamily
from megatron_gdn.kda.sizes import KDADims
from megatron_gdn.mamba2.hf import mamba2_layer_maps
from megatron_gdn.mamba2.sizes import Mamba2Dims
from megatron_gdn.mixers.tensor_map import TensorMap, bits_of
from tests.gdn_mixer import gdn_dims
from tests.parallel import share_of_rank

BF16 = torch.bfloat16
F32 = torch.float32
# What the published files hold: Qwen3.5 has two fp32 tensors a layer, the others none.
FILE_DTYPES = {
    "all bf16": {},
    "fp32 A_log and norm": {"A_log": F32, "norm.weight": F32, "o_norm.weight": F32},
    "sections that differ": {
        "in_proj_a.weight": F32,
        "in_proj_b.weight": torch.float16,
    },
}


def dims_of(key_heads=4, value_heads_per_key_head=3, key_dim=5, value_dim=3):
    # K != V and D unlike any product of the others, so that no two sizes agree by
    # chance.
    return gdn_dims(
        7, key_heads, key_heads * value_heads_per_key_head, key_dim, value_dim
    )


def random_file(dims, storage, dtypes=(), seed=0):
    """A layer as a file holds it; gains straddle 1/2, below which bf16 cannot hold w -
    1."""
    generator = torch.Generator().manual_seed(seed)
    dtypes = dict(dtypes)
    state = {}
    for entry in gdn_layer_maps("", "", dims, storage):
        for source in entry.sources:
            values = torch.randn(source.shape, generator=generator)
            if source.key.endswith("norm.weight"):
                values = torch.logspace(-4.5, 1.0, source.shape[0]) * values.sign()
            state[source.key] = values.to(dtypes.get(source.key, BF16))
    return state


def dtypes_of(file):
    return {key: tensor.dtype for key, tensor in file.items()}


def assert_same_file(given, expected):
    assert given.keys() == expected.keys()
    for key, tensor in expected.items():
        assert given[key].dtype == tensor.dtype, key
        assert torch.equal(given[key], tensor), key


@pytest.mark.each_pair
@pytest.mark.parametrize(
    "storage", ["interleaved", "flat", "separate", "separate, one conv"]
)
@pytest.mark.parametrize("ratio", [1, 2, 3, 4])
@pytest.mark.parametrize("tp_size", [1, 2, 4])
@pytest.mark.parametrize("dtypes", FILE_DTYPES.values(), ids=FILE_DTYPES)
def test_file_to_shards_to_file_is_equal_in_bits_and_dtype(
    storage, ratio, tp_size, dtypes
):
    dims = dims_of(value_heads_per_key_head=ratio)
    file, before = (random_file(dims, storage, dtypes) for _ in range(2))
    ranks = layer_from_hf(file, dims, tp_size, storage=storage)
    assert_same_file(file, before)
    # An fp32 gain below 1/2 has bits that fp32 cannot keep beside the 1: it needs its
    # original.
    originals = {}
    if "norm.weight" in dtypes:
        (norm,) = (key for key in file if key.endswith("norm.weight"))
        originals[norm] = file[norm]
    back = layer_to_hf(ranks, dims, dtypes_of(file), originals, storage=storage)
    assert_same_file(back, file)


def test_a_trained_gain_is_exported_as_trained_and_its_neighbours_as_they_were():
    gain = random_file(dims_of(), "flat")["norm.weight"]
    (entry,) = (e for e in gdn_layer_maps("", "", dims_of(), "flat") if e.shift)
    stored = entry.to_megatron([gain])
    stored[1] = 0.25
    (back,) = entry.to_hf(stored, [BF16], [gain])
    assert back[1] == 1.25
    assert torch.equal(back[[0, 2]], gain[[0, 2]])


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_a_tensor_is_exported_in_the_dtype_that_is_asked_for(dtype):
    """Whatever its original's."""
    gain = random_file(dims_of(), "flat")["norm.weight"]
    (entry,) = (e for e in gdn_layer_maps("", "", dims_of(), "flat") if e.shift)
    stored = entry.to_megatron([gain])
    for original, asked in ((gain.to(dtype), BF16), (gain, dtype)):
        (back,) = entry.to_hf(stored, [asked], [original])
        assert back.dtype == asked


def test_sections_that_ranks_cannot_share_are_refused():
    dims = dims_of()
    (entry,) = (
        e for e in gdn_layer_maps("", "", dims, "flat") if e.name == "in_proj.weight"
    )
    full = torch.zeros(dims.layout.width, dims.hidden_size)
    with pytest.raises(ValueError, match="in_proj.weight: .* do not split over 5"):
        entry.shards(full, 5)


@pytest.mark.parametrize(
    ("change", "tp_size", "said"),
    [
        ({"dt_bias": None}, 1, r"missing \['dt_bias'\]"),
        ({"my_A_log": torch.ones(12)}, 1, r"not known \['my_A_log'\]"),
        ({"A_log": torch.ones(3)}, 1, r"A_log has shape \(3,\).*\(12,\)"),
        (
            {"dt_bias": torch.ones(12, dtype=torch.int8)},
            1,
            "dt_bias has dtype int8; legal for dt_bias: bfloat16",
        ),
        ({}, 3, "=3 cannot split 4 key heads.*1, 2, 4"),
    ],
)
def test_what_does_not_fit_is_named(change, tp_size, said):
    file = random_file(dims_of(), "flat") | change
    file = {key: tensor for key, tensor in file.items() if tensor is not None}
    with pytest.raises(ValueError, match=said):
        layer_from_hf(file, dims_of(), tp_size, storage="flat")


def test_ranks_that_disagree_on_a_replicated_tensor_are_refused():
    dims = dims_of()
    ranks = layer_from_hf(random_file(dims, "flat"), dims, 2, storage="flat")
    ranks[1]["out_norm.weight"] = ranks[1]["out_norm.weight"] + 1
    with pytest.raises(
        ValueError, match=r"out_norm.weight is replicated.*rank 1 differs"
    ):
        layer_to_hf(ranks, dims, storage="flat")


def test_every_bf16_gain_survives_alone():
    """All 65536 bf16 numbers, NaN and -0 too, through a zero-centred weight, with the
    original."""
    gains = torch.arange(-(2**15), 2**15).to(torch.int16).view(BF16)
    dims = dims_of(1, 1, 1, len(gains))
    (entry,) = (
        e for e in gdn_layer_maps("", "", dims, "flat") if e.name == "out_norm.weight"
    )
    stored = entry.to_megatron([gains]).to(BF16)
    (back,) = entry.to_hf(stored, [BF16], [gains])
    assert torch.equal(back.view(torch.int16), gains.view(torch.int16))
    (blind,) = entry.to_hf(stored, [BF16])
    finite = gains.isfinite()
    lost = not torch.equal(blind[finite], gains[finite])
    assert lost, "bf16 cannot do this without the original"


MAMBA2 = Mamba2Dims(
    hidden_size=7,
    num_heads=12,
    num_groups=4,
    head_dim=3,
    state_dim=5,
    conv_kernel_dim=4,
)


def mamba2_file(conv_bias=True, wide=()):
    torch.manual_seed(0)
    return {
        source.key: torch.randn(source.shape).to(F32 if source.key in wide else BF16)
        for entry in mamba2_layer_maps("", "", MAMBA2, conv_bias)
        for source in entry.sources
    }


@pytest.mark.parametrize("tp_size", [1, 2, 4])
@pytest.mark.parametrize("conv_bias", [True, False], ids=["conv bias", "no conv bias"])
@pytest.mark.parametrize("wide", [(), ("A_log", "D")], ids=["all bf16", "some fp32"])
def test_mamba2s_file_to_shards_to_file_is_equal_in_bits_and_dtype(
    tp_size, conv_bias, wide
):
    file = mamba2_file(conv_bias, wide)
    ranks = layer_from_hf(file, MAMBA2, tp_size, conv_bias=conv_bias)
    for rank in ranks:
        assert {rank[name].dtype for name in ("A_log", "dt_bias", "D")} == {F32}
        assert rank["in_proj.weight"].shape == (MAMBA2.shard(tp_size).layout.width, 7)
    assert_same_file(
        layer_to_hf(ranks, MAMBA2, dtypes_of(file), conv_bias=conv_bias), file
    )


def test_mamba2s_rows_are_a_ranks_share_of_every_section():
    file = mamba2_file()
    sections = file["in_proj.weight"].split(MAMBA2.layout.widths)
    for rank, state in enumerate(layer_from_hf(file, MAMBA2, 2)):
        expected = torch.cat([section.chunk(2)[rank] for section in sections])
        assert torch.equal(state["in_proj.weight"], expected)


KDA = {"hidden_size": 7, "num_key_heads": 4, "num_value_heads": 12}
KDA |= {"key_head_dim": 5, "value_head_dim": 3, "conv_kernel_dim": 4}
STORED = {
    **{storage: (dims_of(), {"storage": storage}) for storage in PROJECTIONS},
    "mamba2": (MAMBA2, {}),
    **{
        f"{family}, ranks {ranks}": (
            KDADims(**KDA, forget_rank=ranks[0], output_rank=ranks[1]),
            {"family": family, "in_files": family != "glm5_next"},
        )
        for family in get_args(KDAFamily)
        for ranks in ((0, 0), (2, 0), (0, 2), (2, 2))
    },
}


@pytest.mark.parametrize(("dims", "stored"), STORED.values(), ids=STORED)
def test_a_ranks_share_is_as_large_as_a_layer_of_its_sizes(dims, stored):
    def shapes_of(dims, ranks):
        """A Kimi Delta Attention's b_proj is whole on every rank."""
        return {
            (entry.name, shard.shape)
            for entry in _layer_maps(dims, stored)
            for shard in entry.shards(
                entry.to_megatron([torch.zeros(x.shape) for x in entry.sources]), ranks
            )
            if entry.name != "beta_proj.weight"
        }

    for ranks in (2, 4):
        assert shapes_of(dims, ranks) == shapes_of(dims.shard(ranks), 1)


@pytest.mark.parametrize(("dims", "stored"), STORED.values(), ids=STORED)
def test_a_ranks_share_is_that_of_the_layer(dims, stored):
    """Of every parameter, as `share_of_rank` of the other laws cuts it."""
    for entry in _layer_maps(dims, stored):
        sources = [torch.randn(x.shape) for x in entry.sources]
        full = entry.to_megatron(sources)
        for rank, share in enumerate(entry.shards(full, 2)):
            expected = share_of_rank(entry.name, full, dims, rank, 2)
            assert torch.equal(share, expected), entry.name


def test_a_file_in_fp64_is_read_but_for_parameters_that_are_fp32():
    """An fp32 parameter would lose bits that the file has."""
    weight = TensorMap(names=("weight",), sources=())
    gate = TensorMap(names=("A_log",), sources=(), fp32=True)
    weight.check_dtype(torch.float64, "file")
    gate.check_dtype(torch.float64, "file", may_round=True)
    gate.check_dtype(torch.float32, "file")
    with pytest.raises(ValueError, match="file has dtype float64; legal for A_log: b"):
        gate.check_dtype(torch.float64, "file")
    for tensor in (weight, gate):
        with pytest.raises(ValueError, match="float8_e4m3fn"):
            tensor.check_dtype(torch.float8_e4m3fn, "file", may_round=True)


def test_sizes_of_another_layer_are_refused():
    with pytest.raises(TypeError, match="dims is a int; give the sizes.* GDNDims"):
        layer_to_hf([{}], 5)


@pytest.mark.parametrize(
    "dtype", [torch.float8_e4m3fn, BF16, torch.float16, F32, torch.float64]
)
def test_bits_are_one_integer_per_element(dtype):
    """NaN is equal to itself, and -0 is not 0."""
    x = torch.tensor([[0.0, -0.0, float("nan")], [1, 2, 3]]).to(dtype).T
    bits = bits_of(x)
    assert bits.shape == x.shape and not bits.is_floating_point()
    assert torch.equal(bits, bits_of(x.clone())) and bits[0, 0] != bits[1, 0]
