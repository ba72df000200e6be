"""What a layer is beside its mathematics, the same for each mixer of the package."""

import copy

import pytest
import torch
from megatron.core import utils
from megatron.core.transformer.spec_utils import build_module

from megatron_gdn.specs import gated_delta_net_spec
from tests import kda_mixers
from tests.distributed.layer_laws import randomise_
from tests.mamba_mixers import mamba_config, whole_mixer
from tests.parallel import make_config

pytestmark = pytest.mark.usefixtures("one_rank")


def gdn():
    layer = build_module(gated_delta_net_spec("local"), make_config(), layer_number=1)
    randomise_(layer)
    return layer


MIXERS = {
    "GatedDeltaNet": gdn,
    "Mamba2Mixer": lambda: whole_mixer(mamba_config()),
    "KimiDeltaAttention": lambda: kda_mixers.whole_mixer(kda_mixers.kda_config()),
}
each_mixer = pytest.mark.parametrize("name", MIXERS)


def gradients(layer, x):
    layer.zero_grad()
    out, _ = layer(x, None)
    out.square().sum().backward()
    return [out, *(p.grad.clone() for p in layer.parameters())]


@each_mixer
def test_a_copy_computes_the_same_and_shares_only_its_groups(name):
    layer = MIXERS[name]()
    x = torch.randn(7, 2, layer.config.hidden_size)
    expected = gradients(layer, x)
    copied = copy.deepcopy(layer)
    assert copied.pg_collection is layer.pg_collection
    assert all(map(torch.equal, gradients(copied, x), expected))
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.fill_(0.5)
    copied(x, None)
    assert layer.micro_batches is not copied.micro_batches
    assert all(map(torch.equal, gradients(layer, x), expected))


@each_mixer
def test_nvtx_ranges_are_called_by_the_mixer(name, monkeypatch):
    opened = []
    monkeypatch.setattr(utils, "_nvtx_enabled", True)
    monkeypatch.setattr(utils, "_nvtx_range_messages", [])
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", opened.append)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: None)
    layer = MIXERS[name]()
    layer(torch.randn(5, 1, layer.config.hidden_size), None)
    assert "mixer" in {message.partition(".")[2] for message in opened}
    assert {message.partition(".")[0] for message in opened} == {name}
