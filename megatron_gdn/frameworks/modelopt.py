"""Registers our layer for modelopt's pruning."""

from __future__ import annotations

from dataclasses import replace


def register_pruning() -> None:
    """Let modelopt's ``mcore_minitron`` prune the hidden size of models with our layer.

    modelopt looks up layers by class. After this call modelopt prunes the columns of ``in_proj``
    and the rows of ``out_proj`` of our layer, as of Megatron's layer, and keeps the heads.

    Raises:
        ImportError: modelopt, or its Megatron plugin (which needs Transformer Engine), is missing.
    """
    from modelopt.torch.nas.plugins import (  # pyright: ignore[reportMissingImports]
        megatron as plugin,
    )
    from modelopt.torch.nas.registry import DMRegistry  # pyright: ignore[reportMissingImports]

    from ..gdn.layer import GatedDeltaNet

    if GatedDeltaNet in plugin._ATTENTION_TYPES:
        return

    class PrunedGatedDeltaNet(plugin._DynamicGatedDeltaNet):
        def export(self):
            layer = super().export()
            layer.hidden_size = layer.out_proj.out_features
            layer.global_dims = replace(layer.global_dims, hidden_size=layer.hidden_size)
            layer.dims = layer.global_dims.shard(layer.tp_size)
            return layer

    DMRegistry.register({GatedDeltaNet: "megatron_gdn.GatedDeltaNet"})(PrunedGatedDeltaNet)
    plugin._ATTENTION_TYPES += (GatedDeltaNet,)
