"""What a layer is beside its mathematics, the same for each mixer of the package."""

import copy
from functools import partial

import pytest
import torch
from megatron.core import tensor_parallel, utils
from megatron.core.transformer.spec_utils import build_module
from torch.utils.checkpoint import checkpoint

from megatron_gdn.specs import gated_delta_net_spec
from tests import kda_mixers
from tests.distributed.layer_laws import randomise_
from tests.mamba_mixers import mamba_config, whole_mixer
from tests.parallel import make_config

pytestmark = pytest.mark.usefixtures("one_rank")


def gdn(**options):
    spec = gated_delta_net_spec("local", **options)
    layer = build_module(spec, make_config(), layer_number=1)
    randomise_(layer)
    return layer


MIXERS = {
    "GatedDeltaNet": gdn,
    "Mamba2Mixer": lambda: whole_mixer(mamba_config()),
    "KimiDeltaAttention": lambda: kda_mixers.whole_mixer(kda_mixers.kda_config()),
}
CHECKPOINTS = {
    "reentrant": partial(checkpoint, use_reentrant=True),
    "by hooks": partial(checkpoint, use_reentrant=False),
    "of Megatron": lambda layer, *args: tensor_parallel.checkpoint(layer, False, *args),
    "its own": lambda layer, *args: with_(layer, recompute_whole=True)(*args),
}
each_mixer = pytest.mark.parametrize("name", MIXERS)


def with_(layer, **settings):
    vars(layer).update(settings)
    return layer


def gradients(layer, x, run=lambda function, *args: function(*args)):
    layer.zero_grad()
    x = x.clone().requires_grad_()
    out, bias = run(layer, x, None)
    out = out if bias is None else out + bias
    out.square().sum().backward()
    return [out, x.grad, *(p.grad.clone() for p in layer.parameters())]


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


@pytest.mark.parametrize("tokens", [7, 0])
@pytest.mark.parametrize("way", CHECKPOINTS)
@pytest.mark.parametrize("name", [*MIXERS, "with biases"])
def test_inside_a_checkpoint_no_bit_changes(name, way, tokens):
    if (name, way) == ("Mamba2Mixer", "its own"):
        pytest.skip("Megatron's config has no such option for Mamba2")
    layer = gdn(bias=True) if name == "with biases" else MIXERS[name]()
    x = torch.randn(tokens, 2, layer.config.hidden_size)
    expected = gradients(layer, x)
    for _step in range(2):
        assert all(map(torch.equal, gradients(layer, x, CHECKPOINTS[way]), expected))
        assert all(parameter.is_leaf for parameter in layer.parameters())


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
