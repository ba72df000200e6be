"""Weights that Megatron reshards between models (refit) are shares of the same layer everywhere."""

import pytest
import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.resharding import build_local_reshard_plan, execute_reshard_plan
from megatron.core.resharding.copy_services.base import CopyService
from torch import Tensor, nn

from tests.distributed.layer_laws import randomise_
from tests.distributed.mixers import BY_NAME
from tests.parallel import parallel
from tests.ranks import on_ranks

SIZES = (1, 2, 4, 1)


class PointToPoint(CopyService):
    """Each transfer is a message of torch's; Megatron's own service over gloo asks for CUDA."""

    def __init__(self) -> None:
        super().__init__()
        self._sends: list[tuple[Tensor, int, int]] = []
        self._receives: list[tuple[Tensor, int, int]] = []

    def submit_send(self, src_tensor, dest_rank, task_id=None) -> None:
        self._sends.append((src_tensor.detach().clone(), dest_rank, task_id))

    def submit_recv(self, dest_tensor, src_rank, task_id=None) -> None:
        self._receives.append((dest_tensor, src_rank, task_id))

    def run(self) -> None:
        here = {task: tensor for tensor, rank, task in self._sends if rank == self.rank}
        work = [dist.isend(t, r, tag=task) for t, r, task in self._sends if r != self.rank]
        for tensor, rank, task in self._receives:
            if rank == self.rank:
                tensor.copy_(here[task])
            else:
                dist.recv(tensor, rank, tag=task)
        for one in work:
            one.wait()


# Sizes and options for four tensor-parallel ranks.
KINDS = {
    "gdn": ({}, {"bias": True, "conv_bias": True}),
    "mamba2": ({"mamba_num_groups": 4}, {}),
    "kda": ({"linear_num_key_heads": 4, "linear_value_head_dim": 8}, {"conv_bias": True}),
}


@pytest.mark.parametrize("mixer", KINDS)
@on_ranks(4)
def test_one_rank_to_two_to_four_to_one_is_the_identity(mixer):
    (sizes, options), kind = KINDS[mixer], BY_NAME[mixer]
    wrong, whole, source = [], {}, None
    for tp in SIZES:
        with parallel(tp=tp):
            groups = ProcessGroupCollection.use_mpu_process_groups(["tp", "cp", "dp"])
            config = kind.config(tensor_model_parallel_size=tp, **sizes)
            layer = kind.build(config, groups, **options)
            if source is None:
                torch.manual_seed(3)
                randomise_(layer)
                whole = {name: p.detach().clone() for name, p in layer.named_parameters()}
            else:
                for parameter in layer.parameters():
                    nn.init.constant_(parameter, float("nan"))
                plan = build_local_reshard_plan(source, layer)
                execute_reshard_plan(plan, source, layer, PointToPoint())
            wrong += [
                f"{name} at tp {tp}"
                for name, parameter in layer.named_parameters()
                if not torch.equal(parameter, kind.share(name, whole[name], layer))
            ]
            source = layer
    assert not wrong
