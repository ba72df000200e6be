"""Stand-ins of FlashQLA's kernels in plain torch, and the rule around them."""

from collections import Counter
from itertools import pairwise
from types import SimpleNamespace
from typing import NamedTuple

import torch

from megatron_gdn.gdn.flash_qla import builds
from megatron_gdn.gdn.flash_qla import plan as flash_qla_plan
from megatron_gdn.gdn.flash_qla import rule as flash_qla
from megatron_gdn.gdn.flash_qla import states as flash_qla_states
from megatron_gdn.gdn.rule import RuleInputs
from megatron_gdn.ops import documents
from megatron_gdn.ops.rules.base import Bits
from megatron_gdn.ops.state_maps import segments
from megatron_gdn.ops.state_maps.segments import CHUNK
from tests.ops.delta_rule.states import Oracle, require_dense


def keep_cache_in(folder, monkeypatch, enabled=True) -> None:
    """As if tilelang kept its kernels in ``folder``."""
    env = SimpleNamespace(
        TILELANG_CACHE_DIR=str(folder), is_cache_enabled=lambda: enabled
    )
    monkeypatch.setattr(builds, "tilelang_env", lambda: env)


class StandInContext(NamedTuple):
    is_intra: bool = False
    intra_cp_cu_seqlens: torch.Tensor | None = None


class Entered(NamedTuple):
    """In place of the states at chunks: those that enter, which the backward goes on
    from."""

    state: torch.Tensor | None


def oracle_of(k, v, beta, g, cu_seqlens, q=None) -> Oracle:
    """Stand-ins hand on a sum of g that is one too large, to see it passed on."""
    lengths = (
        (k.shape[1],) * k.shape[0] if cu_seqlens is None else cu_seqlens.diff().tolist()
    )
    return Oracle(RuleInputs(k if q is None else q, k, v, g - 1, beta), lengths)


def chunks_of(cu_seqlens, heads):
    return ((cu_seqlens.diff() + CHUNK - 1) // CHUNK)[:, None].repeat(1, heads)


def computed(x, chunks):
    """NaN where a segment was masked, whose map nobody may read."""
    return x.masked_fill((chunks < 0)[..., None, None], float("nan"))


class FlashQlaStandIn:
    """The kernels by the plain rule over their sequences; ``cut``: what the cost model
    answers.

    They take the arguments that the functions of flash-qla 0.1.3 have, no others, and
    give nothing that was not asked for.
    """

    def __init__(self, cut=None) -> None:
        self.cut, self.passes = cut, Counter()
        self.asked_for = set()  # the numbers of value heads of the cost model

    def build_cp_context(
        self, cu_seqlens, *, enable_intra, num_v_heads, chunk_size, is_train
    ):
        assert enable_intra and is_train and chunk_size == CHUNK
        self.asked_for.add(num_v_heads)
        if self.cut is None:
            return StandInContext()
        return StandInContext(True, torch.tensor(self.cut, dtype=torch.int32))

    def chunk_local_cumsum(
        self, g, cu_seqlens=None, reverse=False, zero_last_chunk=False
    ):
        if reverse:
            return g  # the stand-in of the backward has per-token gradients already
        return g + 1  # to the other stand-ins, which take it away again

    def kkt_solve(self, k, b, cu_seqlens):
        return k.new_zeros(*b.shape, CHUNK)

    def get_warmup_chunks_bidi(
        self, g, cu_seqlens, ht_mask_fwd, ht_mask_bwd, threshold
    ):
        assert threshold in (-10, -20)
        from_zero = threshold == -10
        assert ht_mask_fwd.any() == ht_mask_bwd.any() == from_zero
        self.passes["maps from zero" if from_zero else "maps"] += 1
        every = chunks_of(cu_seqlens, g.shape[-1])
        ragged = cu_seqlens.diff()[:, None] % CHUNK > 0
        short = every if from_zero else torch.where(ragged, 1, every)
        last, first = (
            mask[:, None].expand_as(every) for mask in (ht_mask_fwd, ht_mask_bwd)
        )
        back = every.masked_fill(first, -1)
        return torch.where(last, back, short), back, ~last, ~first

    def fused_gdr_h(
        self,
        k,
        v,
        a,
        g,
        b,
        initial_state=None,
        output_final_state=True,
        output_h=True,
        cu_seqlens=None,
        num_warmup_chunks=None,
    ):
        require_dense(initial_state)
        assert output_h == (num_warmup_chunks is None)
        assert output_final_state != output_h
        oracle = oracle_of(k, v, b, g, cu_seqlens)
        if num_warmup_chunks is None:
            self.passes["states alone"] += 1
            return Entered(initial_state), None, None
        asked = num_warmup_chunks >= 0
        every = chunks_of(cu_seqlens, g.shape[-1])
        assert torch.equal(num_warmup_chunks[asked], every[asked])
        maps = oracle.forward()[1], oracle.through()
        # FlashQLA rounds the maps to the dtype of k.
        return None, *(computed(x.to(k.dtype), num_warmup_chunks) for x in maps)

    def correct_initial_states(self, raw_h0, local, through, passes, first):
        assert raw_h0 is None
        self.passes["composed states"] += 1
        local, through = local.float(), through.float()
        out = torch.zeros_like(local)
        for start, end in pairwise(first.tolist()):
            for segment in range(start, end - 1):
                out[segment + 1] = local[segment] + through[segment] @ out[segment]
        return out

    def correct_terminal_states(self, raw_dht, local, through, passes, first):
        require_dense(raw_dht)
        self.passes["composed gradients"] += 1
        local, through = local.float(), through.float()
        out = torch.zeros_like(local)
        for n, (start, end) in enumerate(pairwise(first.tolist())):
            if raw_dht is not None:
                out[end - 1] = raw_dht[n]
            for segment in range(end - 1, start, -1):
                assert passes[segment].all()
                out[segment - 1] = local[segment] + through[segment].mT @ out[segment]
        return out

    def fused_gdr_fwd(
        self,
        q,
        k,
        v,
        a,
        g,
        b,
        scale,
        initial_state=None,
        output_final_state=True,
        output_h=False,
        cu_seqlens=None,
        cp_seq_map=None,
        raw_cu_seqlens=None,
    ):
        require_dense(initial_state)
        assert scale == k.shape[-1] ** -0.5
        o, leaving = oracle_of(k, v, b, g, cu_seqlens, q).forward(initial_state)
        h = None
        if output_h:  # as fused_gdr_h gives them to the stand-in of the backward
            self.passes["states by the forward"] += 1
            h = Entered(initial_state)
        if not output_final_state:
            return o, h, None
        if cp_seq_map is None:  # batch rows
            return o, h, leaving.float()
        # The last part of a sequence writes the state that leaves the sequence.
        last = leaving.new_full(
            (len(raw_cu_seqlens) - 1, *leaving.shape[1:]), float("nan")
        )
        for segment, owner in enumerate(cp_seq_map.tolist()):
            if (
                cu_seqlens[segment]
                < cu_seqlens[segment + 1]
                == raw_cu_seqlens[owner + 1]
            ):
                last[owner] = leaving[segment]
        return o, h, last.float()

    def fused_gdr_dh(
        self, q, k, a, g, b, do, output_dh, scale, cu_seqlens, num_warmup_chunks
    ):
        assert not output_dh and scale == k.shape[-1] ** -0.5
        oracle = oracle_of(k, torch.zeros_like(do), b, g, cu_seqlens, q)
        return None, computed(oracle.backward(do)[1].float(), num_warmup_chunks)

    def fused_gdr_bwd(self, q, k, v, a, g, b, do, dht, h, scale, cu_seqlens=None):
        require_dense(dht, h.state)
        assert scale == k.shape[-1] ** -0.5
        grads, d_initial = oracle_of(k, v, b, g, cu_seqlens, q).backward(
            do, h.state, dht
        )
        return *grads, d_initial


def flash_qla_rule(monkeypatch, bits=Bits.FREE, cut=None):
    stand_in = FlashQlaStandIn(cut)
    for module in (flash_qla, flash_qla_plan, flash_qla_states):
        monkeypatch.setattr(module, "kernels", lambda: stand_in)

    def by_length(documents, heads):
        if not documents.known_on_host:
            return segments.cut_by_length(documents, heads)
        return segments.cut_at(
            documents, documents.filled_offsets if cut is None else cut
        )

    monkeypatch.setattr(flash_qla_plan, "cut_by_length", by_length)
    monkeypatch.setattr(flash_qla_plan, "multiprocessors", lambda: 132)
    forget_plans()
    return flash_qla.FlashQlaRule(bits)


def forget_plans() -> None:
    flash_qla_plan.plan_of_rows.cache_clear()
    documents._shared_documents.cache_clear()
