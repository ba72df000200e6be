"""Transformer Engine's attention, with `TorchAttention` beside it for what it refuses."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from .attention import TorchAttention
from .packing import TREE


@cache
def beside_torch_attention(theirs: type) -> type:
    """``theirs``, which leaves documents that continue others to a `TorchAttention`; with the
    option ``flex=True`` all training batches."""

    class BesideTorchAttention(theirs):
        def __init__(self, *args: Any, flex: bool | None, cp_layout: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.flex = flex
            # Made when it is needed: it refuses configs that are fine for `theirs`.
            self._make = partial(TorchAttention, *args, flex=flex, cp_layout=cp_layout, **kwargs)
            self._made: list[TorchAttention] = []  # no submodule, and no key of a checkpoint

        def takes(self, packed: PackedSeqParams | None) -> bool:
            """Whether the TorchAttention attends to the micro-batch."""
            is_tree = packed is not None and packed.qkv_format == TREE
            return is_tree or (self.flex is True and self.training)

        def forward(
            self, *args: Any, packed_seq_params: PackedSeqParams | None = None, **kwargs: Any
        ) -> Tensor:
            kwargs["packed_seq_params"] = packed_seq_params
            if not self.takes(packed_seq_params):
                return super().forward(*args, **kwargs)
            self._made = self._made or [self._make()]
            return self._made[0].train(self.training)(*args, **kwargs)

    return BesideTorchAttention
