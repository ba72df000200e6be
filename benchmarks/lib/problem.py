"""Tensors of one shape, and the launches of a mixer's kernels on them."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial

import torch

from megatron_gdn.gdn.front import gdn_table
from megatron_gdn.ops.delta_rule.base import HeadSizes, RuleGrads
from megatron_gdn.ops.documents import Documents
from megatron_gdn.ops.front.plain import front_of
from megatron_gdn.ops.readout.kernels import TritonReadout


class Problem:
    """Tensors of one shape in bf16, and the launches of a mixer with heads of 128 on
    them.

    ``documents`` are packed into the one row; ``operands`` is the dtype of q, k, v and
    their gradients. On the meta device the tensors have no memory, which is enough to
    compile.
    """

    def __init__(
        self,
        tokens: int,
        heads: tuple[int, int],
        documents: int = 0,
        *,
        batch: int = 1,
        taps: int = 4,
        operands: torch.dtype = torch.bfloat16,
        device: str = "meta",
    ) -> None:
        sizes = HeadSizes(*heads, 128, 128)
        self.sizes = sizes
        self.device = device
        normal = self.tensor
        _, H, K, V = sizes
        S = tokens
        B = batch
        self.documents = None
        if documents:
            offsets = [n * S // documents for n in range(documents)] + [S]
            where = "cpu" if device == "meta" else device
            self.documents = Documents.from_cu_seqlens(offsets, S, device=where)
        self.operands = operands
        half = operands == torch.float16
        self.proj, self.d_proj = (
            normal(S, B, sizes.layout.width),
            normal(S, B, sizes.layout.width),
        )
        per_head = partial(normal, H, dtype=torch.float32)
        front = front_of(
            gdn_table(sizes.layout),
            device,
            self.proj.dtype,
            taps,
            "triton",
            operands=operands if half else None,
        )
        self.front = cache(partial(replace, front))  # with other options
        self.parameters = (
            normal(sizes.layout.conv_width, 1, taps),
            None,
            per_head(),
            per_head(),
        )
        # FlashQLA gives dq and dk per value head; the front sums them.
        q, k, v = (normal(B, S, H, width, dtype=operands) for width in (K, K, V))
        g, beta = (normal(B, S, H, dtype=torch.float32) for _ in range(2))
        self.grads = RuleGrads(q, k, v, g, beta, factor=per_head() if half else None)
        self.o, self.d_out = normal(B, S, H, V, dtype=operands), normal(S, B, H * V)
        self.gamma, self.readout = normal(V), TritonReadout(sizes.layout.gate_columns)

    def tensor(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.randn(*shape, dtype=dtype, device=self.device)

    def forward(self, only=None, history=None, **options) -> None:
        given = (self.parameters, self.documents, only, history)
        self.front(**options).forward(self.proj, *given)

    def backward(self, history=None, **options) -> None:
        given = (self.parameters, self.grads, self.d_proj, self.documents, history)
        self.front(**options).backward(self.proj, *given)

    def norm_forward(self) -> None:
        self.readout.forward(self.o, self.proj, self.gamma)

    def norm_backward(self, **options) -> None:
        self.readout.backward(
            self.d_out, self.o, self.proj, self.gamma, self.d_proj, **options
        )
