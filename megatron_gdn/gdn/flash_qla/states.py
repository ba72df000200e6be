"""States in and out of FlashQLA: the state maps of parts, and gradients of states.

FlashQLA's kernel for the states of parts gives, per part and head, ``S_out = through @ S_in +
local``. Its own driver calls it for sequences that it cuts. Here it also serves whole sequences:
their maps are the products of their parts' maps. One such pass gives the maps that context
parallelism sends and, with the entering states, the forward.

If a head's log-decay sums to less than -20 within a part, ``through`` is zero there and ``local``
needs only the last chunks, over which that sum is reached: e^-20 = 2e-9 is below fp32's precision
of a sum. (FlashQLA's own driver uses -10.)

Legend: S tokens, N sequences, P parts, H value heads, K key dim, V value dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...ops.delta_rule.base import RuleInputs
from ...ops.rules.base import Saved
from ...ops.state_maps.parts import entering_states
from .hopper import HopperStages
from .plan import Plan, stages

_FORGOTTEN = -20.0


@dataclass(frozen=True, eq=False)
class PartMaps:
    """The maps of a batch's parts, and intermediates that other passes reuse."""

    plan: Plan
    g_sum: Tensor  # [1, S, H] fp32, log-decay summed within chunks
    A: Tensor  # [1, S, H, 64], inverse of the chunk's triangular system
    local: Tensor  # [P, H, K, V] fp32
    through: Tensor  # [P, H, K, K] fp32
    chunks_back: Tensor  # [P, H] int32, chunks from a part's start that S_in reaches


@dataclass(frozen=True, eq=False)
class Carried:
    """The plan of a forward with states; it saved :func:`saved_tensors`."""

    plan: Plan


@dataclass(frozen=True, eq=False)
class WholeSequences:
    """The plan of :func:`forward_whole`; it saved g_sum, A, and the initial states if given."""

    plan: Plan


def part_maps(
    inputs: RuleInputs, plan: Plan, known: tuple[Tensor, Tensor] | None = None
) -> PartMaps:
    """One pass over k, v, the gates and beta; ``inputs`` of one row.

    ``known``: ``g_sum`` and ``A`` of a forward that has computed them.
    """
    parts = plan.cut
    g_sum, A = triangular(inputs, plan) if known is None else known
    chunks, chunks_back, *_ = stages().get_warmup_chunks_bidi(
        g=g_sum, cu_seqlens=parts.offsets, ht_mask_fwd=parts.nowhere, ht_mask_bwd=parts.nowhere,
        chunk_size=stages().CHUNK_SIZE, threshold=_FORGOTTEN,
    )  # fmt: skip
    # The kernel counts chunks back from a part's end. An end inside a chunk is off the chunk grid;
    # such a part takes all its chunks.
    if parts.ragged is not None:
        chunks = torch.where(parts.ragged, parts.chunks, chunks)
    local, through = _run_parts(inputs, g_sum, A, parts.offsets, chunks)
    return PartMaps(plan, g_sum, A, local, through, chunks_back)


def _run_parts(
    inputs: RuleInputs, g_sum: Tensor, A: Tensor, offsets: Tensor, chunks: Tensor
) -> tuple[Tensor, Tensor]:
    """``local`` and ``through`` of every part, from its last ``chunks`` chunks."""
    run: Any = stages()
    # FlashQLA's own function rounds what its kernel returns to bf16.
    wide = {"final_dtype": torch.float32} if isinstance(run, HopperStages) else {}
    fused_gdr_h: Any = run.fused_gdr_h
    _, local, through = fused_gdr_h(
        k=inputs.k, v=inputs.v, a=A, g=g_sum, b=inputs.beta, output_final_state=True,
        output_h=False, cu_seqlens=offsets, num_warmup_chunks=chunks, **wide,
    )  # fmt: skip
    return local.float(), through.float()


def saved_tensors(maps: PartMaps, entering: Tensor | None) -> tuple[Any, ...]:
    """g_sum, A, chunks_back; if sequences are cut, also ``through`` and the entering states."""
    if maps.plan.cut.are_sequences:
        return maps.g_sum, maps.A, maps.chunks_back
    return maps.g_sum, maps.A, maps.chunks_back, maps.through, entering


def forward(
    inputs: RuleInputs, initial: Tensor | None, maps: PartMaps, keep: bool, final: bool
) -> tuple[Tensor, Tensor | None, Saved]:
    """o ``[1, S, H, V]`` from states ``[N, H, K, V]`` that enter the sequences.

    With ``final`` also the states that leave them.
    """
    parts = maps.plan.cut
    entering = entering_states(maps.local, maps.through, parts, initial)
    o, _, last = stages().fused_gdr_fwd(
        q=inputs.q, k=inputs.k, v=inputs.v, a=maps.A, g=maps.g_sum, b=inputs.beta,
        scale=inputs.k.shape[-1] ** -0.5, initial_state=entering, output_final_state=final,
        cu_seqlens=parts.offsets, cp_seq_map=parts.owner, raw_cu_seqlens=parts.sequences,
    )  # fmt: skip
    kept = saved_tensors(maps, entering) if keep else ()
    return o, last, Saved(kept, Carried(maps.plan))


def forward_whole(
    inputs: RuleInputs, initial: Tensor | None, plan: Plan, keep: bool
) -> tuple[Tensor, Tensor, Saved]:
    """As :func:`forward`, of sequences that are not cut.

    States always enter and leave, so that training and generation run one compiled kernel.
    """
    parts, (H, V), K = plan.cut, inputs.v.shape[2:], inputs.k.shape[3]
    given = () if initial is None else (initial,)
    if initial is None:
        sequences = len(parts.owner)
        initial = torch.zeros(sequences, H, K, V, dtype=torch.float32, device=inputs.v.device)
    g_sum, A = triangular(inputs, plan)
    o, _, last = stages().fused_gdr_fwd(
        q=inputs.q, k=inputs.k, v=inputs.v, a=A, g=g_sum, b=inputs.beta, scale=K**-0.5,
        initial_state=initial.contiguous(), output_final_state=True, cu_seqlens=parts.offsets,
        cp_seq_map=parts.owner, raw_cu_seqlens=parts.sequences,
    )  # fmt: skip
    return o, last, Saved((g_sum, A, *given) if keep else (), WholeSequences(plan))


def run_again(
    inputs: RuleInputs, initial: Tensor | None, kept: tuple[Any, ...], plan: Plan
) -> tuple[Tensor, Saved]:
    """``o`` and ``saved`` of :func:`forward`, from what :func:`saved_tensors` gives after A."""
    parts = plan.cut
    g_sum, A = triangular(inputs, plan)
    entering = initial if parts.are_sequences else kept[2]
    o, at_chunks = output_and_states(
        inputs, g_sum, A, entering, parts.offsets, parts.owner, parts.sequences
    )
    return o, Saved((g_sum, A, *kept), Carried(plan), at_chunks)


def triangular(inputs: RuleInputs, plan: Plan) -> tuple[Tensor, Tensor]:
    """``g_sum`` and ``A`` of the sequences, or of batch rows."""
    of = {"cu_seqlens": plan.context.cu_seqlens, "chunk_size": stages().CHUNK_SIZE}
    g_sum = stages().chunk_local_cumsum(g=inputs.g, **of)
    return g_sum, stages().kkt_solve(k=inputs.k, b=inputs.beta, **of)


def output_and_states(
    inputs: RuleInputs,
    g_sum: Tensor,
    A: Tensor,
    entering: Tensor | None,
    offsets: Tensor | None,
    owner: Tensor | None,
    sequences: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """``o``, and the states at chunks that the backward reads: one pass for both.

    Args:
        entering: states that enter the parts; None is zero.
        offsets, owner, sequences: of the parts, as the forward took them.
    """
    o, at_chunks, _ = stages().fused_gdr_fwd(
        q=inputs.q, k=inputs.k, v=inputs.v, a=A, g=g_sum, b=inputs.beta,
        scale=inputs.k.shape[-1] ** -0.5, initial_state=entering, output_final_state=False,
        output_h=True, cu_seqlens=offsets, cp_seq_map=owner, raw_cu_seqlens=sequences,
    )  # fmt: skip
    return o, at_chunks


def d_initial_of_parts(
    d_o: Tensor, inputs: RuleInputs, saved: tuple[Any, ...], plan: Plan
) -> Tensor:
    """``[P, H, K, V]``: gradient of states that enter parts; that of states that leave is 0."""
    g_sum, A, chunks_back, *_ = saved
    _, d_local = stages().fused_gdr_dh(
        q=inputs.q, k=inputs.k, a=A, g=g_sum, b=inputs.beta, do=d_o, dht=None, output_dh0=True,
        output_dh=False, scale=inputs.k.shape[-1] ** -0.5, cu_seqlens=plan.cut.offsets,
        num_warmup_chunks=chunks_back,
    )  # fmt: skip
    return d_local
