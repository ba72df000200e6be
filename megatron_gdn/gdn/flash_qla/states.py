"""Calls of FlashQLA's stages: state maps of parts, outputs, gradients.

FlashQLA's kernel gives a state map for each part and head, ``S_out = through @ S_in + local``.
Context parallelism sends these maps, and the forward applies them to the entering states.

If a head's log-decay sums to less than -20 within a part, ``through`` is zero. ``local`` is then
computed from the last chunks alone, whose log-decay sums to -20: e^-20 = 2e-9 is below the
precision of an fp32 sum. FlashQLA's own driver uses -10.
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
    """The state maps of parts, and tensors that the forward and the backward share."""

    plan: Plan
    g_sum: Tensor  # [1, S, H] fp32, log-decay summed within chunks
    A: Tensor  # [1, S, H, 64], inverse of the chunk's sums_and_inverses system
    local: Tensor  # [P, H, K, V] fp32
    through: Tensor  # [P, H, K, K] fp32
    chunks_back: Tensor  # [P, H] int32, the number of a part's first chunks that S_in reaches

    def saved(self, entering: Tensor | None) -> tuple[Any, ...]:
        """The tensors that :class:`.rule.CarriedBackward` needs, in its order."""
        kept = self.g_sum, self.A, self.chunks_back
        return kept if self.plan.cut.are_sequences else (*kept, self.through, entering)


def part_maps(
    inputs: RuleInputs, plan: Plan, known: tuple[Tensor, Tensor] | None = None
) -> PartMaps:
    """The state maps of parts; ``known`` are ``g_sum`` and ``A`` from an earlier forward."""
    parts, run = plan.cut, stages()
    g_sum, A = sums_and_inverses(inputs, plan) if known is None else known
    chunks, chunks_back, *_ = run.get_warmup_chunks_bidi(
        g=g_sum, cu_seqlens=parts.offsets, ht_mask_fwd=parts.nowhere, ht_mask_bwd=parts.nowhere,
        chunk_size=run.CHUNK_SIZE, threshold=_FORGOTTEN,
    )  # fmt: skip
    # The kernel counts chunks back from a part's end. A part that ends inside a chunk takes all of
    # its chunks, because counting back from its end would miss the chunk grid.
    if parts.ragged is not None:
        chunks = torch.where(parts.ragged, parts.chunks, chunks)
    # FlashQLA's own function rounds the maps to bf16.
    wide = {"final_dtype": torch.float32} if isinstance(stages(), HopperStages) else {}
    _, local, through = run.fused_gdr_h(
        k=inputs.k, v=inputs.v, a=A, g=g_sum, b=inputs.beta, output_final_state=True,
        output_h=False, cu_seqlens=parts.offsets, num_warmup_chunks=chunks, **wide,
    )  # fmt: skip
    return PartMaps(plan, g_sum, A, local.float(), through.float(), chunks_back)


def sums_and_inverses(inputs: RuleInputs, plan: Plan) -> tuple[Tensor, Tensor]:
    """``g_sum`` and ``A`` (see :class:`PartMaps`) of the sequences or batch rows."""
    chunks = {"cu_seqlens": plan.context.cu_seqlens, "chunk_size": stages().CHUNK_SIZE}
    g_sum = stages().chunk_local_cumsum(g=inputs.g, **chunks)
    return g_sum, stages().kkt_solve(k=inputs.k, b=inputs.beta, **chunks)


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
    """``o``, the states at chunks, and the states that leave sequences.

    ``entering`` are states of parts; None means zero. ``wanted`` are ``output_h`` and
    ``output_final_state``.
    """
    return stages().fused_gdr_fwd(
        q=inputs.q, k=inputs.k, v=inputs.v, a=A, g=g_sum, b=inputs.beta,
        scale=inputs.k.shape[-1] ** -0.5, initial_state=entering, cu_seqlens=offsets,
        cp_seq_map=owner, raw_cu_seqlens=sequences, **wanted,
    )  # fmt: skip


def run_uncut(
    inputs: RuleInputs, initial: Tensor | None, plan: Plan
) -> tuple[Tensor, Tensor | None, tuple[Tensor, ...]]:
    """``o`` and final states of sequences that are not cut, and the tensors to save."""
    given = () if initial is None else (initial,)
    # Training passes states of zero, so training and generation run the same compiled kernel.
    if initial is None:
        (H, V), K, device = inputs.v.shape[2:], inputs.k.shape[3], inputs.v.device
        initial = torch.zeros(len(plan.cut.owner), H, K, V, dtype=torch.float32, device=device)
    g_sum, A = sums_and_inverses(inputs, plan)
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
    """The gradients of the inputs, in the order of :class:`RuleInputs`.

    ``first`` are the states that enter parts, ``last_grad`` the gradients of the states that leave
    parts, ``states`` the states at chunks from a second run (None computes them here).
    ``overwrite_last`` allows the kernel to write over ``last_grad``.
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
