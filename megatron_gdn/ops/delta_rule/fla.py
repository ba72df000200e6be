"""fla's Triton kernels as a core, through the functions beneath its autograd class.

Calling those directly skips fla's own saved tensors and its copies of strided inputs, and leaves
the backward in our hands. They belong to fla 0.6; other versions are checked before first use.
"""

from __future__ import annotations

import inspect
from functools import cache, lru_cache
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from ..documents import Documents
from ..state_maps.fold import compose
from ..state_maps.parts import CHUNK, Parts, parts_by_length
from .base import RuleGrads, RuleInputs, Transition

_SEQUENCES = {"cu_seqlens", "chunk_indices"}
_WANTED = {
    "chunk_gated_delta_rule_fwd": {"q", "k", "v", "g", "beta", "scale", "initial_state",
                                   "output_final_state", *_SEQUENCES},
    "chunk_gated_delta_rule_bwd": {"q", "k", "v", "g", "beta", "A", "scale", "initial_state", "do",
                                   "dht", *_SEQUENCES},
    "chunk_local_cumsum": {"g", "chunk_size", "scale", *_SEQUENCES},
    "chunk_gated_delta_rule_fwd_intra": {"k", "v", "g", "beta", *_SEQUENCES},
    "chunk_gated_delta_rule_fwd_h": {"k", "w", "u", "g", "initial_state", *_SEQUENCES},
    "chunk_fwd_o": {"q", "k", "v", "h", "g", "scale", *_SEQUENCES},
    "recompute_w_u_fwd": {"k", "v", "beta", "A", "g", *_SEQUENCES},
    "chunk_bwd_dv_local": {"q", "k", "g", "do", "scale", *_SEQUENCES},
    "chunk_gated_delta_rule_bwd_dhu": {"q", "k", "w", "do", "dv", "g", "h0", "dht", "scale",
                                       *_SEQUENCES},
}  # fmt: skip


@cache
def _stages() -> ModuleType:
    """fla's module of the rule, whose functions are checked for the arguments used here."""
    from fla.ops.gated_delta_rule import chunk

    for name, wanted in _WANTED.items():
        function = getattr(chunk, name, None)
        missing = wanted - set(inspect.signature(function).parameters) if function else {"all"}
        if missing:
            raise ImportError(
                f"fla's {name} has no argument {sorted(missing)}; the fused mixer knows "
                f"flash-linear-attention 0.6. Install that, or choose another backend."
            )
    return chunk


def _boundaries(documents: Documents | None) -> dict[str, Tensor | None]:
    if documents is None:
        return {"cu_seqlens": None, "chunk_indices": None}
    from fla.ops.utils.index import prepare_chunk_indices

    # fla caches by tensor identity; Documents keeps both tensors, so all layers hit.
    indices = prepare_chunk_indices(
        documents.cu_seqlens, CHUNK, cu_seqlens_cpu=documents.cu_seqlens_cpu
    )
    return {"cu_seqlens": documents.cu_seqlens, "chunk_indices": indices}


@lru_cache(maxsize=64)
def _parts(
    sequences: tuple[int, ...], value_heads: int, longest: int, device: torch.device
) -> Parts:
    return Parts.build(sequences, parts_by_length(sequences, value_heads, longest), device)


def parts_of(inputs: RuleInputs, documents: Documents | None) -> Parts:
    """The parts whose maps fla computes, whose kernel counts elements within one in 32 bits."""
    (rows, tokens, H, V), K = inputs.v.shape, inputs.k.shape[-1]
    if documents is None:
        sequences = tuple(row * tokens for row in range(rows + 1))
    else:
        sequences = documents.filled_offsets
    longest = 2**31 // (H * max(K, V)) // CHUNK * CHUNK
    return _parts(sequences, H, longest, inputs.v.device)


class _Work(NamedTuple):
    """What the transition has computed and the forward needs as well."""

    g_sum: Tensor  # [B, S, H] fp32, log2-decay summed within chunks
    A: Tensor  # [B, S, H, 64], inverse of the chunk's triangular system
    w: Tensor  # [B, S, H, K]
    u: Tensor  # [B, S, H, V]; a chunk writes u - w S


class FlaCore:
    name = "fla"
    batch_invariant = False
    operand_dtype = None

    def transition(self, inputs: RuleInputs, documents: Documents | None) -> Transition:
        from fla.ops.cp.chunk_fwd import chunk_cp_fwd_h

        boundaries, parts = _boundaries(documents), parts_of(inputs, documents)
        stages = _stages()
        with torch.no_grad():
            g_sum = stages.chunk_local_cumsum(
                inputs.g, chunk_size=CHUNK, scale=stages.RCP_LN2, **boundaries
            )
            w, u, A = stages.chunk_gated_delta_rule_fwd_intra(
                k=inputs.k, v=inputs.v, g=g_sum, beta=inputs.beta, **boundaries
            )
            # The summaries that fla's own context parallelism sends, of parts: [local | through].
            (K, V), P = (inputs.k.shape[-1], u.shape[-1]), len(parts.offsets) - 1
            maps = u.new_empty(P, u.shape[2], K, V + K, dtype=torch.float32)
            k, g_row, w_row, u_row = (x.flatten(0, 1)[None] for x in (inputs.k, g_sum, w, u))
            chunk_cp_fwd_h(
                k=k, w=w_row, u=u_row, hm=maps, g=g_row, cu_seqlens=parts.offsets,
                chunk_size=CHUNK, multi_seqs=True,
            )  # fmt: skip
            local, through = (x.contiguous() for x in maps.split([V, K], dim=-1))
            local, through = compose(local, through, parts)
        return Transition(local, through, _Work(g_sum, A, w, u))

    def forward(
        self,
        inputs: RuleInputs,
        documents: Documents | None,
        keep: bool,
        initial: Tensor | None = None,
        work: object = None,
    ) -> tuple[Tensor, tuple[Tensor | None, ...], object]:
        boundaries, scale = _boundaries(documents), inputs.k.shape[-1] ** -0.5
        with torch.no_grad():
            if work is None:
                g_sum, o, A, *_ = _stages().chunk_gated_delta_rule_fwd(
                    **inputs._asdict(), scale=scale, initial_state=initial,
                    output_final_state=False, **boundaries,
                )  # fmt: skip
            else:
                g_sum, A, w, u = work
                states, written, _ = _stages().chunk_gated_delta_rule_fwd_h(
                    k=inputs.k, w=w, u=u, g=g_sum, initial_state=initial, **boundaries
                )
                o = _stages().chunk_fwd_o(
                    q=inputs.q, k=inputs.k, v=written, h=states, g=g_sum, scale=scale, **boundaries
                )
        # Kept for the backward: the chunk indices would otherwise be built again, on the host.
        return o, (g_sum, A), boundaries

    def d_initial(
        self,
        d_o: Tensor,
        inputs: RuleInputs,
        saved: tuple[Tensor | None, ...],
        plan: object,
        documents: Documents | None,
    ) -> tuple[Tensor, object]:
        (g_sum, A), stages, scale = saved, _stages(), inputs.k.shape[-1] ** -0.5
        (B, _, H, V), K = inputs.v.shape, inputs.k.shape[-1]
        N = B if documents is None else len(documents.cu_seqlens) - 1
        w, _ = stages.recompute_w_u_fwd(
            k=inputs.k, v=inputs.v, beta=inputs.beta, A=A, g=g_sum, **plan
        )
        d_written = stages.chunk_bwd_dv_local(
            q=inputs.q, k=inputs.k, g=g_sum, do=d_o, scale=scale, **plan
        )
        # Its values are not read; given, it asks for the gradient of initial states.
        initial = g_sum.new_empty(N, H, K, V)
        _, d_local, _ = stages.chunk_gated_delta_rule_bwd_dhu(
            q=inputs.q, k=inputs.k, w=w, g=g_sum, h0=initial, dht=None, do=d_o, dv=d_written,
            scale=scale, **plan,
        )  # fmt: skip
        return d_local, None

    def backward(
        self,
        d_o: Tensor,
        inputs: RuleInputs,
        saved: tuple[Tensor | None, ...],
        plan: object,
        documents: Documents | None,
        initial: Tensor | None = None,
        d_final: Tensor | None = None,
        work: object = None,
    ) -> RuleGrads:
        g_sum, A = saved
        dq, dk, dv, dbeta, dg, *_ = _stages().chunk_gated_delta_rule_bwd(
            **inputs._replace(g=g_sum)._asdict(), A=A, scale=inputs.k.shape[-1] ** -0.5,
            initial_state=initial, do=d_o, dht=d_final, **plan,
        )  # fmt: skip
        return RuleGrads(dq, dk, dv, dg, dbeta)
