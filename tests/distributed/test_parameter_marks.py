"""Two tensor-parallel ranks equal one, however torch replaced the layer's parameters.

fp32 on gloo; 1e-5 of the largest entry, as in test_every_mixer.py.
"""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

from tests.distributed.layer_laws import layer_with, randomise_
from tests.distributed.mixers import GDN
from tests.parallel import (
    alone,
    assert_close,
    groups_of_megatron,
    in_ddp,
    make_config,
    reduce_gradients,
)
from tests.ranks import on_ranks


def _assigned(build: Callable):
    layer = build()
    layer.load_state_dict(copy.deepcopy(layer.state_dict()), assign=True)
    return layer


def _converted_by_swapping(build: Callable):
    layer = build()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        layer.double().float()
        layer.load_state_dict(copy.deepcopy(layer.state_dict()))
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    return layer


def _swapped(build: Callable):
    layer = build()
    for parameter in layer.parameters():
        torch.utils.swap_tensors(parameter, nn.Parameter(parameter.detach().clone()))
    return layer


def _copied(build: Callable):
    return copy.deepcopy(nn.Sequential(build()))[0]


WAYS = {
    "built": lambda build: build(),
    "to_empty": lambda build: build().to("meta").to_empty(device="cpu"),
    "cast": lambda build: build().double().float(),
    "load_state_dict(assign=True)": _assigned,
    "swap on conversion": _converted_by_swapping,
    "swap_tensors": _swapped,
    "deepcopy": _copied,
}


@pytest.mark.each_value
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["", "sp"])
@pytest.mark.parametrize(
    "called", [False, True], ids=["fused norm", "norm as a module"]
)
@on_ranks(tp=2)
def test_gradients_do_not_hang_on_parameter_objects(called, sequence_parallel):
    """Through Megatron's own reduction, whatever replaced the parameters: every
    gradient."""
    torch.manual_seed(7)
    one = layer_with(make_config(), alone(), called)
    randomise_(one)
    x, weight = torch.randn(2, 10, 1, 24)
    (one(x, None)[0] * weight).sum().backward()
    groups = groups_of_megatron()
    config = make_config(
        tensor_model_parallel_size=2, sequence_parallel=sequence_parallel
    )
    if sequence_parallel:
        x, weight = (t.chunk(2)[groups.tp.rank()] for t in (x, weight))
    for way, replace in WAYS.items():
        layer = replace(lambda: layer_with(config, groups, called))
        GDN.copy_shares(layer, one)
        ddp = in_ddp(layer)
        (ddp(x, None)[0] * weight).sum().backward()
        reduce_gradients(ddp)
        for name, parameter in layer.named_parameters():
            expected = GDN.share(name, one.get_parameter(name).grad, layer)
            assert expected.abs().max() > 0, name
            assert_close(
                f"{way}: gradient of {name}", parameter.main_grad, expected, 1e-5
            )


@on_ranks(tp=2)
def test_a_norm_that_is_called_waits_for_its_parameters():
    """With ``overlap_param_gather``: every bucket is waited for, the inner norm's own
    one too."""
    config = make_config(tensor_model_parallel_size=2)
    layer = layer_with(config, groups_of_megatron(), called=True)
    overlapped = {
        "overlap_grad_reduce": True,
        "overlap_param_gather": True,
        "bucket_size": 1,
    }
    ddp = in_ddp(layer, use_distributed_optimizer=True, **overlapped)
    ready = []
    for name, parameter in layer.named_parameters():
        bucket = ddp.param_to_bucket_group[parameter]
        bucket.finish_param_sync = lambda name=name, **_: ready.append(name)
    read = layer.out_norm.inner.forward

    def forward(x):
        assert {"out_norm.inner.weight", "out_norm.shift"} <= set(ready), ready
        return read(x)

    layer.out_norm.inner.forward = forward
    ddp(torch.randn(4, 1, 24), None)
    assert set(ready) == {name for name, _ in layer.named_parameters()}
