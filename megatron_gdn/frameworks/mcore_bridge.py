"""Our layer in models of mcore-bridge, the model library of ms-swift.

mcore-bridge's subclass of Megatron's layer stores the rows of ``in_proj`` and the
channels of ``conv1d`` by key head. Its bridge loads and saves weights in this order:

    Megatron and we  q of all heads, k of all heads, v, z, b, a
    mcore-bridge     q, k, v, z, b, a of key head 0 and its value heads, then of key
                     head 1, ...

While the bridge loads or saves one of our layers, the layer's rows are in
mcore-bridge's order.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, wraps
from importlib.metadata import version
from typing import Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from ..gdn.layer import GatedDeltaNet, GatedDeltaNetSubmodules
from ..mixers.tensor_map import rows_by_group
from ..ops.layout import Layout

logger = logging.getLogger(__name__)

TESTED_VERSION = "1.6.5"
_WHY_NOT_QUANTISED = "stores quantised blocks of rows, whose order we cannot change"
# Fields of the configuration that split or quantise mcore-bridge's in_proj, each with
# the last words of its error message.
_UNSUPPORTED_FIELDS = {
    "linear_decoupled_in_proj": "splits in_proj in two linears, and our layer has one",
    "fp8_param": _WHY_NOT_QUANTISED,
    "fp4_param": _WHY_NOT_QUANTISED,
}


def build(
    config: TransformerConfig,
    submodules: GatedDeltaNetSubmodules,
    *args: Any,
    **kwargs: Any,
) -> GatedDeltaNet:
    """Build our layer with the arguments of
    ``mcore_bridge.model.modules.GatedDeltaNet``."""
    for field, why in _UNSUPPORTED_FIELDS.items():
        if getattr(config, field, False):
            raise NotImplementedError(
                f"mcore-bridge's {field}=True {why}. Set it to False, or call "
                f"megatron_gdn.patch_megatron(gdn=False) for mcore-bridge's own layer."
            )
    _reorder_in_the_bridge()
    return GatedDeltaNet(config, submodules, *args, **kwargs)


def row_order_by_key_head(layout: Layout, *, conv: bool = False) -> Tensor:
    """For each row of mcore-bridge's in_proj, the index of the same row in our in_proj:
    int64 ``[P]``. With ``conv``, the same for the channels of conv1d: ``[C]``."""
    if conv:
        widths = layout.conv_widths
    else:
        widths = layout.widths
    return rows_by_group(widths, layout.heads("key"))


@contextmanager
@torch.no_grad()
def in_order_of_bridge(layer: GatedDeltaNet) -> Iterator[None]:
    """A context in which in_proj, its adapters and conv1d have rows in mcore-bridge's
    order."""
    layout = layer.dims.layout
    channels = row_order_by_key_head(layout, conv=True)
    # each parameter with its new order of rows
    moved = [(parameter, channels) for parameter in layer.conv1d.parameters()]
    for name, parameter in layer.in_proj.named_parameters():
        # the norm's parameters and LoRA's first factor have no rows of in_proj
        if not (".lora_A." in f".{name}" or ".layer_norm_" in f".{name}"):
            moved.append((parameter, row_order_by_key_head(layout)))
    assert all(len(parameter) == len(rows) for parameter, rows in moved)
    for parameter, rows in moved:
        parameter.copy_(parameter[rows.to(parameter.device)])
    try:
        yield
    finally:
        for parameter, rows in moved:
            parameter.copy_(parameter[rows.argsort().to(parameter.device)])


@cache
def _reorder_in_the_bridge() -> None:
    """Wrap the bridge's conversion, which then sees our layers' rows in the bridge's
    order."""
    installed = version("mcore-bridge")
    if installed != TESTED_VERSION:
        logger.warning(
            f"mcore-bridge {installed}: megatron_gdn orders weights as mcore-bridge "
            f"{TESTED_VERSION} stores them, and was not tested with {installed}. "
            "Compare the logits of a small model first."
        )
    from mcore_bridge.bridge import GPTBridge  # pyright: ignore[reportMissingImports]

    convert = GPTBridge._set_linear_attn_state

    @wraps(convert)
    def _set_linear_attn_state(
        self: object, mg_attn: object, *args: object, **kwargs: object
    ) -> object:
        """Load or save the layer ``mg_attn``. If it is our layer, its rows are in the
        bridge's order meanwhile. ``self``: the bridge. ``args`` and ``kwargs``: the
        other arguments of its method."""
        # mg_attn is None if another stage has it
        if not isinstance(mg_attn, GatedDeltaNet):
            return convert(self, mg_attn, *args, **kwargs)
        with in_order_of_bridge(mg_attn):
            return convert(self, mg_attn, *args, **kwargs)

    GPTBridge._set_linear_attn_state = _set_linear_attn_state
