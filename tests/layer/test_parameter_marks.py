"""What Megatron reads on the layer's parameters is there, whatever torch made of the
objects."""

import megatron.core
import pytest
import torch
from torch import nn

from megatron_gdn.compat.versions import MUON_SPLITS_AS_ATTENTION
from tests.distributed.layer_laws import layer_with
from tests.distributed.mixers import MAMBA2_FP32
from tests.distributed.test_parameter_marks import WAYS
from tests.parallel import make_config

pytestmark = pytest.mark.usefixtures("one_rank")

SPLIT = {"tensor_model_parallel": True, "partition_stride": 1}
EXPECTED = {
    "A_log": {
        **SPLIT,
        "partition_dim": 0,
        "partition_sizes": [8],
        "keep_in_fp32": True,
    },
    "dt_bias": {
        **SPLIT,
        "partition_dim": 0,
        "partition_sizes": [8],
        "keep_in_fp32": True,
    },
    "conv1d.weight": {**SPLIT, "partition_dim": 0, "partition_sizes": [32, 32, 96]},
    "in_proj.weight": {
        **SPLIT,
        "partition_dim": 0,
        "partition_sizes": [32, 32, 96, 96, 8, 8],
        "use_muon": True,
    },
    "out_proj.weight": {**SPLIT, "partition_dim": 1},
    "out_norm.weight": {"sequence_parallel": True},
}

if not MUON_SPLITS_AS_ATTENTION.is_present():
    EXPECTED["in_proj.weight"] |= {
        "is_qkv": True,
        "qkv_split_shapes": [32, 32, 96, 96, 8, 8],
    }


def build(**changes):
    # The mark of the norm is the config's; nothing is parallel on one rank.
    config = make_config(**changes)
    config.sequence_parallel = True
    return layer_with(config, None, called=False)


def missing(parameters) -> list[tuple]:
    return [
        (name, mark, getattr(parameters[name], mark, "none"))
        for name, marks in EXPECTED.items()
        for mark, value in marks.items()
        if getattr(parameters[name], mark, "none") != value
    ]


@pytest.mark.parametrize("way", WAYS)
def test_every_mark_stays_with_the_parameters_name(way):
    assert not missing(dict(WAYS[way](build).named_parameters()))


@pytest.mark.parametrize("way", [way for way in WAYS if way != "swap_tensors"])
def test_they_are_back_before_anybody_walks_over_the_parameters(way):
    layer = WAYS[way](build)
    parts = {name: name.rpartition(".") for name in EXPECTED}
    modules = {
        path: getattr(layer, path) if path else layer for path, _, _ in parts.values()
    }
    assert not missing(
        {n: modules[path]._parameters[last] for n, (path, _, last) in parts.items()}
    )


def test_whoever_finds_a_parameter_through_the_model_finds_its_marks():
    """Where no method of the layer hears of the replacement; read as Megatron reads
    them."""
    layer = build()
    model = nn.Sequential(layer)
    layer.conv1d.load_state_dict(layer.conv1d.state_dict(), assign=True)
    layer._parameters["A_log"] = nn.Parameter(layer.A_log.detach().clone())
    assert missing({**dict.fromkeys(EXPECTED), "A_log": layer._parameters["A_log"]})
    assert not missing({name[2:]: p for name, p in model.named_parameters()})


def test_a_module_under_two_names_has_its_marks_under_both():
    """An adapter may hold the module that it wraps; whichever name comes first."""
    layer = build()
    conv = layer.conv1d
    del layer.conv1d
    layer.wrapped = conv
    layer.conv1d = conv
    conv.load_state_dict(conv.state_dict(), assign=True)
    assert not missing(dict(layer.named_parameters(remove_duplicate=False)))


def test_marks_that_somebody_changed_on_purpose_stay_changed():
    layer = build()
    layer.conv1d.weight.partition_stride = 2
    layer.conv1d.weight.of_somebody_else = "kept"
    layer = layer.double()
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try:
        layer = layer.float()  # into new parameters
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(False)
    weight = dict(layer.named_parameters())["conv1d.weight"]
    assert (weight.partition_stride, weight.of_somebody_else) == (2, "kept")


def test_mamba2s_projection_has_them_too():
    marks = vars(MAMBA2_FP32.build(MAMBA2_FP32.config(), None).in_proj.weight)
    sections = [24, 24, 10, 10, 8]
    assert marks["partition_sizes"] == sections and not marks["use_muon"]
    if not MUON_SPLITS_AS_ATTENTION.is_present():
        assert marks["is_qkv"] and marks["qkv_split_shapes"] == sections


def test_older_megatrons_are_not_told_of_sections(monkeypatch, log):
    """Muon of 0.18 would cut them in the sizes of attention's heads."""
    monkeypatch.setattr(megatron.core, "__version__", "0.18.2")
    assert not hasattr(build().in_proj.weight, "is_qkv")
    assert "as one matrix" in log.text
