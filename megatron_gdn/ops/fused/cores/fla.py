"""fla's Triton kernels as a core, through the functions beneath its autograd class.

Calling those directly skips fla's own saved tensors and its copies of strided inputs, and leaves
the backward in our hands. They belong to fla 0.6; other versions are checked before first use.
"""

from __future__ import annotations

import inspect
from functools import cache

import torch
from torch import Tensor

from ...documents import Documents
from .base import RuleGrads, RuleInputs

CHUNK = 64
_FORWARD = {"q", "k", "v", "g", "beta", "scale", "initial_state", "output_final_state",
            "cu_seqlens", "chunk_indices"}  # fmt: skip
_BACKWARD = {"q", "k", "v", "g", "beta", "A", "scale", "initial_state", "do", "dht",
             "cu_seqlens", "chunk_indices"}  # fmt: skip


@cache
def _kernels():
    from fla.ops.gated_delta_rule import chunk
    from fla.ops.utils.index import prepare_chunk_indices

    forward, backward = chunk.chunk_gated_delta_rule_fwd, chunk.chunk_gated_delta_rule_bwd
    for function, wanted in ((forward, _FORWARD), (backward, _BACKWARD)):
        missing = wanted - set(inspect.signature(function).parameters)
        if missing:
            raise ImportError(
                f"fla's {function.__name__} has no argument {sorted(missing)}; the fused mixer "
                f"knows flash-linear-attention 0.6. Install that, or choose another backend."
            )
    return forward, backward, prepare_chunk_indices


class FlaCore:
    name = "fla"

    @staticmethod
    def _boundaries(documents: Documents | None) -> dict[str, Tensor | None]:
        if documents is None:
            return {"cu_seqlens": None, "chunk_indices": None}
        # fla caches by tensor identity; Documents keeps both tensors, so all layers hit.
        indices = _kernels()[2](
            documents.cu_seqlens, CHUNK, cu_seqlens_cpu=documents.cu_seqlens_cpu
        )
        return {"cu_seqlens": documents.cu_seqlens, "chunk_indices": indices}

    def forward(
        self, inputs: RuleInputs, documents: Documents | None, keep: bool
    ) -> tuple[Tensor, tuple[Tensor | None, ...], object]:
        boundaries = self._boundaries(documents)
        with torch.no_grad():
            g_sum, o, A, *_ = _kernels()[0](
                **inputs._asdict(), scale=inputs.k.shape[-1] ** -0.5, initial_state=None,
                output_final_state=False, **boundaries,
            )  # fmt: skip
        # Kept for the backward: the chunk indices would otherwise be built again, on the host.
        return o, (g_sum, A), boundaries["chunk_indices"]

    def backward(
        self,
        d_o: Tensor,
        inputs: RuleInputs,
        saved: tuple[Tensor | None, ...],
        plan: object,
        documents: Documents | None,
    ) -> RuleGrads:
        g_sum, A = saved
        dq, dk, dv, dbeta, dg, *_ = _kernels()[1](
            **inputs._replace(g=g_sum)._asdict(), A=A, scale=inputs.k.shape[-1] ** -0.5,
            initial_state=None, do=d_o, dht=None,
            cu_seqlens=None if documents is None else documents.cu_seqlens, chunk_indices=plan,
        )  # fmt: skip
        return RuleGrads(dq, dk, dv, dg, dbeta)
