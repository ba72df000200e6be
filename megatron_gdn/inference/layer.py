"""The states of a model's recurrent layers."""

from __future__ import annotations

from collections.abc import Hashable

import torch

from ..mixers.generation.mixer import GeneratingMixer
from ..ops.generation.carry import CarryShape
from ..ops.generation.requests import RequestPool


def pool_for(model: torch.nn.Module, slots: int, device: torch.device | None = None) -> RequestPool:
    """The slots of requests for all recurrent layers of ``model`` on this rank.

    Args:
        slots: the most requests at a time.
        device: where the states lie; None: where the layers' parameters do.

    Raises:
        ValueError: no layer of the model carries a state.
    """
    layers = {
        module.layer_number: module
        for module in model.modules()
        if isinstance(module, GeneratingMixer)
    }
    if not layers:
        raise ValueError("no layer of this model carries a state.")
    weight = next(iter(layers.values())).conv_weight
    shapes: dict[Hashable, CarryShape] = {n: layer.carry_shape for n, layer in layers.items()}
    return RequestPool(shapes, slots, dtype=weight.dtype, device=device or weight.device)
