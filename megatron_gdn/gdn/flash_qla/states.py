"""Calls FlashQLA's kernels, which compute state maps, outputs and gradients.

FlashQLA computes a map of states, ``S_out = through @ S_in + local``, for each segment
of a sequence and each head. Context parallelism sends the maps; the forward applies the
maps to S_in.

If a head's log-decay sums to less than -20 within a segment, ``through`` is zero.
``local`` is then computed only from the last chunks, whose log-decay sums to -20, since
e^-20 = 2e-9 is below the precision of an fp32 sum. If the sequences begin with zero
states, the bound is -10, as in FlashQLA.

Legend: P segments; B, S, H, K, V as in ``docs/glossary.md``.
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
_NEGLIGIBLE_LOG_DECAY_FROM_ZERO = -10.0


class SavedTensors(NamedTuple):
    """The tensors of a forward that the backward reads."""

    g_sum: Tensor  # [B, S, H] fp32, log-decay summed within chunks
    A: Tensor  # [B, S, H, 64], inverse of the chunk's triangular system
    # [P, H, K, V], the states that enter segments; None if the sequences are not cut
    states_in: Tensor | None = None
    through: Tensor | None = None  # [P, H, K, K]; None if the sequences are not cut
    # int32 [P, H], how many of a segment's first chunks depend on S_in; None if the
    # forward needed no state maps
    chunks_after_S_in: Tensor | None = None
    # bool [P, H], whether dS_in depends on dS_out; None if the sequences had initial
    # states
    dS_passes: Tensor | None = None

    def d_states_out(
        self, d_states_in: Tensor, segments: Segments, d_final: Tensor | None
    ) -> Tensor | None:
        """The gradients ``[P, H, K, V]`` of states that leave segments.

        ``d_states_in``: the gradients of states that enter segments, computed with zero
        gradients of the states that leave segments. ``d_final``: the gradients of the
        final states of sequences; None: zeros. FlashQLA's kernel composes the
        gradients of sequences that begin with zero states; this package composes the
        gradients of sequences with initial states.
        """
        if self.dS_passes is None:
            return leaving_gradients(d_states_in, self.through, segments, d_final)
        return kernels().correct_terminal_states(
            d_final, d_states_in, self.through, self.dS_passes, segments.first_segment
        )


class SegmentMaps(NamedTuple):
    """The state maps of segments, and the tensors that the backward reads."""

    segments: Segments
    local: Tensor  # [P, H, K, V]
    through: Tensor  # [P, H, K, K]
    # bool [P, H], whether S_out depends on S_in; None: use ``through``
    S_passes: Tensor | None
    # for the backward, without ``states_in`` and ``through``
    saved_tensors: SavedTensors

    def states_in(self, initial: Tensor | None) -> Tensor | None:
        """The states ``[P, H, K, V]`` that enter segments, from the ``initial`` states
        of sequences; None: all are zero."""
        if self.S_passes is None:
            return entering_states(self.local, self.through, self.segments, initial)
        return kernels().correct_initial_states(
            initial,
            self.local,
            self.through,
            self.S_passes,
            self.segments.first_segment,
        )

    def saved_tensors_with(self, states_in: Tensor | None) -> SavedTensors:
        """The tensors for the backward, after a forward with these ``states_in``.

        If each sequence is one segment and ``S_passes`` is None, the backward needs
        neither ``states_in`` nor ``through``.
        """
        if self.segments.are_sequences and self.S_passes is None:
            return self.saved_tensors
        return self.saved_tensors._replace(states_in=states_in, through=self.through)


def segment_maps(
    inputs: RuleInputs,
    segments: Segments,
    sums_and_inverses: tuple[Tensor, Tensor] | None = None,
    *,
    from_zero: bool = False,
) -> SegmentMaps:
    """The state maps of segments.

    ``sums_and_inverses``: ``g_sum`` and ``A``, if a forward has computed them.
    With ``from_zero`` the sequences begin with zero states. As in FlashQLA, the maps
    then have k's dtype, and the map of a sequence that is one segment is not computed.
    """
    flash_qla = kernels()
    if sums_and_inverses is None:
        sums_and_inverses = decay_sums_and_inverses(inputs, segments)
    g_sum, A = sums_and_inverses
    if from_zero:
        no_S_passes = segments.ends_sequence
        no_dS_passes = segments.begins_sequence
        threshold = _NEGLIGIBLE_LOG_DECAY_FROM_ZERO
    else:
        no_S_passes = segments.no_segment
        no_dS_passes = segments.no_segment
        threshold = _NEGLIGIBLE_LOG_DECAY
    warmup = flash_qla.get_warmup_chunks_bidi(
        g=g_sum,
        cu_seqlens=segments.offsets,
        ht_mask_fwd=no_S_passes,
        ht_mask_bwd=no_dS_passes,
        threshold=threshold,
    )
    last_chunks, chunks_after_S_in, S_passes, dS_passes = warmup
    options = {}
    if not from_zero:
        S_passes = None
        dS_passes = None
        # The kernel counts chunks back from a segment's end. If a segment ends inside a
        # chunk, chunks counted from the segment's end are not the sequence's chunks. So
        # the kernel then runs all chunks of the segment.
        if segments.ends_inside_chunk is not None:
            last_chunks = torch.where(
                segments.ends_inside_chunk, segments.chunk_counts, last_chunks
            )
        # FlashQLA's own function rounds the maps to k's dtype; HopperKernels can return
        # fp32.
        if isinstance(kernels(), HopperKernels):
            options["final_dtype"] = torch.float32
    _, local, through = flash_qla.fused_gdr_h(
        k=inputs.k,
        v=inputs.v,
        a=A,
        g=g_sum,
        b=inputs.beta,
        output_final_state=True,
        output_h=False,
        cu_seqlens=segments.offsets,
        num_warmup_chunks=last_chunks,
        **options,
    )
    if not from_zero:
        local = local.float()
        through = through.float()
    saved = SavedTensors(
        g_sum, A, chunks_after_S_in=chunks_after_S_in, dS_passes=dS_passes
    )
    return SegmentMaps(segments, local, through, S_passes, saved)


class _Boundaries(NamedTuple):
    """The boundaries of sequences and segments; all are None if each batch row is one
    sequence."""

    sequences: Tensor | None = None  # int32 [N + 1], offsets of the sequences
    segments: Tensor | None = None  # int32 [P + 1], offsets of the segments
    owners: Tensor | None = None  # int32 [P], the sequence of each segment


def _boundaries_of(segments: Segments | None) -> _Boundaries:
    """The offsets that FlashQLA's functions take; without ``segments`` all are None."""
    if segments is None:
        return _Boundaries()
    return _Boundaries(
        segments.sequence_offsets, segments.offsets, segments.sequence_of_segment
    )


def decay_sums_and_inverses(
    inputs: RuleInputs, segments: Segments | None
) -> tuple[Tensor, Tensor]:
    """``g_sum`` and ``A`` (see :class:`SavedTensors`) of the sequences or batch
    rows."""
    sequences = _boundaries_of(segments).sequences
    g_sum = kernels().chunk_local_cumsum(g=inputs.g, cu_seqlens=sequences)
    return g_sum, kernels().kkt_solve(k=inputs.k, b=inputs.beta, cu_seqlens=sequences)


def run_forward(
    inputs: RuleInputs,
    g_sum: Tensor,
    A: Tensor,
    states_in: Tensor | None,
    segments: Segments | None,
    *,
    output_h: bool,
    output_final_state: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return ``o``, the states at chunks if ``output_h``, and the states that leave
    sequences if ``output_final_state``.

    ``states_in`` are the states that enter segments; None means zero. ``g_sum`` are the
    sums of the log-decay, ``A`` the inverses of :class:`SavedTensors`.
    """
    boundaries = _boundaries_of(segments)
    return kernels().fused_gdr_fwd(
        q=inputs.q,
        k=inputs.k,
        v=inputs.v,
        a=A,
        g=g_sum,
        b=inputs.beta,
        scale=inputs.k.shape[-1] ** -0.5,
        initial_state=states_in,
        cu_seqlens=boundaries.segments,
        cp_seq_map=boundaries.owners,
        raw_cu_seqlens=boundaries.sequences,
        output_h=output_h,
        output_final_state=output_final_state,
    )


def initial_or_zero(
    initial: Tensor | None, inputs: RuleInputs, segments: Segments | None
) -> Tensor:
    """``initial``, or zeros ``[N, H, K, V]`` for None; so training and generation run
    the same kernel."""
    if initial is not None:
        return initial
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
    states_at_chunks: Tensor | None,
    overwrite_d_states_out: bool,
) -> tuple[Tensor, ...]:
    """The gradients of the inputs, in the order of :class:`RuleInputs`.

    ``d_o`` is ``[B, S, H, V]``. ``states_in`` ``[P, H, K, V]`` are the states that
    enter segments; ``d_states_out`` are the gradients of the states that leave
    segments. ``states_at_chunks`` are the states before every chunk, computed here if
    None. With ``overwrite_d_states_out`` the kernel may write over ``d_states_out``.
    ``g_sum`` are the sums of the log-decay, ``A`` the inverses of
    :class:`SavedTensors`.
    """
    flash_qla = kernels()
    boundaries = _boundaries_of(segments)
    if isinstance(kernels(), HopperKernels):
        options = {"overwrite_dht": overwrite_d_states_out}
    else:
        options = {}
    common = {
        "k": inputs.k,
        "v": inputs.v,
        "a": A,
        "g": g_sum,
        "b": inputs.beta,
        "cu_seqlens": boundaries.segments,
    }
    if states_at_chunks is None:
        states_at_chunks = flash_qla.fused_gdr_h(
            initial_state=states_in, output_final_state=False, output_h=True, **common
        )[0]
    dq, dk, dv, dg, dbeta, _ = flash_qla.fused_gdr_bwd(
        q=inputs.q,
        do=d_o,
        dht=d_states_out,
        h=states_at_chunks,
        scale=inputs.k.shape[-1] ** -0.5,
        **common,
        **options,
    )
    # g's gradient is the reverse running sum, within each chunk, of g_sum's gradient
    dg = flash_qla.chunk_local_cumsum(
        dg, reverse=True, cu_seqlens=boundaries.sequences, zero_last_chunk=True
    )
    return dq, dk, dv, dg, dbeta
