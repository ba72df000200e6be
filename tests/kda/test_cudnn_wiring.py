"""What the cuDNN rule makes of its kernels' results; for these, which run on Hopper alone, stand
functions with their layouts, made of the plain rule in fp64."""

from types import SimpleNamespace

import pytest
import torch

from megatron_gdn.kda import cudnn
from megatron_gdn.kda.rule import PlainKDA
from megatron_gdn.ops.delta_rule.base import RuleInputs
from megatron_gdn.ops.documents import Documents
from megatron_gdn.ops.elementwise import l2norm
from megatron_gdn.ops.static_documents import StaticDocuments
from tests.ops.delta_rule.states import documents_of, run_everything

H, K = 2, cudnn.HEAD_DIM


def kda_fwd(
    q, k, v, g, beta, offsets, scale, initial_state=None, output_final_state=False, plan_name=None
):
    assert scale == K**-0.5 and plan_name == "kda_hopper_cuda"
    assert initial_state is not None and output_final_state, "cuDNN keeps a buffer for each"
    documents = Documents.from_cu_seqlens(offsets.tolist(), len(q), device="cpu")
    begun = PlainKDA().begin(RuleInputs(*(x[None] for x in (q, k, v, g, beta))), documents)
    made = begun.run(initial_state.mT, final=True)
    return made.o[0], made.final.mT.contiguous(), q.new_empty(0)


def kda_bwd(
    d_o, q, k, v, g, beta, offsets, scale, initial_state=None, d_final_state=None, plan_name=None
):
    documents = Documents.from_cu_seqlens(offsets.tolist(), len(q), device="cpu")
    inputs = RuleInputs(*(x[None] for x in (q, k, v, g, beta)))
    initial, d_final = initial_state.mT, d_final_state.mT
    rule = PlainKDA()
    saved = rule.begin(inputs, documents).run(initial).saved
    begun = rule.begin_backward(d_o[None].clone(), inputs, saved, documents)
    maps = rule.begin(inputs, documents).state_map()
    d_initial = maps.transposed(begun.d_initial()).apply(d_final)
    grads = rule.begin_backward(d_o[None].clone(), inputs, saved, documents).run(initial, d_final)
    empty = q.new_empty(0)
    return (*(x[0] for x in grads[:5]), d_initial.mT.contiguous(), empty, empty)


@pytest.fixture(autouse=True)
def _kernels(monkeypatch):
    monkeypatch.setattr(cudnn, "_calls", lambda: SimpleNamespace(kda_fwd=kda_fwd, kda_bwd=kda_bwd))


def inputs_of(rows, tokens):
    shape = rows, tokens, H
    q, k, v = torch.randn(3, *shape, K, dtype=torch.float64)
    g, beta = -torch.rand(*shape, K, dtype=torch.float64), torch.rand(*shape, dtype=torch.float64)
    return RuleInputs(l2norm(q), l2norm(k), v, g, beta)


@pytest.mark.parametrize("lengths", [(1, 63, 0, 65), None], ids=["documents", "rows"])
def test_it_gives_what_the_plain_rule_gives(lengths):
    torch.manual_seed(0)
    inputs = inputs_of(1, sum(lengths)) if lengths else inputs_of(2, 70)
    documents = documents_of(lengths, "cpu") if lengths else None
    d_o = torch.randn_like(inputs.v)
    initial, d_final = torch.randn(2, 3 if lengths else 2, H, K, K, dtype=torch.float64)
    found, exact = (
        run_everything(rule, inputs, d_o, documents, initial, d_final)
        for rule in (cudnn.CudnnKDA(), PlainKDA())
    )
    torch.testing.assert_close(found, exact, rtol=1e-9, atol=1e-9)


def test_without_states_it_begins_from_zeros_and_returns_none():
    torch.manual_seed(0)
    inputs = inputs_of(2, 70)
    d_o, found = torch.randn_like(inputs.v), []
    for rule in (cudnn.CudnnKDA(), PlainKDA()):
        made = rule.begin(inputs, None).run()
        assert made.final is None
        backward = rule.begin_backward(d_o.clone(), inputs, made.saved, None)
        found.append((made.o, *backward.run()[:5]))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def test_fewer_key_heads_are_refused():
    inputs = inputs_of(1, 9)
    inputs = inputs._replace(q=inputs.q[:, :, :1], k=inputs.k[:, :, :1])
    with pytest.raises(NotImplementedError, match="as many key heads as value heads, not 1 and 2"):
        cudnn.CudnnKDA().begin(inputs, None)


def test_documents_in_fixed_buffers_are_refused():
    documents = StaticDocuments(9, 2)
    with pytest.raises(NotImplementedError, match="backend='cudnn' and documents in fixed buffers"):
        cudnn.CudnnKDA().begin(inputs_of(1, 9), documents)
