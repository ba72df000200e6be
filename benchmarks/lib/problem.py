"""Tensors of one shape, and the launches of a mixer's kernels on them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_gdn.gdn.front import gdn_table
from megatron_gdn.ops.delta_rule.base import HeadSizes, RuleGrads
from megatron_gdn.ops.documents import Documents
from megatron_gdn.ops.front.plain import front_of
from megatron_gdn.ops.readout.kernels import TritonReadout

TAPS = 4


class Problem:
    """Tensors of one shape in bf16, and the launches of a mixer with heads of 128 on
    them.

    ``documents`` are packed into the one row. On the meta device the tensors have no
    memory, which is enough to compile.
    """

    def __init__(
        self,
        tokens: int,
        heads: tuple[int, int],
        documents: int = 0,
        *,
        batch: int = 1,
        device: str = "meta",
    ) -> None:
        def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
            return torch.randn(*shape, dtype=dtype, device=device)

        sizes = HeadSizes(*heads, 128, 128)
        self.sizes = sizes
        layout = sizes.layout
        _, H, K, V = sizes
        S = tokens
        B = batch
        fp32 = torch.float32
        self.documents = None
        if documents:
            offsets = [n * S // documents for n in range(documents)] + [S]
            where = "cpu" if device == "meta" else device
            self.documents = Documents.from_cu_seqlens(offsets, S, device=where)
        self.proj = normal(S, B, layout.width)
        self.d_proj = normal(S, B, layout.width)
        table = gdn_table(layout)
        self.front = front_of(table, device, self.proj.dtype, TAPS, "triton")
        self.parameters = (
            normal(layout.conv_width, 1, TAPS),
            None,
            normal(H, dtype=fp32),
            normal(H, dtype=fp32),
        )
        self.grads = RuleGrads(
            # FlashQLA gives dq and dk per value head; the front sums them.
            normal(B, S, H, K),
            normal(B, S, H, K),
            normal(B, S, H, V),
            normal(B, S, H, dtype=fp32),
            normal(B, S, H, dtype=fp32),
        )
        self.o = normal(B, S, H, V)
        self.d_out = normal(S, B, H * V)
        self.gamma = normal(V)
        self.readout = TritonReadout(layout.gate_columns)

    def forward(self, only: Any = None) -> None:
        self.front.forward(self.proj, self.parameters, self.documents, only)

    def backward(self) -> None:
        self.front.backward(
            self.proj, self.parameters, self.grads, self.d_proj, self.documents
        )

    def norm_forward(self) -> None:
        self.readout.forward(self.o, self.proj, self.gamma)

    def norm_backward(self) -> None:
        self.readout.backward(self.d_out, self.o, self.proj, self.gamma, self.d_proj)
