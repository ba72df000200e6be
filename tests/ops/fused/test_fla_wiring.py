"""fla's core around stand-ins of its kernels in plain torch: what goes where, on a CPU.

Every call is bound to the signature of fla's own function first.
"""

from __future__ import annotations

import inspect

import pytest
import torch

from megatron_gdn.ops.delta_rule import fla as fla_core
from megatron_gdn.ops.delta_rule.resolve import RuleInputs

from .states import PlainRule, by_key_head, documents_of, run_in_segments, run_whole
from .test_flash_qla_wiring import HEADS, K, V, check, check_fp16_operands, random_inputs

fla_chunk = pytest.importorskip("fla.ops.gated_delta_rule.chunk")


class StandIn:
    """Each stage by the plain rule; ``w`` carries beta, and ``g`` is one too large."""

    RCP_LN2 = fla_chunk.RCP_LN2

    def __getattribute__(self, name):
        found = object.__getattribute__(self, name)
        if name.startswith("_") or name == "RCP_LN2":
            return found

        def bound(*args, **kwargs):
            return found(
                **inspect.signature(getattr(fla_chunk, name)).bind(*args, **kwargs).arguments
            )

        return bound

    @staticmethod
    def _rule(k, v, beta, g, cu_seqlens, q=None):
        lengths = (k.shape[1],) * k.shape[0] if cu_seqlens is None else cu_seqlens.diff().tolist()
        return PlainRule(RuleInputs(k if q is None else q, k, v, g - 1, beta), lengths)

    def chunk_local_cumsum(self, g, **_):
        return g + 1

    def recompute_w_u_fwd(self, k, v, beta, A, g, **_):
        return beta[..., None].expand(*beta.shape, k.shape[-1]).contiguous(), v

    def chunk_gated_delta_rule_fwd_intra(self, k, v, g, beta, **_):
        return *self._recompute(k, v, beta, g), beta.new_zeros(*beta.shape, 64)

    def _recompute(self, k, v, beta, g):
        return object.__getattribute__(self, "recompute_w_u_fwd")(k, v, beta, None, g)

    def chunk_gated_delta_rule_fwd_h(self, k, w, u, g, initial_state=None, **_):
        return (w, initial_state), u, None

    def chunk_fwd_o(self, q, k, v, h, g, scale, cu_seqlens=None, **_):
        assert scale == k.shape[-1] ** -0.5
        w, initial = h
        return self._rule(k, v, w[..., 0], g, cu_seqlens, q).forward(initial)[0]

    def chunk_bwd_dv_local(self, q, k, do, **_):
        return torch.zeros_like(do)

    def chunk_gated_delta_rule_bwd_dhu(
        self, q, k, w, do, dv, g, h0, scale, dht=None, cu_seqlens=None, **_
    ):
        rule = self._rule(k, torch.zeros_like(do), w[..., 0], g, cu_seqlens, q)
        d_initial = rule.backward(do, d_final=dht)[1]
        assert h0.shape == d_initial.shape
        return None, d_initial.float(), None

    def chunk_gated_delta_rule_fwd(
        self, q, k, v, g, beta, scale, initial_state, cu_seqlens=None, **_
    ):
        o = self._rule(k, v, beta, g + 1, cu_seqlens, q).forward(initial_state)[0]
        return g + 1, o, beta.new_zeros(*beta.shape, 64), None, None, None

    def chunk_gated_delta_rule_bwd(
        self, q, k, v, g, beta, A, scale, initial_state, do, dht, cu_seqlens=None, **_
    ):
        rule = self._rule(k, v, beta, g, cu_seqlens, q)
        (dq, dk, dv, dg, dbeta), d_initial = rule.backward(do, initial_state, dht)
        return dq, dk, dv, dbeta, dg, d_initial, None, None


@pytest.fixture
def core(monkeypatch):
    from fla.ops.cp import chunk_fwd

    stand_in, real = StandIn(), inspect.signature(chunk_fwd.chunk_cp_fwd_h)

    def maps_of_parts(*args, **kwargs):
        given = real.bind(*args, **kwargs).arguments
        assert given["multi_seqs"] and given["chunk_size"] == 64
        rule = stand_in._rule(given["k"], given["u"], given["w"][..., 0], given["g"],
                              given["cu_seqlens"])  # fmt: skip
        given["hm"].copy_(torch.cat([rule.forward()[1], rule.through()], dim=-1))

    monkeypatch.setattr(chunk_fwd, "chunk_cp_fwd_h", maps_of_parts)
    monkeypatch.setattr(fla_core, "_stages", lambda: stand_in)
    return fla_core.FlaCore()


@pytest.mark.parametrize("lengths", [(130, 1, 300), (2500, 2100)], ids=["uncut", "cut"])
def test_documents_with_and_without_states(core, lengths):
    inputs, d_o = random_inputs(sum(lengths))
    documents = documents_of(lengths)
    apart = PlainRule(inputs, lengths)
    check(run_whole(core, inputs, d_o, documents), [apart.forward()[0], *apart.backward(d_o)[0]])
    joined = PlainRule(inputs, (sum(lengths),))
    got = run_in_segments(core, inputs, d_o, documents)
    check(got, [joined.forward()[0], *joined.backward(d_o)[0]])


def test_fp16_operands_leave_no_trace(core):
    check_fp16_operands(core, (130, 1, 300))


def test_batch_rows_with_states(core):
    inputs, d_o = random_inputs(100, B=2)
    rule = PlainRule(inputs, (100, 100))
    initial, d_final = (torch.randn(2, HEADS[1], K, V, dtype=torch.float64) for _ in range(2))
    silent = inputs._replace(g=None)
    grads, d_initial = rule.backward(d_o, initial, d_final)
    local, through, work = core.transition(inputs, None)
    torch.testing.assert_close(local.double(), rule.forward()[1], rtol=1e-5, atol=1e-6)
    o, saved, plan = core.forward(inputs, None, True, initial, work)
    d_local, work = core.d_initial(d_o, silent, saved, plan, None)
    got = d_local + through.double().mT @ d_final
    torch.testing.assert_close(got, d_initial, rtol=1e-5, atol=1e-6)
    got = core.backward(d_o, silent, saved, plan, None, initial, d_final, work)
    check([o, *by_key_head(got, HEADS[0])], [rule.forward(initial)[0], *grads])
