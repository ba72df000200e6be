"""Run on every rank by tests/layer/test_upstream_flaws.py, on our layer or on upstream's."""

import warnings

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.distributed.finalize_model_grads import (
    _allreduce_non_tensor_model_parallel_grads,
)
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.spec_utils import build_module

from megatron_gdn import GDNDims, SequenceLayout
from megatron_gdn.context_parallel import local_indices
from megatron_gdn.mixers.init import take_share
from tests.distributed.layer_laws import thd
from tests.parallel import (
    assert_close,
    group_of_one,
    make_config,
    parallel,
    sections_of,
)
from tests.upstream import gdn_module, layer_spec


def build(config, groups=None, **params):
    groups = groups or ProcessGroupCollection.use_mpu_process_groups(["tp", "cp"])
    return build_module(layer_spec(**params), config, pg_collection=groups)


def out_norm_gradient_is_the_sum_over_ranks() -> None:
    with parallel(tp=2):
        alone = ProcessGroupCollection(tp=group_of_one(), cp=group_of_one())
        one = build(make_config(), alone)
        config = make_config(tensor_model_parallel_size=2)
        layer = build(config)
        dims = GDNDims.from_config(config)
        with torch.no_grad():
            for name, parameter in layer.named_parameters():
                split = sections_of(name, dims.layout, dims)
                whole = one.get_parameter(name)
                rank = parallel_state.get_tensor_model_parallel_rank()
                parameter.copy_(whole if split is None else take_share(whole, *split, rank, 2))
        x = torch.randn(9, 1, 24)
        one(x, None)[0].square().sum().backward()
        ddp = DistributedDataParallel(config, DistributedDataParallelConfig(), layer)
        ddp(x, None)[0].square().sum().backward()
        ddp.finish_grad_sync()
        _allreduce_non_tensor_model_parallel_grads([ddp], config)
        assert_close("out_norm", layer.out_norm.weight.main_grad, one.out_norm.weight.grad, 1e-5)


def lengths_are_refused(lengths) -> None:
    with parallel(cp=2):
        layer = build(make_config(context_parallel_size=2))
        try:
            layer(torch.randn(sum(lengths) // 2, 1, 24), None, packed_seq_params=thd(lengths))
        except ValueError as error:
            assert "multiple of 4" in str(error), error
        else:
            raise AssertionError("accepted")


def whole_buffer_zigzag_equals_one_rank() -> None:
    lengths = (3, 9)
    with parallel(cp=2):
        alone = ProcessGroupCollection(tp=group_of_one(), cp=group_of_one())
        one = build(make_config(), alone)
        layer = build(make_config(context_parallel_size=2), cp_layout="zigzag_buffer")
        layer.load_state_dict(one.state_dict())
        x = torch.randn(12, 1, 24)
        rank = parallel_state.get_context_parallel_rank()
        held = local_indices(lengths, 2, rank, SequenceLayout.ZIGZAG_BUFFER)
        expected, _ = one(x, None, packed_seq_params=thd(lengths))
        actual, _ = layer(x[held], None, packed_seq_params=thd(lengths))
        assert_close("output", actual, expected[held], 1e-5)


def micro_batch_group_is_used() -> None:
    """A layer built for two ranks runs this micro-batch on one."""
    with parallel(cp=2):
        layer = build(make_config(context_parallel_size=2))
        alone = ProcessGroupCollection(tp=group_of_one(), cp=group_of_one())
        one = build(make_config(), alone)
        one.load_state_dict(layer.state_dict())
        packed = thd((8, 4))
        packed.cp_group, packed.local_cp_size = group_of_one(), 1
        x = torch.randn(12, 1, 24)
        actual, _ = layer(x, None, packed_seq_params=packed)
        expected, _ = one(x, None, packed_seq_params=thd((8, 4)))
        assert_close("output", actual, expected, 1e-5)


def projection_bias_reshards(folder: str) -> None:
    with parallel(tp=2):
        layer = build(make_config(tensor_model_parallel_size=2), bias=True)
        dims = GDNDims.from_config(layer.config)
        whole = torch.arange(float(dims.layout.width))
        rank = parallel_state.get_tensor_model_parallel_rank()
        with torch.no_grad():
            layer.in_proj.bias.copy_(take_share(whole, 0, dims.layout.widths, rank, 2))
        dist_checkpointing.save(layer.sharded_state_dict("layer."), folder)
    with parallel(tp=1):
        layer = build(make_config(), bias=True)
        state = dist_checkpointing.load(layer.sharded_state_dict("layer."), folder)
        assert torch.equal(state["layer.in_proj.bias"], whole)


def initial_weights() -> dict[str, torch.Tensor]:
    size = dist.get_world_size()
    with parallel(tp=size):
        layer = build(make_config(tensor_model_parallel_size=size), conv_bias=True)
        return {name: parameter.detach() for name, parameter in layer.named_parameters()}


def expected_share(name: str, whole: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    dims = GDNDims.from_config(make_config())
    split = sections_of(name, dims.layout, dims)
    return whole if split is None else take_share(whole, *split, rank, size)


def parameter_slice_raises_no_warning() -> None:
    module = gdn_module()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        module.get_parameter_local_cp(torch.zeros(4, 3), 0, dist.group.WORLD)
