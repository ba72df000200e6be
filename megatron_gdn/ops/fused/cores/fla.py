"""fla's Triton kernels as a core, through the functions beneath its autograd class.

Calling those directly skips fla's own saved tensors and its copies of strided inputs, and leaves
the backward in our hands. They belong to fla 0.6; :mod:`megatron_gdn.ops.obstacles` checks that
before this rule is chosen.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from ...documents import Documents
from ...fla_functions import stages
from .base import RuleGrads, RuleInputs, Transition
from .fold import compose
from .parts import CHUNK, Parts, parts_by_length


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
        fla = stages()
        with torch.no_grad():
            g_sum = fla.chunk_local_cumsum(
                inputs.g, chunk_size=CHUNK, scale=fla.RCP_LN2, **boundaries
            )
            w, u, A = fla.chunk_gated_delta_rule_fwd_intra(
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
                g_sum, o, A, *_ = stages().chunk_gated_delta_rule_fwd(
                    **inputs._asdict(), scale=scale, initial_state=initial,
                    output_final_state=False, **boundaries,
                )  # fmt: skip
            else:
                g_sum, A, w, u = work
                states, written, _ = stages().chunk_gated_delta_rule_fwd_h(
                    k=inputs.k, w=w, u=u, g=g_sum, initial_state=initial, **boundaries
                )
                o = stages().chunk_fwd_o(
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
        (g_sum, A), fla, scale = saved, stages(), inputs.k.shape[-1] ** -0.5
        (B, _, H, V), K = inputs.v.shape, inputs.k.shape[-1]
        N = B if documents is None else len(documents.cu_seqlens) - 1
        w, _ = fla.recompute_w_u_fwd(k=inputs.k, v=inputs.v, beta=inputs.beta, A=A, g=g_sum, **plan)
        d_written = fla.chunk_bwd_dv_local(
            q=inputs.q, k=inputs.k, g=g_sum, do=d_o, scale=scale, **plan
        )
        # Its values are not read; given, it asks for the gradient of initial states.
        initial = g_sum.new_empty(N, H, K, V)
        _, d_local, _ = fla.chunk_gated_delta_rule_bwd_dhu(
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
        dq, dk, dv, dbeta, dg, *_ = stages().chunk_gated_delta_rule_bwd(
            **inputs._replace(g=g_sum)._asdict(), A=A, scale=inputs.k.shape[-1] ** -0.5,
            initial_state=initial, do=d_o, dht=d_final, **plan,
        )  # fmt: skip
        return RuleGrads(dq, dk, dv, dg, dbeta)
