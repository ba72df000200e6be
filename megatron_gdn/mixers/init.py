"""Initialisation that does not depend on how many ranks share a parameter.

Every rank of a tensor-parallel group draws the whole parameter from the same seed and keeps its
share. (Megatron draws each rank's share from a stream of that rank, or, on the CPU, cuts a fused
projection without regard to its sections.)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


def device_for(config: Any) -> torch.device:
    """The device on which a mixer builds its own parameters, for this config and machine.

    Never the meta device, also under ``--init-model-with-meta-device``: after ``to_empty`` Megatron
    resets no module, and Megatron-FSDP would fill the projections again, after it sharded them.
    """
    if config.use_cpu_initialization or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def take_share(whole: Tensor, dim: int, sections: Sequence[int], rank: int, size: int) -> Tensor:
    """Rank ``rank``'s share of every section of ``whole``'s dimension ``dim``, end to end."""
    return torch.cat([s.chunk(size, dim)[rank] for s in whole.split(list(sections), dim)], dim)


def first_dt_bias(low: float, high: float, floor: float = 0.0) -> Callable[[Tensor], object]:
    """Fills a tensor so that its softplus is ``exp U(log low, log high)``, at least ``floor``."""

    def fill(x: Tensor) -> None:
        dt = x.uniform_(math.log(low), math.log(high)).exp_().clamp_(min=floor)
        x.copy_(dt + torch.log(-torch.expm1(-dt)))

    return fill


InitShare = Callable[[Tensor | None, Callable[[Tensor], object], int, Sequence[int]], None]


def init_shares_of(group: Any) -> InitShare:
    """``init(parameter, method, dim, sections)`` fills this rank's share of a whole parameter.

    ``method`` fills the whole one in place, in fp32, from torch's default generators. ``sections``
    are its global sizes along ``dim``, each split by itself. A parameter that is None is skipped;
    for one on the meta device only the seed is drawn.
    """

    @torch.no_grad()
    def init(
        parameter: Tensor | None,
        method: Callable[[Tensor], object],
        dim: int,
        sections: Sequence[int],
    ) -> None:
        if parameter is None:
            return
        # From the CPU's generator, which Megatron keeps alike in the group; not the default device.
        seed = int(torch.randint(2**62, (), device="cpu"))
        if parameter.is_meta:
            return
        shape = list(parameter.shape)
        shape[dim] = sum(sections)
        whole = torch.empty(shape, dtype=torch.float32, device=parameter.device)
        on_gpu = [parameter.device] if parameter.is_cuda else []
        with torch.random.fork_rng(devices=on_gpu):
            if on_gpu:
                with torch.cuda.device(parameter.device):
                    torch.cuda.manual_seed(seed)
            else:
                torch.default_generator.manual_seed(seed)
            method(whole)
        parameter.copy_(take_share(whole, dim, sections, group.rank(), group.size()))

    return init
