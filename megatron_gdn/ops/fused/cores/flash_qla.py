"""FlashQLA as a core: its stages called one by one, so that nothing waits for the device.

FlashQLA's own entry reads sequence lengths back from the GPU, once per new ``cu_seqlens``, and
sums dq and dk over the value heads of a key head in a pass of its own. Here the plan of a packed
batch is made from host offsets, and the heads are summed inside our backward kernel.
"""

from __future__ import annotations

import dataclasses
from functools import cache, lru_cache
from types import ModuleType

import torch
from torch import Tensor

from ...documents import Documents
from .base import RuleGrads, RuleInputs

_STAGES = (
    "chunk_gated_delta_rule_fwd", "build_cp_context", "cp_preprocess_bwd", "fused_gdr_h",
    "fused_gdr_bwd", "chunk_local_cumsum", "CHUNK_SIZE",
)  # fmt: skip


@cache
def _stages() -> ModuleType:
    from flash_qla.ops.gated_delta_rule import chunk

    missing = [name for name in _STAGES if not hasattr(chunk, name)]
    if missing:
        raise ImportError(
            f"this flash_qla has no {', '.join(missing)}; the fused mixer knows flash-qla 0.1.3. "
            f"Install that, or choose backend='fla'."
        )
    return chunk


@lru_cache(maxsize=64)
def _plan(offsets: tuple[int, ...], value_heads: int, device: torch.device):
    """FlashQLA's split of long sequences over the chip, from host offsets alone.

    Keyed by value: equal batches share one, on every layer and in the backward. The split depends
    on lengths and heads only, never on data, so it repeats.
    """
    from flash_qla.utils.index import prepare_varlen_metadata

    stages = _stages()
    on_host = stages.build_cp_context(
        torch.tensor(offsets, dtype=torch.int32), enable_intra=True, num_v_heads=value_heads,
        chunk_size=stages.CHUNK_SIZE, is_train=True,
    )  # fmt: skip
    moved = {}
    for field in dataclasses.fields(on_host):
        value = getattr(on_host, field.name)
        if isinstance(value, Tensor):
            moved[field.name] = value.to(device, non_blocking=True)
            if field.name in ("cu_seqlens", "intra_cp_cu_seqlens"):
                prepare_varlen_metadata(moved[field.name], value)
    return dataclasses.replace(on_host, **moved)


@lru_cache(maxsize=64)
def _unsplit_plan(rows: int, device: torch.device):
    """A batch of rows: FlashQLA runs them side by side and splits none."""
    return _stages().build_cp_context(None)


class FlashQlaCore:
    name = "flash_qla"

    @staticmethod
    def _plan(inputs: RuleInputs, documents: Documents | None):
        rows, tokens = inputs.k.shape[:2]
        device = inputs.k.device
        if documents is not None:
            offsets = tuple(documents.cu_seqlens_cpu.tolist())
        elif rows == 1:
            offsets = (0, tokens)
        else:
            return _unsplit_plan(rows, device)
        return _plan(offsets, inputs.v.shape[2], device)

    def forward(
        self, inputs: RuleInputs, documents: Documents | None, keep: bool
    ) -> tuple[Tensor, tuple[Tensor | None, ...], object]:
        plan = self._plan(inputs, documents)
        g_sum, A, o, _, _, carried = _stages().chunk_gated_delta_rule_fwd(
            **inputs._asdict(), scale=inputs.k.shape[-1] ** -0.5, cu_seqlens=plan.cu_seqlens,
            output_final_state=False, enable_fwd_cp_cache=keep, cp_context=plan, is_train=True,
        )  # fmt: skip
        # What the split carries over to the backward: plain tensors of a small dataclass.
        kept = () if carried is None else tuple(vars(carried).values())
        return o, (g_sum, A, *kept), (plan, None if carried is None else type(carried))

    def backward(
        self,
        d_o: Tensor,
        inputs: RuleInputs,
        saved: tuple[Tensor | None, ...],
        plan: object,
        documents: Documents | None,
    ) -> RuleGrads:
        stages = _stages()
        g_sum, A, *kept = saved
        plan, carried_type = plan
        carried = None if carried_type is None else carried_type(*kept)
        scale = inputs.k.shape[-1] ** -0.5
        common = {"k": inputs.k, "v": inputs.v, "a": A, "g": g_sum}
        first, last_grad = stages.cp_preprocess_bwd(
            plan, q=inputs.q, beta=inputs.beta, do=d_o, dht=None, scale=scale, initial_state=None,
            state_v_first=False, cp_cache=carried, **common,
        )  # fmt: skip
        split = plan.intra_cp_cu_seqlens if plan.is_intra else plan.cu_seqlens
        states, *_ = stages.fused_gdr_h(
            b=inputs.beta, initial_state=first, output_final_state=False, output_h=True,
            cu_seqlens=split, **common,
        )  # fmt: skip
        dq, dk, dv, dg, dbeta, _ = stages.fused_gdr_bwd(
            q=inputs.q, b=inputs.beta, do=d_o, dht=last_grad, h=states, scale=scale,
            cu_seqlens=split, **common,
        )  # fmt: skip
        dg = stages.chunk_local_cumsum(
            dg, chunk_size=A.shape[-1], reverse=True, cu_seqlens=plan.cu_seqlens,
            zero_last_chunk=True,
        )  # fmt: skip
        return RuleGrads(dq, dk, dv, dg, dbeta)
