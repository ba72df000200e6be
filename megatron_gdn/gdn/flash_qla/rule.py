"""FlashQLA as a rule, whose stages are called one by one.

FlashQLA's own entry function waits for sequence lengths from the GPU. It also sums dq and dk over
value heads in an extra pass. Here the plan uses the host's offsets, and the backward of the front
sums the heads.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from ...ops.delta_rule.base import RuleGrads, RuleInputs
from ...ops.documents import Documents, documents_of_rows
from ...ops.layout import Layout
from ...ops.rules.base import (
    Bits,
    Rule,
    RuleBackward,
    RuleForward,
    RuleOutput,
    Saved,
    in_one_row,
    in_rows,
)
from ...ops.state_maps.parts import compose, entering_states, initial_gradients, leaving_gradients
from ...ops.state_maps.state_map import StateMap
from .builds import Heads, compile_early, set_next_calls
from .plan import Plan, plan_of, plan_of_rows, plan_of_whole, stages
from .states import PartMaps, gradients, output, part_maps, run_uncut, sums_and_inverses


class ForwardRun(NamedTuple):
    """How a forward ran; the forward saved g_sum, A, and other tensors by ``how``."""

    plan: Plan
    # "in parts" saved the tensors of PartMaps.saved, "whole" the initial states if any were given,
    # "own" (FlashQLA's own driver) the fields of ``cache``.
    how: Literal["in parts", "whole", "own"]
    cache: type | None = None  # FlashQLA's dataclass of tensors for its own backward


class FlashQlaForward(RuleForward):
    _maps: PartMaps | None = None

    def _part_maps(self) -> PartMaps:
        if self._maps is None:
            plan = self.rule.plan(self.inputs, self.documents, states=True, maps=True)
            self._maps = part_maps(in_one_row(self.inputs), plan)
        return self._maps

    def state_map(self) -> StateMap:
        maps = self._part_maps()
        return StateMap(*compose(maps.local, maps.through, maps.plan.cut))

    def run(
        self, initial: Tensor | None = None, *, keep: bool = True, final: bool = False
    ) -> RuleOutput:
        inputs, rows = self.inputs, self.rows
        if self.rule.bits is Bits.ON_GRID and self._maps is None:
            plan = self.rule.plan(inputs, self.documents, states=True)
            o, last, tensors = run_uncut(in_one_row(inputs), initial, plan)
            saved = Saved(tensors if keep else (), ForwardRun(plan, "whole"))
            return RuleOutput(in_rows(o, rows), last if final else None, saved)
        if initial is not None or self._maps is not None:
            maps = self._part_maps()
            plan = maps.plan
            entering = entering_states(maps.local, maps.through, plan.cut, initial)
            o, _, last = output(
                in_one_row(inputs), maps.g_sum, maps.A, entering, *plan.carrying,
                output_h=False, output_final_state=final,
            )  # fmt: skip
            saved = Saved(maps.saved(entering) if keep else (), ForwardRun(plan, "in parts"))
            return RuleOutput(in_rows(o, rows), last, saved)
        plan = self.rule.plan(inputs, self.documents, states=False)
        flat = inputs if plan.parts is None else in_one_row(inputs)
        g_sum, A, o, _, last, carried = stages().chunk_gated_delta_rule_fwd(
            q=flat.q, k=flat.k, v=flat.v, g=flat.g, beta=flat.beta, scale=flat.k.shape[-1] ** -0.5,
            cu_seqlens=plan.context.cu_seqlens, output_final_state=final, enable_fwd_cp_cache=keep,
            cp_context=plan.context, is_train=True,
        )  # fmt: skip
        # FlashQLA's dataclass has the tensors that the backward reads.
        kept = () if carried is None else tuple(vars(carried).values())
        cache = None if carried is None else type(carried)
        saved = Saved((g_sum, A, *kept), ForwardRun(plan, "own", cache))
        return RuleOutput(in_rows(o, rows), last, saved)


class CarriedBackward(RuleBackward):
    """The backward of a forward that passed states from part to part."""

    _d_local: Any = None  # [P, H, K, V], the result of _d_entering

    def __init__(
        self, rule: Rule, d_o: Tensor, inputs: RuleInputs, saved: Saved, documents: Documents | None
    ) -> None:
        super().__init__(rule, d_o, inputs, saved, documents)
        self.d_o, self.inputs = in_one_row(d_o), in_one_row(inputs)
        self._plan, self._at_chunks = saved.plan.plan, saved.made
        self.saved = saved._replace(made=None)

    def _d_entering(self) -> Tensor:
        """Gradients of states that enter parts, if the states that leave parts have none."""
        if self._d_local is not None:
            return self._d_local
        g_sum, A, chunks_back, *_ = self.saved.tensors
        q, k, *_, beta = self.inputs
        _, d_local = stages().fused_gdr_dh(
            q=q, k=k, a=A, g=g_sum, b=beta, do=self.d_o, dht=None, output_dh0=True,
            output_dh=False, scale=k.shape[-1] ** -0.5, cu_seqlens=self._plan.cut.offsets,
            num_warmup_chunks=chunks_back,
        )  # fmt: skip
        self._d_local = d_local
        return d_local

    def d_initial(self) -> Tensor:
        parts = self._plan.cut
        through = None if parts.are_sequences else self.saved.tensors[3]
        return initial_gradients(self._d_entering(), through, parts)

    def d_o_was_scaled(self, by: Tensor) -> None:
        if self._d_local is not None:
            self._d_local = self._d_local * by

    def run(self, initial: Tensor | None = None, d_final: Tensor | None = None) -> RuleGrads:
        parts, (g_sum, A, *kept) = self._plan.cut, self.saved.tensors
        if parts.are_sequences:
            first, last_grad = initial, d_final
        else:
            _, through, first = kept
            last_grad = leaving_gradients(self._d_entering(), through, parts, d_final)
        self._d_local = None
        states, self._at_chunks = self._at_chunks, None
        grads = gradients(self.d_o, self.inputs, g_sum, A, self._plan, first, last_grad, states)
        return RuleGrads(*(in_rows(x, self.rows) for x in grads))


class UncarriedBackward(RuleBackward):
    """The backward of a forward by FlashQLA's own driver."""

    def d_initial(self) -> Tensor:
        # This forward kept no maps of parts, which the gradients of initial states need.
        g_sum, A = (in_one_row(x) for x in self.saved.tensors[:2])
        plan = self.rule.plan(self.inputs, self.documents, states=True)
        inputs = in_one_row(self.inputs)
        saved = Saved(
            part_maps(inputs, plan, (g_sum, A)).saved(entering=None), ForwardRun(plan, "in parts")
        )
        begun = CarriedBackward(self.rule, self.d_o, self.inputs, saved, self.documents)
        return begun.d_initial()

    def run(self, initial: Tensor | None = None, d_final: Tensor | None = None) -> RuleGrads:
        (plan, _, cache), states = self.saved.plan, self.saved.made
        g_sum, A, *kept = self.saved.tensors
        del self.saved  # each saved tensor is freed after its last use
        d_o, inputs = self.d_o, self.inputs
        if plan.parts is not None:
            d_o, inputs = in_one_row(d_o), in_one_row(inputs)
        first, last_grad = stages().cp_preprocess_bwd(
            plan.context, q=inputs.q, k=inputs.k, v=inputs.v, a=A, g=g_sum, beta=inputs.beta,
            do=d_o, dht=d_final, scale=inputs.k.shape[-1] ** -0.5, initial_state=initial,
            state_v_first=False, cp_cache=None if cache is None else cache(*kept),
        )  # fmt: skip
        del kept
        made_here = last_grad is not d_final
        grads = gradients(d_o, inputs, g_sum, A, plan, first, last_grad, states, made_here)
        return RuleGrads(*(in_rows(x, self.rows) for x in grads))


class FlashQlaRule(Rule):
    """FlashQLA's gated delta rule for bf16 or fp16 heads of 128.

    Long sequences are cut into parts that run side by side. Once the log-decay within a part falls
    below -10, the state that entered the part counts as zero (e^-10 = 4.5e-5, a hundredth of a
    bf16 rounding).

    Args:
        bits: By default FlashQLA's cost model cuts by all lengths of the batch, which is faster for
            a batch of long and short sequences. ``DETERMINISTIC`` cuts a sequence by its own length
            and the number of heads alone. (FlashQLA chooses by the size of the batch how many value
            columns a block computes, but no column's sums depend on that choice.) ``ON_GRID`` cuts
            no sequence: a block walks from chunk to chunk with the state in fp32, and can start
            from the state of any chunk. Its backward cuts as for ``DETERMINISTIC``.
    """

    name = "flash_qla"
    reads_again = frozenset({"q", "k", "v", "beta"})
    forward = FlashQlaForward

    def __init__(self, bits: Bits = Bits.FREE) -> None:
        self.bits = bits

    def plan(
        self, inputs: RuleInputs, documents: Documents | None, states: bool, maps: bool = False
    ) -> Plan:
        plan = self._plan(inputs, documents, states)
        part = "whole" if self.bits is Bits.ON_GRID and not maps else plan.part(states)
        set_next_calls(Heads(inputs.k.shape[2], inputs.v.shape[2], inputs.k.dtype), part)
        return plan

    def _plan(self, inputs: RuleInputs, documents: Documents | None, states: bool) -> Plan:
        (rows, tokens), heads, device = inputs.k.shape[:2], inputs.v.shape[2], inputs.k.device
        if documents is None:
            if not (states or self.batch_invariant):
                return plan_of_rows(rows, tokens, heads, device)
            documents = documents_of_rows((rows, tokens), device)
        if self.bits is Bits.ON_GRID:
            return plan_of_whole(documents)
        return plan_of(documents, heads, self.batch_invariant, states)

    def prepare(self, layout: Layout, dtype: torch.dtype, states: bool) -> None:
        heads = Heads(layout.heads("key"), layout.heads("value"), dtype)
        # Rows of usual lengths are cut into parts, so these kernels are compiled first.
        part = "whole" if self.bits is Bits.ON_GRID else "cut"
        compile_early(heads, "states" if states else part)

    def why_not_heads(self, heads: int) -> str | None:
        if heads % 2 == 0:
            return None
        # With 3 value heads tilelang found no layout for the sums of g over a chunk.
        return f"flash_qla compiles for an even number of value heads per rank, not {heads}"

    def kept_to_run_again(self, saved: Saved) -> Saved:
        """All saved tensors but g_sum and A, which the second run computes again."""
        return Saved(saved.tensors[2:], saved.plan)

    def run_again(
        self, inputs: RuleInputs, kept: Saved, documents: Documents | None, initial: Tensor | None
    ) -> RuleOutput:
        """Compute in one pass the output and the states at chunks, which the backward reads.

        Without a second run, another kernel computes the states at chunks with other roundings.
        """
        plan: Plan = kept.plan.plan
        set_next_calls(Heads(inputs.k.shape[2], inputs.v.shape[2], inputs.k.dtype), "again")
        rows, at_chunks = inputs.v.shape[:2], None
        inputs = inputs if plan.parts is None else in_one_row(inputs)
        if kept.plan.how == "whole":
            o, _, tensors = run_uncut(inputs, initial, plan)
        else:
            g_sum, A = sums_and_inverses(inputs, plan)
            if kept.plan.how == "in parts":
                entering = initial if plan.cut.are_sequences else kept.tensors[2]
                boundaries = plan.carrying
            else:
                cache, context = kept.plan.cache, plan.context
                entering = None if cache is None else cache(*kept.tensors).h0
                boundaries = plan.part_offsets, context.seq_map_c2r, context.cu_seqlens
            o, at_chunks, _ = output(
                inputs, g_sum, A, entering, *boundaries, output_h=True, output_final_state=False
            )
            tensors = g_sum, A, *kept.tensors
        return RuleOutput(in_rows(o, rows), None, Saved(tensors, kept.plan, at_chunks))

    def begin_backward(
        self, d_o: Tensor, inputs: RuleInputs, saved: Saved, documents: Documents | None
    ) -> UncarriedBackward | CarriedBackward:
        if saved.plan.how == "whole":
            saved = self._saved_parts(inputs, saved, documents)
        if saved.plan.how == "in parts":
            return CarriedBackward(self, d_o, inputs, saved, documents)
        return UncarriedBackward(self, d_o, inputs, saved, documents)

    def _saved_parts(self, inputs: RuleInputs, saved: Saved, documents: Documents | None) -> Saved:
        """The tensors that a forward in parts would have saved, computed from ``saved``."""
        g_sum, A, *initial = saved.tensors
        if documents is None:
            documents = documents_of_rows(inputs.v.shape[:2], inputs.v.device)
        plan = plan_of(documents, inputs.v.shape[2], True, states=True)
        maps = part_maps(in_one_row(inputs), plan, (g_sum, A))
        entering = entering_states(maps.local, maps.through, plan.cut, *initial or (None,))
        return Saved(maps.saved(entering), ForwardRun(plan, "in parts"))
