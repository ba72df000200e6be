"""Run on every rank: the layer under torch's fully_shard (FSDP2)."""

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.distributed.finalize_model_grads import (
    _allreduce_non_tensor_model_parallel_grads,
)
from megatron.core.process_groups_config import ProcessGroupCollection
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from tests.distributed.layer_laws import build_layer, randomise_
from tests.distributed.mark_laws import layer_with
from tests.parallel import assert_close, group_of_one, make_config, parallel, share_of


def _layer():
    """The same random layer on every rank, without tensor or context parallelism."""
    alone = ProcessGroupCollection(tp=group_of_one(), cp=group_of_one())
    torch.manual_seed(7)
    layer = build_layer(make_config(), alone, {})
    randomise_(layer)
    return layer


def _shard(layer, **policy) -> None:
    mesh = DeviceMesh.from_group(dist.group.WORLD, "cpu")
    fully_shard(layer, mesh=mesh, mp_policy=MixedPrecisionPolicy(**policy))


def fp32_equals_one_rank() -> None:
    """Every rank has rows of its own; gradients are averaged over them."""
    size, rank = dist.get_world_size(), dist.get_rank()
    with parallel():
        one, layer = _layer(), _layer()
        _shard(layer)
        x_all = torch.randn(size, 9, 1, 24)
        expected = one(x_all[rank], None)[0]
        torch.stack([one(x, None)[0].square().sum() for x in x_all]).mean().backward()
        out, _ = layer(x_all[rank], None)
        out.square().sum().backward()
        assert_close("output", out, expected, 1e-6)
        for name, parameter in layer.named_parameters():
            gradient = parameter.grad.full_tensor()
            assert gradient.dtype == torch.float32
            assert_close(f"gradient of {name}", gradient, one.get_parameter(name).grad, 1e-5)


def tensor_parallel_equals_one_rank(called: bool, sequence_parallel: bool) -> None:
    """tp2 x dp2: what fully_shard makes of the parameters has neither hooks nor attributes."""
    with parallel(tp=2):
        alone = ProcessGroupCollection(tp=group_of_one(), cp=group_of_one())
        groups = ProcessGroupCollection.use_mpu_process_groups(["tp", "cp"])
        torch.manual_seed(7)
        one = layer_with(make_config(), alone, called)
        randomise_(one)
        config = make_config(tensor_model_parallel_size=2, sequence_parallel=sequence_parallel)
        layer = layer_with(config, groups, called)
        with torch.no_grad():
            for name, parameter in layer.named_parameters():
                parameter.copy_(share_of(name, one.get_parameter(name), layer))
        x_all = torch.randn(2, 10, 1, 24)
        torch.stack([one(x, None)[0].square().sum() for x in x_all]).mean().backward()

        replicas = parallel_state.get_data_parallel_group()
        fully_shard(layer, mesh=DeviceMesh.from_group(replicas, "cpu"))
        x = x_all[replicas.rank()]
        x = x.chunk(2)[groups.tp.rank()] if sequence_parallel else x
        layer(x, None)[0].square().sum().backward()
        if sequence_parallel:  # then the sum over tp is Megatron's, for all norms of a model
            layer.ddp_config = DistributedDataParallelConfig()
            _allreduce_non_tensor_model_parallel_grads([layer], config)
        for name, parameter in layer.named_parameters():
            expected = share_of(name, one.get_parameter(name).grad, layer)
            assert_close(f"gradient of {name}", parameter.grad.full_tensor(), expected, 1e-5)


def refusal_of_a_norm_sharded_by_itself() -> str:
    """The layer reads its parameters before their hooks gather them, so it sees the change."""
    with parallel(tp=2):
        groups = ProcessGroupCollection.use_mpu_process_groups(["tp", "cp"])
        layer = layer_with(make_config(tensor_model_parallel_size=2), groups, called=False)
        mesh = DeviceMesh.from_group(parallel_state.get_data_parallel_group(), "cpu")
        for module in (layer.out_norm, layer):
            fully_shard(module, mesh=mesh)
        try:
            layer(torch.randn(9, 1, 24), None)
        except RuntimeError as error:
            return str(error)
        return "accepted"


def refusal_of(dtype: torch.dtype) -> str:
    """What the first forward says under a policy that casts the parameters to ``dtype``."""
    with parallel():
        layer = _layer()
        _shard(layer, param_dtype=dtype, reduce_dtype=torch.float32)
        try:
            layer(torch.randn(9, 1, 24), None)
        except ValueError as error:
            return str(error)
        return "accepted"
