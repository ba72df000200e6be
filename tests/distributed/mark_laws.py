"""Run on every rank: what must not hang on a parameter object, when the object is replaced."""

import copy
from collections.abc import Callable

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.distributed.finalize_model_grads import (
    _allreduce_non_tensor_model_parallel_grads,
)
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.spec_utils import build_module
from torch import nn

from megatron_gdn.specs import gated_delta_net_spec
from tests.distributed.layer_laws import randomise_
from tests.distributed.mixers import GDN
from tests.parallel import assert_close, group_of_one, make_config, parallel


class NormInside(nn.Module):
    """A norm that only can be called, whose parameters belong to a module inside it."""

    def __init__(self, config, hidden_size, eps):
        super().__init__()
        self.inner = nn.RMSNorm(hidden_size, eps)
        self.shift = nn.Parameter(torch.zeros(hidden_size))

    def forward(self, x):
        return self.inner(x) + self.shift


def layer_with(config, groups, called: bool, **options):
    spec = gated_delta_net_spec("local", **options)
    if called:
        spec.submodules.out_norm = NormInside
    return build_module(spec, config, layer_number=1, pg_collection=groups)


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


def gradients_equal_one_rank(called: bool, sequence_parallel: bool, **options) -> None:
    """Through Megatron's own reduction, whatever replaced the parameters: every gradient."""
    with parallel(tp=2):
        alone = ProcessGroupCollection(tp=group_of_one(), cp=group_of_one())
        torch.manual_seed(7)
        one = layer_with(make_config(), alone, called, **options)
        randomise_(one)
        x, weight = torch.randn(2, 10, 1, 24)
        (one(x, None)[0] * weight).sum().backward()
        groups = ProcessGroupCollection.use_mpu_process_groups(["tp", "cp"])

        def build(**changes):
            config = make_config(
                tensor_model_parallel_size=2, sequence_parallel=sequence_parallel, **changes
            )
            return layer_with(config, groups, called, **options)

        for way, replace in WAYS.items():
            layer = replace(build)
            GDN.copy_shares(layer, one)
            ddp = DistributedDataParallel(layer.config, DistributedDataParallelConfig(), layer)
            rank = parallel_state.get_tensor_model_parallel_rank()
            x_mine, weight_mine = (
                t.chunk(2)[rank] if sequence_parallel else t for t in (x, weight)
            )
            (ddp(x_mine, None)[0] * weight_mine).sum().backward()
            ddp.finish_grad_sync()
            _allreduce_non_tensor_model_parallel_grads([ddp], layer.config)
            for name, parameter in layer.named_parameters():
                expected = GDN.share(name, one.get_parameter(name).grad, layer)
                assert expected.abs().max() > 0, name
                assert_close(f"{way}: gradient of {name}", parameter.main_grad, expected, 1e-5)


def a_called_norm_waits_for_its_parameters() -> None:
    """With ``overlap_param_gather``: every bucket is waited for, the inner norm's own one too."""
    with parallel(tp=2):
        groups = ProcessGroupCollection.use_mpu_process_groups(["tp", "cp"])
        config = make_config(tensor_model_parallel_size=2)
        layer = layer_with(config, groups, called=True)
        overlapped = DistributedDataParallelConfig(
            use_distributed_optimizer=True,
            overlap_grad_reduce=True,
            overlap_param_gather=True,
            bucket_size=1,
        )
        ddp = DistributedDataParallel(config, overlapped, layer)
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
