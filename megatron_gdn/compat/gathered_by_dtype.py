"""Lets Megatron's layer-wise optimizer (Muon) gather parameters of different dtypes.

With ``--no-use-layer-wise-param-layout``, and where Megatron makes no layout, each data-parallel
rank updates whole parameters and gathers those of the others. megatron-core 0.19 flattens the
parameters of a rank into one tensor. Where fp32 ``A_log`` and 16-bit weights are on one rank it is
fp32; where a rank has 16-bit ones alone it is not. NCCL then sends bytes that the receiver reads as
another dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_LISTS = {"dp_cp_params_list": "dp_cp", "expt_dp_params_list": "expt_dp"}


def with_gathers_by_dtype(allgather_params: Callable) -> Callable:
    """Wrap ``LayerWiseDistributedOptimizer.allgather_params``.

    fp32 parameters of a 16-bit model, which are small, are sent by their ranks one by one;
    Megatron's function gathers the others.
    """

    @torch.no_grad()
    def allgather_params_by_dtype(self) -> None:
        groups = self.pg_collection
        whole = {name: getattr(self, name, None) for name in _LISTS}
        try:
            for name, group in _LISTS.items():
                lists = whole[name]
                if groups is not None and lists and len({p.dtype for ps in lists for p in ps}) > 1:
                    setattr(self, name, _without_fp32_ones(lists, getattr(groups, group)))
            allgather_params(self)
        finally:
            vars(self).update(whole)

    return allgather_params_by_dtype


def _without_fp32_ones(lists: list[list[Tensor]], group: Any) -> list[list[Tensor]] | None:
    """Send every fp32 parameter from its rank to the others, and return the other parameters.

    None if rank 0, of whose list Megatron reads the first, has no other: then all are sent here.
    """
    others = [[p for p in ps if p.dtype != torch.float32] for ps in lists]
    for rank, parameters in enumerate(lists):
        for parameter in parameters:
            if parameter.dtype == torch.float32 or not others[0]:
                dist.broadcast(parameter.data, dist.get_global_rank(group, rank), group)
    return others if others[0] else None
