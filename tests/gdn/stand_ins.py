"""Stand-ins of FlashQLA's kernels in plain torch, and the rule around them."""

from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple

import torch

from megatron_gdn.gdn.flash_qla import plan as flash_qla_plan
from megatron_gdn.gdn.flash_qla import rule as flash_qla
from megatron_gdn.gdn.flash_qla import states as flash_qla_states
from megatron_gdn.gdn.rule import RuleInputs
from megatron_gdn.ops import documents
from megatron_gdn.ops.rules.base import Bits
from megatron_gdn.ops.state_maps import parts
from megatron_gdn.ops.state_maps.parts import CHUNK, entering_states, leaving_gradients
from tests.ops.delta_rule.states import Oracle, parts_at


@dataclass
class StandInCache:
    h0: torch.Tensor
    mark: int


@dataclass
class StandInContext:
    cu_seqlens: torch.Tensor | None = None
    is_intra: bool = False
    intra_cp_cu_seqlens: torch.Tensor | None = None
    seq_map_r2c: torch.Tensor | None = None
    seq_map_c2r: torch.Tensor | None = None
    ht_mask: torch.Tensor | None = None
    ht_mask_bwd: torch.Tensor | None = None


class Entered(NamedTuple):
    """In place of the states at chunks: those that enter, which the backward goes on from."""

    state: torch.Tensor | None


def oracle_of(k, v, beta, g, cu_seqlens, q=None) -> Oracle:
    """Stand-ins hand on a sum of g that is one too large, to see it passed on."""
    lengths = (k.shape[1],) * k.shape[0] if cu_seqlens is None else cu_seqlens.diff().tolist()
    return Oracle(RuleInputs(k if q is None else q, k, v, g - 1, beta), lengths)


class FlashQlaStandIn:
    """The stages by the plain rule over their sequences; ``cut``: what the cost model answers."""

    CHUNK_SIZE, mark = CHUNK, 7
    FlashQLACPContext = StandInContext

    def __init__(self, cut=None) -> None:
        self.cut, self.passes = cut, Counter()

    def build_cp_context(self, cu_seqlens=None, **_):
        if cu_seqlens is None or self.cut is None:
            return StandInContext(cu_seqlens)
        return StandInContext(cu_seqlens, True, torch.tensor(self.cut, dtype=torch.int32))

    def chunk_local_cumsum(self, g, chunk_size, cu_seqlens=None, reverse=False, zero_last_chunk=0):
        if reverse:
            return g  # the stand-in of the backward has per-token gradients already
        return g + 1  # to the other stand-ins, which take it away again

    def kkt_solve(self, k, b, cu_seqlens, chunk_size):
        return k.new_zeros(*b.shape, chunk_size)

    def get_warmup_chunks_bidi(self, g, cu_seqlens, ht_mask_fwd, ht_mask_bwd, **_):
        assert not ht_mask_fwd.any() and not ht_mask_bwd.any()
        chunks = ((cu_seqlens.diff() + CHUNK - 1) // CHUNK)[:, None].repeat(1, g.shape[-1])
        short = torch.where(cu_seqlens.diff()[:, None] % CHUNK > 0, 1, chunks)
        return short, chunks, None, None

    def fused_gdr_h(self, k, v, a, g, b, initial_state=None, num_warmup_chunks=None,
                    cu_seqlens=None, **_):  # fmt: skip
        oracle = oracle_of(k, v, b, g, cu_seqlens)
        if num_warmup_chunks is None:
            self.passes["states alone"] += 1
            return Entered(initial_state), None, None
        assert torch.equal(
            num_warmup_chunks[:, :1], (cu_seqlens.diff()[:, None] + CHUNK - 1) // CHUNK
        )
        return None, oracle.forward()[1].float(), oracle.through().float()

    def fused_gdr_fwd(
        self, q, k, v, a, g, b, cp_seq_map, raw_cu_seqlens, initial_state=None,
        output_final_state=False, cu_seqlens=None, output_h=False, **_,
    ):  # fmt: skip
        o, leaving = oracle_of(k, v, b, g, cu_seqlens, q).forward(initial_state)
        if output_h:  # as fused_gdr_h gives them to the stand-in of the backward
            self.passes["states by the forward"] += 1
            return o, Entered(initial_state), None
        if not output_final_state:
            return o, None, None
        # The last part of a sequence writes the state that leaves the sequence.
        last = leaving.new_full((len(raw_cu_seqlens) - 1, *leaving.shape[1:]), float("nan"))
        for part, owner in enumerate(cp_seq_map.tolist()):
            if cu_seqlens[part + 1] == raw_cu_seqlens[owner + 1]:
                last[owner] = leaving[part]
        return o, None, last.float()

    def fused_gdr_dh(self, q, k, a, g, b, do, dht, cu_seqlens, num_warmup_chunks, **_):
        oracle = oracle_of(k, torch.zeros_like(do), b, g, cu_seqlens, q)
        return None, oracle.backward(do, d_final=dht)[1].float()

    def fused_gdr_bwd(self, q, k, v, a, g, b, do, dht, h, cu_seqlens=None, **_):
        grads, d_initial = oracle_of(k, v, b, g, cu_seqlens, q).backward(do, h.state, dht)
        return *grads, d_initial

    def chunk_gated_delta_rule_fwd(
        self, q, k, v, g, beta, cp_context, cu_seqlens, output_final_state, enable_fwd_cp_cache, **_
    ):
        assert cu_seqlens is cp_context.cu_seqlens
        o, last = oracle_of(k, v, beta, g + 1, cu_seqlens, q).forward()
        last, cache = last if output_final_state else None, None
        if cp_context.is_intra and enable_fwd_cp_cache:
            parts = self._parts(cp_context, k.device)
            of_parts = oracle_of(k, v, beta, g + 1, parts.offsets)
            entering = entering_states(of_parts.forward()[1], of_parts.through(), parts, None)
            cache = StandInCache(entering, self.mark)
        return g + 1, beta.new_zeros(*beta.shape, CHUNK), o, None, last, cache

    def _parts(self, context, device):
        return parts_at(context.cu_seqlens.tolist(), context.intra_cp_cu_seqlens.tolist(), device)

    def cp_preprocess_bwd(
        self, context, q, k, v, a, g, beta, do, dht, initial_state, cp_cache=None, **_
    ):
        if not context.is_intra:
            return initial_state, dht
        parts = self._parts(context, k.device)
        assert cp_cache is None or cp_cache.mark == self.mark
        oracle = oracle_of(k, v, beta, g, parts.offsets, q)
        local, through, d_local = oracle.forward()[1], oracle.through(), oracle.backward(do)[1]
        return (
            entering_states(local, through, parts, initial_state),
            leaving_gradients(d_local, through, parts, dht),
        )


def flash_qla_rule(monkeypatch, bits=Bits.FREE, cut=None):
    stand_in = FlashQlaStandIn(cut)
    for module in (flash_qla, flash_qla_plan, flash_qla_states):
        monkeypatch.setattr(module, "stages", lambda: stand_in)

    def by_length(documents, heads):
        if not documents.known:
            return parts.cut_by_length(documents, heads)
        return parts.cut_at(documents, documents.filled_offsets if cut is None else cut)

    monkeypatch.setattr(flash_qla_plan, "cut_by_length", by_length)
    monkeypatch.setattr(flash_qla_plan, "multiprocessors", lambda: 132)
    forget_plans()
    return flash_qla.FlashQlaRule(bits)


def forget_plans() -> None:
    flash_qla_plan.plan_of_rows.cache_clear()
    documents._same_for_all.cache_clear()
