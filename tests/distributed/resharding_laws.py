"""Run on every rank: Megatron's planner hands weights from one tensor-parallel size to another."""

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.resharding import build_local_reshard_plan, execute_reshard_plan
from megatron.core.resharding.copy_services.base import CopyService
from torch import Tensor, nn

from tests import kda_mixers, mamba_mixers
from tests.distributed.layer_laws import build_layer, randomise_
from tests.mamba_mixers import mamba_config
from tests.parallel import make_config, parallel, share_of

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


def _build(mixer: str, tp: int) -> nn.Module:
    groups = ProcessGroupCollection.use_mpu_process_groups(["tp", "cp", "dp"])
    if mixer == "mamba2":
        config = mamba_config(mamba_num_groups=4, tensor_model_parallel_size=tp)
        return mamba_mixers.build(config, groups)
    if mixer == "kda":
        sizes = {"linear_num_key_heads": 4, "linear_value_head_dim": 8}
        config = kda_mixers.kda_config(**sizes, tensor_model_parallel_size=tp)
        return kda_mixers.build(config, groups, conv_bias=True)
    config = make_config(tensor_model_parallel_size=tp)
    return build_layer(config, groups, {"bias": True, "conv_bias": True})


def weights_that_are_not_a_share(mixer: str) -> list[str]:
    """Names, and at which size, of what is not this rank's share of the first layer's weights."""
    own = {"mamba2": mamba_mixers.share_of, "kda": kda_mixers.share_of}
    share = own.get(mixer, share_of)
    wrong, whole, source = [], {}, None
    for tp in SIZES:
        with parallel(tp=tp):
            layer = _build(mixer, tp)
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
                if not torch.equal(parameter, share(name, whole[name], layer))
            ]
            source = layer
    return wrong
