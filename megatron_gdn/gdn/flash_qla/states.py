"""Calls FlashQLA's kernels, which compute state maps, outputs and gradients.

FlashQLA computes a map of states, ``S_out = through @ S_in + local``, for each part of
a sequence and each head. Context parallelism sends the maps; the forward applies the
maps to S_in.

If a head's log-decay sums to less than -20 within a segment, ``through`` is zero.
``local`` is then computed from the last chunks alone, whose log-decay sums to -20:
e^-20 = 2e-9 is below the precision of an fp32 sum. If the sequences begin with zero
states, the bound is -10, as in FlashQLA.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...ops.delta_rule.base import RuleInputs
from ...ops.state_maps.segments import Segments, entering_states, leaving_gradients
from .hopper import HopperKernels
from .plan import kernels

_NEGLIGIBLE_LOG_DECAY = -20.0
_FORGOTTEN_FROM_ZERO = -10.0


class Kept(NamedTuple):
    """The tensors of a forward that the backward reads."""

    g_sum: Tensor  # [B, S, H] fp32, log-decay summed within chunks
    A: Tensor  # [B, S, H, 64], inverse of the chunk's triangular system
    # The next two fields are None if the sequences are not cut.
    entering: Tensor | None = None  # [P, H, K, V], the states that enter segments
    through: Tensor | None = None  # [P, H, K, K]
    # The next field is None if the forward needed no state maps.
    # [P, H] int32, count of first chunks that depend on S_in
    chunks_back: Tensor | None = None
    # The next field is None if the sequences had initial states.
    passes_back: Tensor | None = None  # bool [P, H], whether dS_in depends on dS_out

    def leaving(
        self, d_entering: Tensor, segments: Segments, d_final: Tensor | None
    ) -> Tensor | None:
        """The gradients of states that leave segments.

        ``d_entering``: of states that enter segments, if those that leave them have none.
        FlashQLA's kernel begins with zero states; sequences with initial states are
        composed here.
        """
        if self.passes_back is None:
            return leaving_gradients(d_entering, self.through, segments, d_final)
        return kernels().correct_terminal_states(
            d_final, d_entering, self.through, self.passes_back, segments.first_segment
        )


class SegmentMaps(NamedTuple):
    """The state maps of segments, and the tensors that the backward reads."""

    segments: Segments
    local: Tensor  # [P, H, K, V]
    through: Tensor  # [P, H, K, K]
    # bool [P, H], whether S_out depends on S_in; None: use ``through``
    passes: Tensor | None
    kept: Kept  # for the backward, without ``entering`` and ``through``

    def entering(self, initial: Tensor | None) -> Tensor | None:
        """The states that enter segments; None: all are zero."""
        if self.passes is None:
            return entering_states(self.local, self.through, self.segments, initial)
        return kernels().correct_initial_states(
            initial, self.local, self.through, self.passes, self.segments.first_segment
        )

    def saved(self, entering: Tensor | None) -> Kept:
        """The tensors for the backward. The states that enter segments, ``entering``,
        are among them unless each sequence is one segment and ``passes`` is None."""
        if self.segments.are_sequences and self.passes is None:
            return self.kept
        return self.kept._replace(entering=entering, through=self.through)


def segment_maps(
    inputs: RuleInputs,
    segments: Segments,
    known: tuple[Tensor, Tensor] | None = None,
    *,
    from_zero: bool = False,
) -> SegmentMaps:
    """The state maps of segments; ``known``: ``g_sum`` and ``A``, if a forward has
    computed them.

    With ``from_zero`` the sequences begin with zero states, the maps have k's dtype,
    and the map of a sequence that is one segment is not computed, as in FlashQLA.
    """
    run = kernels()
    g_sum, A = sums_and_inverses(inputs, segments) if known is None else known
    chunks, chunks_back, passes, passes_back = run.get_warmup_chunks_bidi(
        g=g_sum,
        cu_seqlens=segments.offsets,
        ht_mask_fwd=segments.ends_sequence if from_zero else segments.no_segment,
        ht_mask_bwd=segments.begins_sequence if from_zero else segments.no_segment,
        threshold=_FORGOTTEN_FROM_ZERO if from_zero else _NEGLIGIBLE_LOG_DECAY,
    )
    options = {}
    if not from_zero:
        passes = passes_back = None
        # The kernel counts chunks back from a segment's end. If a segment ends inside a
        # chunk, its chunks are not those of its sequence, so the kernel runs all chunks
        # of the segment.
        if segments.ends_inside_chunk is not None:
            chunks = torch.where(
                segments.ends_inside_chunk, segments.chunk_counts, chunks
            )
        # FlashQLA's own function rounds the maps to k's dtype; HopperKernels can return
        # fp32.
        if isinstance(kernels(), HopperKernels):
            options["final_dtype"] = torch.float32
    _, local, through = run.fused_gdr_h(
        k=inputs.k,
        v=inputs.v,
        a=A,
        g=g_sum,
        b=inputs.beta,
        output_final_state=True,
        output_h=False,
        cu_seqlens=segments.offsets,
        num_warmup_chunks=chunks,
        **options,
    )
    if not from_zero:
        local = local.float()
        through = through.float()
    kept = Kept(g_sum, A, chunks_back=chunks_back, passes_back=passes_back)
    return SegmentMaps(segments, local, through, passes, kept)


def _boundaries(
    segments: Segments | None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Offsets of the sequences, offsets of the segments, and the sequence of each segment."""
    if segments is None:
        return None, None, None
    return segments.sequence_offsets, segments.offsets, segments.sequence_of_segment


def sums_and_inverses(
    inputs: RuleInputs, segments: Segments | None
) -> tuple[Tensor, Tensor]:
    """``g_sum`` and ``A`` (see :class:`Kept`) of the sequences or batch rows."""
    sequences, _, _ = _boundaries(segments)
    g_sum = kernels().chunk_local_cumsum(g=inputs.g, cu_seqlens=sequences)
    return g_sum, kernels().kkt_solve(k=inputs.k, b=inputs.beta, cu_seqlens=sequences)


def run_forward(
    inputs: RuleInputs,
    kept: Kept,
    entering: Tensor | None,
    segments: Segments | None,
    **output_flags: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return ``o``, the states at chunks, and the states that leave sequences.

    ``entering`` are the states that enter segments; None means zero. ``output_flags`` are
    the kernel's flags ``output_h`` and ``output_final_state``.
    """
    sequences, offsets, owners = _boundaries(segments)
    return kernels().fused_gdr_fwd(
        q=inputs.q,
        k=inputs.k,
        v=inputs.v,
        a=kept.A,
        g=kept.g_sum,
        b=inputs.beta,
        scale=inputs.k.shape[-1] ** -0.5,
        initial_state=entering,
        cu_seqlens=offsets,
        cp_seq_map=owners,
        raw_cu_seqlens=sequences,
        **output_flags,
    )


def initial_or_zero(
    initial: Tensor | None, inputs: RuleInputs, segments: Segments | None
) -> Tensor:
    """``initial``, or zeros for None; so training and generation run the same
    kernel."""
    if initial is not None:
        return initial.contiguous()
    assert segments is not None
    H, V = inputs.v.shape[2:]
    K = inputs.k.shape[3]
    device = inputs.v.device
    return torch.zeros(
        len(segments.sequence_of_segment), H, K, V, dtype=torch.float32, device=device
    )


def gradients(
    d_o: Tensor,
    inputs: RuleInputs,
    g_sum: Tensor,
    A: Tensor,
    segments: Segments | None,
    states_in: Tensor | None,
    d_states_out: Tensor | None,
    states: Tensor | None,
    overwrite_last: bool,
) -> tuple[Tensor, ...]:
    """The gradients of the inputs, in the order of :class:`RuleInputs`.

    ``d_o`` is ``[B, S, H, V]``. ``states_in`` ``[P, H, K, V]`` are states that enter
    segments, ``d_states_out`` gradients of states that leave segments. ``states`` are
    the states before every chunk, computed here if None. With ``overwrite_last`` the
    kernel may write over ``d_states_out``. ``g_sum``, ``A``: see :class:`Kept`.
    """
    run = kernels()
    sequences, offsets, _ = _boundaries(segments)
    if isinstance(kernels(), HopperKernels):
        options = {"overwrite_dht": overwrite_last}
    else:
        options = {}
    common = {
        "k": inputs.k,
        "v": inputs.v,
        "a": A,
        "g": g_sum,
        "b": inputs.beta,
        "cu_seqlens": offsets,
    }
    if states is None:
        states = run.fused_gdr_h(
            initial_state=states_in, output_final_state=False, output_h=True, **common
        )[0]
    dq, dk, dv, dg, dbeta, _ = run.fused_gdr_bwd(
        q=inputs.q,
        do=d_o,
        dht=d_states_out,
        h=states,
        scale=inputs.k.shape[-1] ** -0.5,
        **common,
        **options,
    )
    dg = run.chunk_local_cumsum(
        dg, reverse=True, cu_seqlens=sequences, zero_last_chunk=True
    )
    return dq, dk, dv, dg, dbeta
