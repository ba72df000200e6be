"""fla's rule around stand-ins of its kernels in plain torch: what goes where, on a CPU.

Every call is bound to the signature of fla's own function first.
"""

import inspect

import pytest
import torch

from megatron_gdn.gdn import fla as fla_rule
from megatron_gdn.gdn.rule import RuleInputs
from megatron_gdn.ops.rules import fla_functions
from megatron_gdn.ops.rules.base import Saved
from megatron_gdn.ops.static_documents import StaticDocuments
from tests.ops.delta_rule.states import (
    Oracle,
    backward_of,
    by_key_head,
    documents_of,
    run_in_segments,
    run_whole,
)

from .test_flash_qla_wiring import (
    FILLS,
    FINALS,
    HEADS,
    K,
    V,
    check,
    check_final_states,
    check_fixed_buffers,
    check_fp16_operands,
    check_rows_equal_one_row,
    random_inputs,
    run_again,
)

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
        return Oracle(RuleInputs(k if q is None else q, k, v, g - 1, beta), lengths)

    def chunk_local_cumsum(self, g, **_):
        return g + 1

    def recompute_w_u_fwd(self, k, v, beta, A, g, **_):
        return beta[..., None].expand(*beta.shape, k.shape[-1]).contiguous(), v

    def chunk_gated_delta_rule_fwd_intra(self, k, v, g, beta, **_):
        return *self._recompute(k, v, beta, g), beta.new_zeros(*beta.shape, 64)

    def _recompute(self, k, v, beta, g):
        return object.__getattribute__(self, "recompute_w_u_fwd")(k, v, beta, None, g)

    def chunk_gated_delta_rule_fwd_h(
        self, k, w, u, g, initial_state=None, output_final_state=False, cu_seqlens=None, **_
    ):
        last = self._rule(k, u, w[..., 0], g, cu_seqlens).forward(initial_state)[1]
        return (w, initial_state), u, last if output_final_state else None

    def chunk_fwd_o(self, q, k, v, h, g, scale, cu_seqlens=None, **_):
        assert scale == k.shape[-1] ** -0.5
        w, initial = h
        return self._rule(k, v, w[..., 0], g, cu_seqlens, q).forward(initial)[0]

    def chunk_bwd_dv_local(self, q, k, do, **_):
        return torch.zeros_like(do)

    def chunk_gated_delta_rule_bwd_dhu(
        self, q, k, w, do, dv, g, h0, scale, dht=None, cu_seqlens=None, **_
    ):
        oracle = self._rule(k, torch.zeros_like(do), w[..., 0], g, cu_seqlens, q)
        d_initial = oracle.backward(do, d_final=dht)[1]
        assert h0.shape == d_initial.shape
        return None, d_initial.float(), None

    def chunk_gated_delta_rule_fwd(
        self, q, k, v, g, beta, scale, initial_state, output_final_state, cu_seqlens=None, **_
    ):
        o, last = self._rule(k, v, beta, g + 1, cu_seqlens, q).forward(initial_state)
        last = last if output_final_state else None
        return g + 1, o, beta.new_zeros(*beta.shape, 64), last, None, None

    def chunk_gated_delta_rule_bwd(
        self, q, k, v, g, beta, A, scale, initial_state, do, dht, cu_seqlens=None, **_
    ):
        oracle = self._rule(k, v, beta, g, cu_seqlens, q)
        (dq, dk, dv, dg, dbeta), d_initial = oracle.backward(do, initial_state, dht)
        return dq, dk, dv, dbeta, dg, d_initial, None, None


@pytest.fixture
def rule(monkeypatch):
    from fla.ops.cp import chunk_fwd

    stand_in, real = StandIn(), inspect.signature(chunk_fwd.chunk_cp_fwd_h)

    def maps_of_parts(*args, **kwargs):
        given = real.bind(*args, **kwargs).arguments
        assert given["multi_seqs"] and given["chunk_size"] == 64
        oracle = stand_in._rule(given["k"], given["u"], given["w"][..., 0], given["g"],
                              given["cu_seqlens"])  # fmt: skip
        given["hm"].copy_(torch.cat([oracle.forward()[1], oracle.through()], dim=-1))

    monkeypatch.setattr(chunk_fwd, "chunk_cp_fwd_h", maps_of_parts)
    monkeypatch.setattr(fla_rule, "stages", lambda: stand_in)
    return fla_rule.FlaRule()


def test_states_enter_documents_in_fixed_buffers(rule):
    check_fixed_buffers(rule, FILLS)


def test_fixed_buffers_of_more_tokens_than_fla_counts_are_refused():
    inputs = RuleInputs(*[torch.empty(1, 2**20, 32, 128, device="meta")] * 5)
    static = StaticDocuments(2**20, 2)
    with pytest.raises(NotImplementedError, match="at most 524288 tokens per rank"):
        fla_functions.parts_of(inputs, static)


@pytest.mark.parametrize("lengths", [(130, 1, 300), (2500, 2100)], ids=["uncut", "cut"])
def test_documents_with_and_without_states(rule, lengths):
    inputs, d_o = random_inputs(sum(lengths))
    documents = documents_of(lengths)
    apart = Oracle(inputs, lengths)
    check(run_whole(rule, inputs, d_o, documents), [apart.forward()[0], *apart.backward(d_o)[0]])
    joined = Oracle(inputs, (sum(lengths),))
    got = run_in_segments(rule, inputs, d_o, documents)
    check(got, [joined.forward()[0], *joined.backward(d_o)[0]])


@pytest.mark.parametrize("lengths", [(130, 1, 300), (2500, 2100)], ids=["uncut", "cut"])
def test_a_second_run_gives_what_the_backward_needs(rule, lengths):
    inputs, d_o = random_inputs(sum(lengths))
    documents, apart = documents_of(lengths), Oracle(inputs, lengths)
    exact = [apart.forward()[0], *apart.backward(d_o)[0]]
    check(run_again(rule, inputs, d_o, documents), exact)
    check(run_again(rule, inputs, d_o, documents, map_first=True), exact)
    assert rule.kept_to_run_again(rule.begin(inputs, documents).run().saved) == Saved()


def test_fp16_operands_leave_no_trace(rule):
    check_fp16_operands(rule, (130, 1, 300))


def test_batch_rows_with_states(rule):
    inputs, d_o = random_inputs(100, B=2)
    oracle = Oracle(inputs, (100, 100))
    initial, d_final = (torch.randn(2, HEADS[1], K, V, dtype=torch.float64) for _ in range(2))
    grads, d_initial = oracle.backward(d_o, initial, d_final)
    forward = rule.begin(inputs, None)
    local, through = forward.state_map()
    torch.testing.assert_close(local.double(), oracle.forward()[1], rtol=1e-5, atol=1e-6)
    o, _, saved = forward.run(initial)
    backward = backward_of(rule, inputs, d_o, saved)
    got = backward.d_initial() + through.double().mT @ d_final
    torch.testing.assert_close(got, d_initial, rtol=1e-5, atol=1e-6)
    got = backward.run(initial, d_final)
    check([o, *by_key_head(got, HEADS[0])], [oracle.forward(initial)[0], *grads])


@pytest.mark.parametrize("lengths", FINALS.values(), ids=FINALS)
def test_final_states(rule, lengths):
    check_final_states(rule, lengths)


def test_documents_over_batch_rows_equal_one_row(rule):
    check_rows_equal_one_row(rule, (130, 0, 1, 131))
