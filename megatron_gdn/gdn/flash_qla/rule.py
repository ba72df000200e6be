"""FlashQLA as a rule that calls FlashQLA's kernels one by one.

FlashQLA's own entry function waits for sequence lengths from the GPU, and sums dq and
dk over value heads in an extra pass. This module cuts sequences by offsets on the host,
and the backward of the front sums dq and dk over value heads.

Legend: P segments; other letters as in ``docs/glossary.md``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...ops.delta_rule.base import HeadSizes, RuleGrads, RuleInputs
from ...ops.documents import Documents, documents_of_rows
from ...ops.obstacles import Obstacle, why_not_flash_qla
from ...ops.rules.base import (
    Bits,
    RepeatResult,
    Rule,
    RuleBackward,
    RuleForward,
    RuleOutput,
    SavedForBackward,
    contiguous_state,
    in_one_row,
    in_rows,
)
from ...ops.rules.repeatable import RepeatableSetup
from ...ops.state_maps.segments import Segments, compose, initial_gradients
from ...ops.state_maps.state_map import StateMap
from .builds import Heads, set_next_calls
from .plan import kernels, plan_of, plan_of_rows, plan_without_cuts
from .states import (
    SavedTensors,
    SegmentMaps,
    decay_sums_and_inverses,
    gradients,
    initial_or_zero,
    run_forward,
    segment_maps,
)


class FlashQlaForward(RuleForward):
    """The forward of one call of FlashQLA's rule."""

    _maps: SegmentMaps | None = None

    def _segment_maps(self) -> SegmentMaps:
        """The state map of every segment of the sequences, computed once."""
        if self._maps is None:
            segments = self.rule.plan(self.inputs, self.documents, states=True)
            self._maps = segment_maps(in_one_row(self.inputs), segments)
        return self._maps

    def state_map(self) -> StateMap:
        maps = self._segment_maps()
        return compose(maps.local, maps.through, maps.segments)

    def run(
        self, initial: Tensor | None = None, *, keep: bool = True, final: bool = False
    ) -> RuleOutput:
        """The output from the ``initial`` states ``[N, H, K, V]`` (None: zeros); also
        the final states if ``final``, and the tensors for the backward if ``keep``."""
        initial = contiguous_state(initial)
        on_grid = self.rule.bits is Bits.ON_GRID
        maps = self._maps
        if on_grid:
            segments = self.rule.plan(self.inputs, self.documents, states=False)
            maps = None
            initial = initial_or_zero(initial, self.inputs, segments)
        elif initial is not None or maps is not None:
            maps = self._segment_maps()
            segments = maps.segments
        else:
            segments = self.rule.plan(self.inputs, self.documents, states=False)
            # If one sequence is cut, all sequences run in the kernels for segments. So
            # with batch_invariant uncut sequences always run in these kernels.
            if segments is not None and (
                self.rule.batch_invariant or not segments.are_sequences
            ):
                maps = segment_maps(in_one_row(self.inputs), segments, from_zero=True)
        if segments is None:
            inputs = self.inputs
        else:
            inputs = in_one_row(self.inputs)
        if maps is None:
            states_in = initial
            g_sum, A = decay_sums_and_inverses(inputs, segments)
            tensors = SavedTensors(g_sum, A)
        else:
            states_in = maps.states_in(initial)
            tensors = maps.saved_tensors_with(states_in)
        o, _, last = run_forward(
            inputs,
            tensors.g_sum,
            tensors.A,
            states_in,
            segments,
            output_h=False,
            output_final_state=final or on_grid,
        )
        saved = SavedForBackward(tuple(tensors) if keep else (), segments)
        return RuleOutput(in_rows(o, self.batch_shape), last if final else None, saved)


class FlashQlaBackward(RuleBackward):
    """The backward of one call of FlashQLA's rule."""

    # The segments' state maps, if this backward computed them; None: the forward saved
    # what the backward needs.
    _maps: SegmentMaps | None = None
    # [P, H, K, V], the result of `_d_states_in_from_d_o`; None: not computed yet
    _d_states_in: Any = None

    def __init__(
        self,
        rule: Rule,
        d_o: Tensor,
        inputs: RuleInputs,
        saved: SavedForBackward,
        documents: Documents | None,
    ) -> None:
        """Take the segments and tensors from ``saved``. A forward on the grid cuts
        nothing; its backward cuts the sequences here, so that segments run in
        parallel."""
        super().__init__(rule, d_o, inputs, saved, documents)
        self._segments = saved.other_values
        self._saved_tensors = SavedTensors._make(saved.tensors)
        self._states_at_chunks = saved.intermediates
        del self.saved  # each saved tensor is freed after its last use
        if self._segments is not None:
            self.d_o = in_one_row(self.d_o)
            self.inputs = in_one_row(self.inputs)
        if rule.bits is Bits.ON_GRID:
            self._cut_as_with_states()

    def _cut_as_with_states(self) -> None:
        """Cut sequences as a forward with initial states does; compute the segments'
        state maps."""
        documents = self.documents
        if documents is None:
            documents = documents_of_rows(self.batch_shape, self.d_o.device)
        self.d_o = in_one_row(self.d_o)
        self.inputs = in_one_row(self.inputs)
        self._states_at_chunks = None
        heads = self.inputs.v.shape[2]
        g_sum = in_one_row(self._saved_tensors.g_sum)
        A = in_one_row(self._saved_tensors.A)
        with_states = True
        self._segments = plan_of(
            documents, heads, self.rule.batch_invariant, with_states
        )
        self._maps = segment_maps(self.inputs, self._segments, (g_sum, A))
        self._saved_tensors = self._maps.saved_tensors_with(states_in=None)

    def _d_states_in_from_d_o(self) -> Tensor:
        """The gradients of states that enter segments, computed from d_o, with zero
        gradients of the states that leave segments."""
        if self._d_states_in is None:
            q, k, _, _, beta = self.inputs
            _, self._d_states_in = kernels().fused_gdr_dh(
                q=q,
                k=k,
                a=self._saved_tensors.A,
                g=self._saved_tensors.g_sum,
                b=beta,
                do=self.d_o,
                output_dh=False,
                scale=k.shape[-1] ** -0.5,
                cu_seqlens=self._segments.offsets,
                num_warmup_chunks=self._saved_tensors.chunks_after_S_in,
            )
        return self._d_states_in

    def d_initial(self) -> Tensor:
        """The gradient of the initial states, if the final states have zero
        gradients."""
        tensors = self._saved_tensors
        # A forward without initial states made no maps, or maps for which the sequences
        # begin with zero states.
        if tensors.chunks_after_S_in is None or tensors.dS_passes is not None:
            self._cut_as_with_states()
        return initial_gradients(
            self._d_states_in_from_d_o(), self._saved_tensors.through, self._segments
        )

    def scale_with_d_o(self, factor: Tensor) -> None:
        """Scale the gradients computed so far by ``factor``, as the caller has scaled
        ``d_o``."""
        if self._d_states_in is not None:
            self._d_states_in = self._d_states_in * factor

    def run(
        self, initial: Tensor | None = None, d_final: Tensor | None = None
    ) -> RuleGrads:
        """The gradients of the inputs; ``initial`` and ``d_final`` are ``[N, H, K, V]``
        or None (zeros).

        If ``through`` is saved, the kernel gets the states that enter segments in place
        of ``initial``, and the gradients of the states that leave segments in place of
        ``d_final``. All saved tensors are freed.
        """
        initial = contiguous_state(initial)
        d_final = contiguous_state(d_final)
        tensors = self._saved_tensors
        states_in = initial
        d_states_out = d_final
        if tensors.through is not None:
            if self._maps is None:
                states_in = tensors.states_in
            else:
                states_in = self._maps.states_in(initial)
            d_states_out = tensors.d_states_out(
                self._d_states_in_from_d_o(), self._segments, d_final
            )
        g_sum = tensors.g_sum
        A = tensors.A
        states_at_chunks = self._states_at_chunks
        # Free the tensors that the kernel does not read, such as ``through``.
        del tensors, self._saved_tensors
        self._maps = None
        self._d_states_in = None
        self._states_at_chunks = None
        grads = gradients(
            self.d_o,
            self.inputs,
            g_sum,
            A,
            self._segments,
            states_in,
            d_states_out,
            states_at_chunks,
            overwrite_d_states_out=d_states_out is not d_final,
        )
        return RuleGrads(*(in_rows(x, self.batch_shape) for x in grads))


# The setups that `benchmarks/run.py repeats` tested; ``sizes`` are the tested numbers
# of value heads per key head.
REPEATABLE_SETUPS: tuple[RepeatableSetup, ...] = (
    RepeatableSetup(
        capability=(9, 0),
        versions={"flash-qla": "0.1.3", "tilelang": "0.1.15"},
        dtypes=(torch.bfloat16,),
        sizes=(1, 2, 4),
        evidence="2 x 200 repeats of 8192 tokens were equal on an H200",
    ),
)


def _why_not_heads(heads: int) -> str | None:
    """Why FlashQLA cannot run this number of value heads, or None if it can."""
    if heads % 2 == 0:
        return None
    # With 3 value heads tilelang found no layout for the sums of g over a chunk.
    return f"flash_qla compiles for an even number of value heads per rank, not {heads}"


class FlashQlaRule(Rule):
    """FlashQLA's gated delta rule for bf16 or fp16 heads of 128.

    Long sequences are cut into segments that run side by side. Once the log-decay
    within a segment falls below -10, the state that entered the segment counts as zero
    (e^-10 = 4.5e-5, a hundredth of a bf16 rounding).

    Args:
        bits: By default FlashQLA's cost model cuts sequences by all lengths of the
            batch, which is faster for a batch of long and short sequences.
            ``DETERMINISTIC`` cuts a sequence only by its own length and the number of
            heads. (How many value columns a block computes depends on the size of the
            batch, but no column's sums depend on that number.) ``ON_GRID`` cuts no
            sequence: a thread block computes one chunk after another with the state in
            fp32, and can start at any chunk. Its backward cuts as ``DETERMINISTIC``
            does.
    """

    name = "flash_qla"
    why_chosen = "heads of 128 on this GPU"
    backward_reads = frozenset({"q", "k", "v", "beta"})
    forward_class = FlashQlaForward
    backward_class = FlashQlaBackward

    def __init__(self, bits: Bits = Bits.FREE) -> None:
        self.bits = bits

    @classmethod
    def of(cls, sizes: HeadSizes, bits: Bits) -> FlashQlaRule:
        return cls(bits)

    @classmethod
    def why_not(
        cls, device: torch.device, dtype: torch.dtype, sizes: HeadSizes
    ) -> Obstacle | None:
        """Why FlashQLA cannot train these heads here; its kernels need an even number
        of value heads."""
        obstacle = why_not_flash_qla(device, dtype, sizes.key_dim, sizes.value_dim)
        heads = _why_not_heads(sizes.value_heads)
        if obstacle is None and heads is not None:
            return Obstacle(heads)
        return obstacle

    @classmethod
    def repeats(
        cls, device: torch.device, dtype: torch.dtype, sizes: HeadSizes
    ) -> RepeatResult:
        """Whether ``REPEATABLE_SETUPS`` covers this GPU, dtype, ratio of heads and the
        installed versions."""
        ratio = sizes.value_heads // sizes.key_heads
        for known in REPEATABLE_SETUPS:
            if known.covers(device, dtype, ratio):
                return RepeatResult(True, known.evidence)
        return RepeatResult(
            False,
            f"flash_qla was not tested for repeatability with {dtype}, "
            f"{sizes.key_heads} key and {sizes.value_heads} value heads on this GPU "
            "with the installed versions",
        )

    def plan(
        self, inputs: RuleInputs, documents: Documents | None, states: bool
    ) -> Segments | None:
        """The segments in which the rule runs; None: each batch row is one sequence,
        uncut. ``states``: whether sequences have initial states.

        The method also tells :mod:`.builds` which group of kernels the next calls need.
        """
        rows, tokens = inputs.k.shape[:2]
        heads = inputs.v.shape[2]
        device = inputs.k.device
        if documents is None and (states or self.batch_invariant):
            documents = documents_of_rows((rows, tokens), device)
        if documents is None:
            segments = plan_of_rows(rows, tokens, heads, device)
        elif self.bits is Bits.ON_GRID:
            segments = plan_without_cuts(documents)
        else:
            segments = plan_of(documents, heads, self.batch_invariant, states)
        if self.bits is Bits.ON_GRID:
            use = "whole"
        elif states:
            use = "states"
        elif segments is None:
            use = "rows"
        elif segments.are_sequences:
            use = "uncut"
        else:
            use = "cut"
        set_next_calls(Heads(inputs.k.shape[2], heads, inputs.k.dtype), use)
        return segments

    def why_not_heads(self, heads: int) -> str | None:
        return _why_not_heads(heads)

    def kept_to_recompute(self, saved: SavedForBackward) -> SavedForBackward:
        """``saved`` without g_sum and A, which the second run computes again. They are
        the first two tensors, see :class:`.states.SavedTensors`."""
        return SavedForBackward(saved.tensors[2:], saved.other_values)

    def recompute(
        self,
        inputs: RuleInputs,
        kept: SavedForBackward,
        documents: Documents | None,
        initial: Tensor | None,
    ) -> RuleOutput:
        """Compute the output and the states at chunks, which the backward reads, in one
        pass.

        ``inputs`` and ``initial`` are those of the first run, ``kept`` is the result of
        :meth:`kept_to_recompute`. Without a second run, another kernel computes the
        states at chunks with other roundings.
        """
        initial = contiguous_state(initial)
        segments: Segments | None = kept.other_values
        set_next_calls(
            Heads(inputs.k.shape[2], inputs.v.shape[2], inputs.k.dtype), "recompute"
        )
        rows = inputs.v.shape[:2]
        on_grid = self.bits is Bits.ON_GRID
        if segments is not None:
            inputs = in_one_row(inputs)
        g_sum, A = decay_sums_and_inverses(inputs, segments)
        tensors = SavedTensors(g_sum, A, *kept.tensors)
        if tensors.states_in is None:
            states_in = initial
        else:
            states_in = tensors.states_in
        if on_grid:
            states_in = initial_or_zero(initial, inputs, segments)
        o, states_at_chunks, _ = run_forward(
            inputs,
            g_sum,
            A,
            states_in,
            segments,
            output_h=not on_grid,
            output_final_state=on_grid,
        )
        saved = SavedForBackward(tuple(tensors), segments, states_at_chunks)
        return RuleOutput(in_rows(o, rows), None, saved)
