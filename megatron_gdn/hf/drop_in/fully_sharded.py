"""``A_log`` and ``dt_bias`` under torch's ``fully_shard``: groups of their own, in fp32."""

from __future__ import annotations

from typing import Any

from torch import nn

from .gates import SSMGate


def shard_gates(model: nn.Module, **options: Any) -> None:
    """Give the fp32 gates of every replaced module a ``fully_shard`` group of its own.

    Call it before ``fully_shard`` of the layers around them, which wants parameters of one dtype:

        shard_gates(model, mesh=mesh)
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)

    Args:
        model: a patched model.
        options: of ``fully_shard``, without ``mp_policy``: the gates are never rounded.

    Raises:
        ValueError: a model without replaced modules.
    """
    from torch.distributed.fsdp import fully_shard

    holders = [module for module in model.modules() if isinstance(module, SSMGate)]
    if not holders:
        raise ValueError(
            f"{type(model).__name__} has no fp32 gates to shard; patch it first: "
            f"megatron_gdn.hf.patch(model)."
        )
    for holder in holders:
        fully_shard(holder, **options)
