"""FlashQLA as a rule: its stages called one by one, so that nothing waits for the device.

FlashQLA's own entry reads sequence lengths back from the GPU, once per new ``cu_seqlens``, and
sums dq and dk over the value heads of a key head in a pass of its own. Here the plan of a packed
batch is made from host offsets, and the heads are summed inside our backward kernel.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...ops.delta_rule.base import RuleGrads, RuleInputs
from ...ops.documents import Documents
from ...ops.layout import Layout
from ...ops.obstacles import why_not_heads
from ...ops.rules.base import Rule, RuleOutput, Saved, in_one_row, in_rows, inputs_in_one_row
from ...ops.state_maps.parts import compose, entering_states, initial_gradients, leaving_gradients
from ...ops.state_maps.state_map import StateMap
from ...ops.static_documents import StaticDocuments
from . import states as flash_qla_states
from .builds import Heads, compile_early, expect
from .hopper import HopperStages
from .plan import Plan, plan_of, plan_of_rows, plan_of_whole, row_offsets, stages, static_plan_of


class FlashQlaRule(Rule):
    """FlashQLA's gated delta rule for bf16 or fp16 heads of 128.

    Long sequences are cut into parts that run side by side, and so are batch rows where rows times
    heads are fewer than the GPU's multiprocessors. If the log-decay of a part falls below
    -10, the state that entered it is taken as zero from there on (e^-10 = 4.5e-5, a hundredth of a
    bf16 rounding).

    Args:
        batch_invariant: cut a sequence by its own length and the number of heads alone, so that
            its bits do not depend on its neighbours or its place. (FlashQLA still picks how many
            value columns a block computes by the size of the batch; a column's sums do not depend
            on that, which is tested.) By default FlashQLA's cost model cuts for the whole batch,
            which is faster where long and short sequences share it.
        aligned: cut no sequence, so that a token's bits depend on its sequence alone, see
            :mod:`....aligned`: a block walks from chunk to chunk with the state in fp32, and can
            go on from the state of any chunk. The backward, which generation does not have, cuts
            as ``batch_invariant`` does.
    """

    name = "flash_qla"
    reads_again = frozenset({"q", "k", "v", "beta"})
    leaves_states = True  # asked for or not, if aligned

    def __init__(self, batch_invariant: bool = False, aligned: bool = False) -> None:
        self.batch_invariant, self.aligned = batch_invariant or aligned, aligned

    def plan(
        self, inputs: RuleInputs, documents: Documents | None, states: bool, maps: bool = False
    ) -> Plan:
        plan = self._plan(inputs, documents, states)
        part = "aligned" if self.aligned and not maps else plan.part(states)
        expect(Heads(inputs.k.shape[2], inputs.v.shape[2], inputs.k.dtype), part)
        return plan

    def _plan(self, inputs: RuleInputs, documents: Documents | None, states: bool) -> Plan:
        (rows, tokens), heads, device = inputs.k.shape[:2], inputs.v.shape[2], inputs.k.device
        if isinstance(documents, StaticDocuments):
            return static_plan_of(documents, heads, self.batch_invariant, states)
        if documents is None and not (states or self.batch_invariant):
            return plan_of_rows(rows, tokens, heads, device)
        offsets = row_offsets(rows, tokens) if documents is None else documents.filled_offsets
        if self.aligned:
            return plan_of_whole(offsets, device)
        return plan_of(offsets, heads, self.batch_invariant, device)

    def prepare(self, layout: Layout, dtype: torch.dtype, states: bool) -> None:
        heads = Heads(layout.heads("key"), layout.heads("value"), dtype)
        # A row of usual length is cut into parts. Kernels for other batches are compiled later.
        compile_early(heads, "states" if states else "aligned" if self.aligned else "cut")

    def why_not_heads(self, heads: int) -> str | None:
        return why_not_heads(self.name, heads)

    def begin(self, inputs: RuleInputs, documents: Documents | None) -> FlashQlaForward:
        return FlashQlaForward(self, inputs, documents)

    def kept_to_run_again(self, saved: Saved) -> Saved:
        """All but g_sum and A: what belongs to parts."""
        return Saved(saved.tensors[2:], saved.plan)

    def run_again(
        self, inputs: RuleInputs, kept: Saved, documents: Documents | None, initial: Tensor | None
    ) -> RuleOutput:
        """One pass computes the output and the states at chunks, which the backward then reads.

        Without a second run another kernel computes these states, and rounds elsewhere.
        """
        rows = inputs.v.shape[:2]
        plan: Plan = kept.plan.plan
        expect(Heads(inputs.k.shape[2], inputs.v.shape[2], inputs.k.dtype), "again")
        flat = inputs if plan.parts is None else inputs_in_one_row(inputs)
        if isinstance(kept.plan, flash_qla_states.WholeSequences):
            o, _, saved = flash_qla_states.forward_whole(flat, initial, plan, keep=True)
            return RuleOutput(in_rows(o, rows), None, saved)
        if isinstance(kept.plan, flash_qla_states.Carried):
            o, saved = flash_qla_states.run_again(flat, initial, kept.tensors, plan)
            return RuleOutput(in_rows(o, rows), None, saved)
        cache, of = kept.plan.cache, plan.context
        entering = None if cache is None else cache(*kept.tensors).h0
        g_sum, A = flash_qla_states.triangular(flat, plan)
        o, at_chunks = flash_qla_states.output_and_states(
            flat, g_sum, A, entering, plan.part_offsets, of.seq_map_c2r, of.cu_seqlens
        )
        saved = Saved((g_sum, A, *kept.tensors), kept.plan, at_chunks)
        return RuleOutput(in_rows(o, rows), None, saved)

    def begin_backward(
        self, d_o: Tensor, inputs: RuleInputs, saved: Saved, documents: Documents | None
    ) -> UncarriedBackward | CarriedBackward:
        if isinstance(saved.plan, flash_qla_states.WholeSequences):
            saved = self._in_parts(inputs, saved, documents)
        if isinstance(saved.plan, flash_qla_states.Carried):
            return CarriedBackward(d_o, inputs, saved)
        return UncarriedBackward(self, d_o, inputs, saved, documents)

    def _in_parts(self, inputs: RuleInputs, saved: Saved, documents: Documents | None) -> Saved:
        """What a forward in parts would have saved, after one of whole sequences."""
        g_sum, A, *initial = saved.tensors
        (rows, tokens), (heads, device) = inputs.k.shape[:2], (inputs.v.shape[2], inputs.v.device)
        offsets = row_offsets(rows, tokens) if documents is None else documents.filled_offsets
        plan = plan_of(offsets, heads, True, device)
        maps = flash_qla_states.part_maps(inputs_in_one_row(inputs), plan, (g_sum, A))
        entering = entering_states(maps.local, maps.through, plan.cut, *initial or (None,))
        kept = flash_qla_states.saved_tensors(maps, entering)
        return Saved(kept, flash_qla_states.Carried(plan))


class Uncarried(NamedTuple):
    """The plan of a forward without states, run by FlashQLA's own driver."""

    plan: Plan
    cache: type | None  # FlashQLA's dataclass of the tensors that its backward reuses


class FlashQlaForward:
    def __init__(self, rule: FlashQlaRule, inputs: RuleInputs, documents: Documents | None) -> None:
        self._rule, self._inputs, self._documents = rule, inputs, documents
        self._maps: flash_qla_states.PartMaps | None = None

    def _part_maps(self) -> flash_qla_states.PartMaps:
        if self._maps is None:
            plan = self._rule.plan(self._inputs, self._documents, states=True, maps=True)
            self._maps = flash_qla_states.part_maps(inputs_in_one_row(self._inputs), plan)
        return self._maps

    def state_map(self) -> StateMap:
        maps = self._part_maps()
        return StateMap(*compose(maps.local, maps.through, maps.plan.cut))

    def run(
        self, initial: Tensor | None = None, *, keep: bool = True, final: bool = False
    ) -> RuleOutput:
        inputs, rows = self._inputs, self._inputs.v.shape[:2]
        if self._rule.aligned and self._maps is None:
            plan = self._rule.plan(inputs, self._documents, states=True)
            o, last, saved = flash_qla_states.forward_whole(
                inputs_in_one_row(inputs), initial, plan, keep
            )
            return RuleOutput(in_rows(o, rows), last if final else None, saved)
        if initial is not None or self._maps is not None:
            o, last, saved = flash_qla_states.forward(
                inputs_in_one_row(inputs), initial, self._part_maps(), keep, final
            )
            return RuleOutput(in_rows(o, rows), last, saved)
        plan = self._rule.plan(inputs, self._documents, states=False)
        flat = inputs if plan.parts is None else inputs_in_one_row(inputs)
        g_sum, A, o, _, last, carried = stages().chunk_gated_delta_rule_fwd(
            q=flat.q, k=flat.k, v=flat.v, g=flat.g, beta=flat.beta, scale=flat.k.shape[-1] ** -0.5,
            cu_seqlens=plan.context.cu_seqlens, output_final_state=final, enable_fwd_cp_cache=keep,
            cp_context=plan.context, is_train=True,
        )  # fmt: skip
        # The tensors that the backward reuses: fields of a small dataclass.
        kept = () if carried is None else tuple(vars(carried).values())
        cache = None if carried is None else type(carried)
        return RuleOutput(in_rows(o, rows), last, Saved((g_sum, A, *kept), Uncarried(plan, cache)))


class CarriedBackward:
    """After a forward that carried states between parts itself."""

    def __init__(self, d_o: Tensor, inputs: RuleInputs, saved: Saved) -> None:
        self._rows, self._saved = inputs.k.shape[:2], saved.tensors
        self._plan, self._at_chunks = saved.plan.plan, saved.made
        self._d_o, self._inputs = in_one_row(d_o), inputs_in_one_row(inputs)
        self._d_local: Tensor | None = None  # [P, H, K, V], of parts

    def _of_parts(self) -> Tensor:
        if self._d_local is None:
            self._d_local = flash_qla_states.d_initial_of_parts(
                self._d_o, self._inputs, self._saved, self._plan
            )
        return self._d_local

    def d_initial(self) -> Tensor:
        parts = self._plan.cut
        through = None if parts.are_sequences else self._saved[3]
        return initial_gradients(self._of_parts(), through, parts)

    def d_o_was_scaled(self, by: Tensor) -> None:
        if self._d_local is not None:
            self._d_local = self._d_local * by

    def run(self, initial: Tensor | None = None, d_final: Tensor | None = None) -> RuleGrads:
        parts, (g_sum, A) = self._plan.cut, self._saved[:2]
        if parts.are_sequences:
            first, last_grad = initial, d_final
        else:
            through, first = self._saved[3:]
            last_grad = leaving_gradients(self._of_parts(), through, parts, d_final)
        self._d_local = None
        states, self._at_chunks = self._at_chunks, None
        grads = _gradients(
            self._d_o, self._inputs, g_sum, A, self._plan, first, last_grad, states=states
        )
        return RuleGrads(*(in_rows(x, self._rows) for x in grads[:5]))


class UncarriedBackward:
    """After a forward by FlashQLA's own driver."""

    def __init__(
        self,
        rule: FlashQlaRule,
        d_o: Tensor,
        inputs: RuleInputs,
        saved: Saved,
        documents: Documents | None,
    ) -> None:
        self._rule, self._d_o, self._inputs = rule, d_o, inputs
        self._saved, self._documents = saved, documents

    def d_initial(self) -> Tensor:
        # The forward carried no states, so it did not keep what the chain of gradients needs.
        g_sum, A = (in_one_row(x) for x in self._saved.tensors[:2])
        plan = self._rule.plan(self._inputs, self._documents, states=True)
        inputs = inputs_in_one_row(self._inputs)
        maps = flash_qla_states.part_maps(inputs, plan, (g_sum, A))
        tensors = flash_qla_states.saved_tensors(maps, entering=None)
        saved = Saved(tensors, flash_qla_states.Carried(plan))
        return CarriedBackward(self._d_o, self._inputs, saved).d_initial()

    def d_o_was_scaled(self, by: Tensor) -> None:
        """Does nothing: no tensor made from d_o is kept."""

    def run(self, initial: Tensor | None = None, d_final: Tensor | None = None) -> RuleGrads:
        (plan, cache), states = self._saved.plan, self._saved.made
        g_sum, A, *kept = self._saved.tensors
        del self._saved  # frees each tensor after its last use, not at the end
        d_o, inputs, rows = self._d_o, self._inputs, self._inputs.k.shape[:2]
        if plan.parts is not None:
            d_o, inputs = in_one_row(d_o), inputs_in_one_row(inputs)
        first, last_grad = stages().cp_preprocess_bwd(
            plan.context, q=inputs.q, k=inputs.k, v=inputs.v, a=A, g=g_sum, beta=inputs.beta,
            do=d_o, dht=d_final, scale=inputs.k.shape[-1] ** -0.5, initial_state=initial,
            state_v_first=False, cp_cache=None if cache is None else cache(*kept),
        )  # fmt: skip
        del kept
        made_here = last_grad is not d_final
        grads = _gradients(d_o, inputs, g_sum, A, plan, first, last_grad, made_here, states)
        return RuleGrads(*(in_rows(x, rows) for x in grads[:5]))


def _gradients(
    d_o: Tensor,
    inputs: RuleInputs,
    g_sum: Tensor,
    A: Tensor,
    plan: Plan,
    first: Tensor | None,
    last_grad: Tensor | None,
    overwrite_last: bool = False,
    states: Tensor | None = None,
) -> RuleGrads:
    """The gradients of the inputs.

    Args:
        first: states that enter the parts.
        last_grad: gradient of the states that leave them.
        overwrite_last: the kernel may overwrite ``last_grad``; nobody else reads it.
        states: at chunks, of a second run of the forward; None: computed here.
    """
    sparing = {"overwrite_dht": overwrite_last} if isinstance(stages(), HopperStages) else {}
    common = {"k": inputs.k, "v": inputs.v, "a": A, "g": g_sum, "b": inputs.beta,
              "cu_seqlens": plan.part_offsets}  # fmt: skip
    if states is None:
        states, *_ = stages().fused_gdr_h(
            initial_state=first, output_final_state=False, output_h=True, **common
        )
    dq, dk, dv, dg, dbeta, _ = stages().fused_gdr_bwd(
        q=inputs.q, do=d_o, dht=last_grad, h=states, scale=inputs.k.shape[-1] ** -0.5,
        **common, **sparing,
    )  # fmt: skip
    dg = stages().chunk_local_cumsum(
        dg, chunk_size=A.shape[-1], reverse=True, cu_seqlens=plan.context.cu_seqlens,
        zero_last_chunk=True,
    )  # fmt: skip
    return RuleGrads(dq, dk, dv, dg, dbeta)
