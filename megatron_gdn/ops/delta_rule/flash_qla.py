"""FlashQLA as a core: its stages called one by one, so that nothing waits for the device.

FlashQLA's own entry reads sequence lengths back from the GPU, once per new ``cu_seqlens``, and
sums dq and dk over the value heads of a key head in a pass of its own. Here the plan of a packed
batch is made from host offsets, and the heads are summed inside our backward kernel.
"""

from __future__ import annotations

from torch import Tensor

from ..documents import Documents
from . import flash_qla_states
from .base import RuleGrads, RuleInputs, Transition
from .flash_qla_plan import Plan, plan_of, stages


def _as_one_row(inputs: RuleInputs) -> RuleInputs:
    """Batch rows end to end, ``[1, B S, ...]``: kernels that know sequences by their offsets."""
    if inputs.k.shape[0] == 1:
        return inputs
    return RuleInputs(*(None if x is None else _row(x) for x in inputs))


def _row(x: Tensor) -> Tensor:
    return x if x.shape[0] == 1 else x.reshape(1, x.shape[0] * x.shape[1], *x.shape[2:])


class FlashQlaCore:
    """FlashQLA's gated delta rule for bf16 or fp16 heads of 128.

    Long sequences are cut into parts that run side by side. A part whose log-decay falls below
    -10 is taken to forget what entered it (e^-10 = 4.5e-5, a hundredth of a bf16 rounding).

    Args:
        batch_invariant: cut a sequence by its own length and the number of heads alone, so that
            its bits do not depend on its neighbours or its place. (FlashQLA still picks how many
            value columns a block computes by the size of the batch; a column's sums do not depend
            on that, which is tested.) By default FlashQLA's cost model cuts for the whole batch,
            which is faster where long and short sequences share it.
    """

    name = "flash_qla"
    operand_dtype = None

    def __init__(self, batch_invariant: bool = False) -> None:
        self.batch_invariant = batch_invariant

    def _plan(self, inputs: RuleInputs, documents: Documents | None, states: bool) -> Plan:
        rows, tokens = inputs.k.shape[:2]
        if documents is not None:
            offsets = documents.filled_offsets
        elif rows == 1 or states or self.batch_invariant:
            offsets = tuple(row * tokens for row in range(rows + 1))
        else:
            offsets = None
        return plan_of(offsets, inputs.v.shape[2], self.batch_invariant, inputs.k.device)

    def transition(self, inputs: RuleInputs, documents: Documents | None) -> Transition:
        return flash_qla_states.transition(
            _as_one_row(inputs), self._plan(inputs, documents, states=True)
        )

    def forward(
        self,
        inputs: RuleInputs,
        documents: Documents | None,
        keep: bool,
        initial: Tensor | None = None,
        work: object = None,
    ) -> tuple[Tensor, tuple[Tensor | None, ...], object]:
        if initial is not None or work is not None:
            flat = _as_one_row(inputs)
            if work is None:
                plan = self._plan(inputs, documents, states=True)
                work = flash_qla_states.part_maps(flat, plan)
            o, saved, plan = flash_qla_states.forward(flat, initial, work, keep)
            return o.view_as(inputs.v), saved, plan
        plan = self._plan(inputs, documents, states=False)
        flat = inputs if plan.parts is None else _as_one_row(inputs)
        g_sum, A, o, _, _, carried = stages().chunk_gated_delta_rule_fwd(
            **flat._asdict(), scale=inputs.k.shape[-1] ** -0.5, cu_seqlens=plan.context.cu_seqlens,
            output_final_state=False, enable_fwd_cp_cache=keep, cp_context=plan.context,
            is_train=True,
        )  # fmt: skip
        # What the cut carries over to the backward: plain tensors of a small dataclass.
        kept = () if carried is None else tuple(vars(carried).values())
        carried_type = None if carried is None else type(carried)
        return o.view_as(inputs.v), (g_sum, A, *kept), (plan, carried_type)

    def d_initial(
        self,
        d_o: Tensor,
        inputs: RuleInputs,
        saved: tuple[Tensor | None, ...],
        plan: object,
        documents: Documents | None,
    ) -> tuple[Tensor, object]:
        flat = _as_one_row(inputs)
        if not isinstance(plan, flash_qla_states.StatePlan):
            # The forward carried no states, so it did not keep what the chain of gradients needs.
            g_sum, A = (_row(x) for x in saved[:2])
            plan = self._plan(inputs, documents, states=True)
            maps = flash_qla_states.part_maps(flat, plan, g_sum, A)
            saved = flash_qla_states.saved_tensors(maps, entering=None)
            plan = flash_qla_states.StatePlan(plan)
        return flash_qla_states.d_initial(_row(d_o), flat, saved, plan)

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
        shape = inputs.k.shape[:2]
        if isinstance(plan, flash_qla_states.StatePlan):
            flat, d_o = _as_one_row(inputs), _row(d_o)
            first, last_grad = flash_qla_states.boundary_states(
                d_o, flat, saved, plan, initial, d_final, work
            )
            plan, (g_sum, A) = plan.plan, saved[:2]
        else:
            plan, carried_type = plan
            g_sum, A, *kept = saved
            flat = inputs
            if plan.parts is not None:
                flat, d_o = _as_one_row(inputs), _row(d_o)
            first, last_grad = stages().cp_preprocess_bwd(
                plan.context, q=flat.q, k=flat.k, v=flat.v, a=A, g=g_sum, beta=flat.beta, do=d_o,
                dht=d_final, scale=inputs.k.shape[-1] ** -0.5, initial_state=initial,
                state_v_first=False,
                cp_cache=None if carried_type is None else carried_type(*kept),
            )  # fmt: skip
        grads = _gradients(d_o, flat, g_sum, A, plan, first, last_grad)
        if flat is inputs:
            return grads
        return RuleGrads(*(x.view(*shape, *x.shape[2:]) for x in grads[:5]))


def _gradients(
    d_o: Tensor,
    inputs: RuleInputs,
    g_sum: Tensor,
    A: Tensor,
    plan: Plan,
    first: Tensor | None,
    last_grad: Tensor | None,
) -> RuleGrads:
    """From what enters every part, and the gradient of what leaves it."""
    common = {"k": inputs.k, "v": inputs.v, "a": A, "g": g_sum, "b": inputs.beta,
              "cu_seqlens": plan.part_offsets}  # fmt: skip
    states, *_ = stages().fused_gdr_h(
        initial_state=first, output_final_state=False, output_h=True, **common
    )
    dq, dk, dv, dg, dbeta, _ = stages().fused_gdr_bwd(
        q=inputs.q, do=d_o, dht=last_grad, h=states, scale=inputs.k.shape[-1] ** -0.5, **common
    )
    dg = stages().chunk_local_cumsum(
        dg, chunk_size=A.shape[-1], reverse=True, cu_seqlens=plan.context.cu_seqlens,
        zero_last_chunk=True,
    )  # fmt: skip
    return RuleGrads(dq, dk, dv, dg, dbeta)
