"""Run on every rank: the layer under torch's fully_shard (FSDP2)."""

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from tests.distributed.layer_laws import build_layer, randomise_
from tests.parallel import assert_close, group_of_one, make_config, parallel


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
