"""Calls of FlashQLA's stages: state maps of parts, outputs, gradients of states.

FlashQLA's kernel for the states of parts gives, per part and head, ``S_out = through @ S_in +
local``. One pass serves the maps that context parallelism sends and, with the entering states, the
forward.

If a head's log-decay sums to less than -20 within a part, ``through`` is zero there and ``local``
needs only the last chunks, over which that sum is reached: e^-20 = 2e-9 is below fp32's precision
of a sum. (FlashQLA's own driver uses -10.)
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...ops.delta_rule.base import RuleInputs
from .hopper import HopperStages
from .plan import Plan, stages

_FORGOTTEN = -20.0


class PartMaps(NamedTuple):
    plan: Plan
    g_sum: Tensor  # [1, S, H] fp32, log-decay summed within chunks
    A: Tensor  # [1, S, H, 64], inverse of the chunk's triangular system
    local: Tensor  # [P, H, K, V] fp32
    through: Tensor  # [P, H, K, K] fp32
    chunks_back: Tensor  # [P, H] int32, chunks from a part's start that S_in reaches

    def saved(self, entering: Tensor | None) -> tuple[Any, ...]:
        """Tensors for a backward in parts; with ``entering`` states if sequences are cut."""
        kept = self.g_sum, self.A, self.chunks_back
        return kept if self.plan.cut.are_sequences else (*kept, self.through, entering)


def part_maps(
    inputs: RuleInputs, plan: Plan, known: tuple[Tensor, Tensor] | None = None
) -> PartMaps:
    """The maps; ``known``: ``g_sum`` and ``A`` if a forward has computed them."""
    parts, run = plan.cut, stages()
    g_sum, A = triangular(inputs, plan) if known is None else known
    chunks, chunks_back, *_ = run.get_warmup_chunks_bidi(
        g=g_sum, cu_seqlens=parts.offsets, ht_mask_fwd=parts.nowhere, ht_mask_bwd=parts.nowhere,
        chunk_size=run.CHUNK_SIZE, threshold=_FORGOTTEN,
    )  # fmt: skip
    # The kernel counts chunks back from a part's end. An end inside a chunk is off the chunk grid;
    # such a part takes all its chunks.
    if parts.ragged is not None:
        chunks = torch.where(parts.ragged, parts.chunks, chunks)
    # FlashQLA's own function rounds what its kernel returns to bf16.
    wide = {"final_dtype": torch.float32} if isinstance(stages(), HopperStages) else {}
    _, local, through = run.fused_gdr_h(
        k=inputs.k, v=inputs.v, a=A, g=g_sum, b=inputs.beta, output_final_state=True,
        output_h=False, cu_seqlens=parts.offsets, num_warmup_chunks=chunks, **wide,
    )  # fmt: skip
    return PartMaps(plan, g_sum, A, local.float(), through.float(), chunks_back)


def triangular(inputs: RuleInputs, plan: Plan) -> tuple[Tensor, Tensor]:
    """``g_sum`` and ``A`` of the sequences, or of batch rows."""
    of = {"cu_seqlens": plan.context.cu_seqlens, "chunk_size": stages().CHUNK_SIZE}
    g_sum = stages().chunk_local_cumsum(g=inputs.g, **of)
    return g_sum, stages().kkt_solve(k=inputs.k, b=inputs.beta, **of)


def output(
    inputs: RuleInputs,
    g_sum: Tensor,
    A: Tensor,
    entering: Tensor | None,
    offsets: Tensor | None,
    owner: Tensor | None,
    sequences: Tensor | None,
    **wanted: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """``o``, the states at chunks that the backward reads, and the states that leave sequences.

    ``entering``: states of the parts; None is zero. ``wanted``: ``output_h``,
    ``output_final_state``.
    """
    return stages().fused_gdr_fwd(
        q=inputs.q, k=inputs.k, v=inputs.v, a=A, g=g_sum, b=inputs.beta,
        scale=inputs.k.shape[-1] ** -0.5, initial_state=entering, cu_seqlens=offsets,
        cp_seq_map=owner, raw_cu_seqlens=sequences, **wanted,
    )  # fmt: skip


def whole_output(
    inputs: RuleInputs, initial: Tensor | None, plan: Plan
) -> tuple[Tensor, Tensor | None, tuple[Tensor, ...]]:
    """``o`` and final states of sequences that are not cut; g_sum, A and the states if given."""
    given = () if initial is None else (initial,)
    if initial is None:  # states always enter: training and generation run one compiled kernel
        (H, V), K, device = inputs.v.shape[2:], inputs.k.shape[3], inputs.v.device
        initial = torch.zeros(len(plan.cut.owner), H, K, V, dtype=torch.float32, device=device)
    g_sum, A = triangular(inputs, plan)
    o, _, last = output(
        inputs, g_sum, A, initial.contiguous(), *plan.carrying,
        output_h=False, output_final_state=True,
    )  # fmt: skip
    return o, last, (g_sum, A, *given)


def gradients(
    d_o: Tensor,
    inputs: RuleInputs,
    g_sum: Tensor,
    A: Tensor,
    plan: Plan,
    first: Tensor | None,
    last_grad: Tensor | None,
    states: Tensor | None,
    overwrite_last: bool = False,
) -> tuple[Tensor, ...]:
    """The gradients of the inputs, in their order.

    ``first`` enters the parts; ``last_grad`` is the gradient of what leaves them, and may be
    overwritten if nobody else reads it. ``states``: at chunks, from a second run; None: computed
    here.
    """
    run = stages()
    sparing = {"overwrite_dht": overwrite_last} if isinstance(stages(), HopperStages) else {}
    common = {"k": inputs.k, "v": inputs.v, "a": A, "g": g_sum, "b": inputs.beta,
              "cu_seqlens": plan.part_offsets}  # fmt: skip
    if states is None:
        states, *_ = run.fused_gdr_h(
            initial_state=first, output_final_state=False, output_h=True, **common
        )
    dq, dk, dv, dg, dbeta, _ = run.fused_gdr_bwd(
        q=inputs.q, do=d_o, dht=last_grad, h=states, scale=inputs.k.shape[-1] ** -0.5,
        **common, **sparing,
    )  # fmt: skip
    dg = run.chunk_local_cumsum(
        dg, chunk_size=A.shape[-1], reverse=True, cu_seqlens=plan.context.cu_seqlens,
        zero_last_chunk=True,
    )  # fmt: skip
    return dq, dk, dv, dg, dbeta
