"""Which rule a Kimi Delta Attention takes, and the cuDNN rule around the plain rule in
fp64."""

from types import SimpleNamespace

import pytest
import torch

from megatron_gdn.kda import cudnn
from megatron_gdn.kda.rule import FlaKDA, choose_kda
from megatron_gdn.ops.delta_rule.base import RuleInputs
from megatron_gdn.ops.delta_rule.plain import PlainRule
from megatron_gdn.ops.documents import Documents
from megatron_gdn.ops.elementwise import l2norm
from megatron_gdn.ops.rules.base import Bits
from megatron_gdn.ops.state_maps.state_map import StateShape
from megatron_gdn.ops.static_documents import StaticDocuments
from tests.ops.delta_rule.states import documents_of, require_dense, run_everything

GPU = {
    "state": StateShape(2, 128, 128),
    "lower_bound": None,
    "device": torch.device("cuda"),
    "dtype": torch.bfloat16,
}
BOUNDED = {**GPU, "lower_bound": -5.0}


def test_auto_is_fla_where_it_runs(monkeypatch):
    monkeypatch.setattr(FlaKDA, "why_not", lambda *_: None)
    assert choose_kda("auto", **GPU).rule.name == "fla"
    monkeypatch.undo()
    choice = choose_kda("auto", **{**GPU, "device": torch.device("cpu")})
    assert type(choice.rule) is PlainRule and "runs on a GPU" in choice.reason


def test_kernels_are_refused_by_name_where_their_bits_cannot_be_promised():
    with pytest.raises(ValueError, match="backend='cudnn': cuDNN cuts a sequence"):
        choose_kda("cudnn", **BOUNDED, bits=Bits.DETERMINISTIC)
    for backend in ("fla", "cudnn"):
        with pytest.raises(ValueError, match="batch_invariant_mode"):
            choose_kda(backend, **BOUNDED, bits=Bits.ON_GRID)
    assert type(choose_kda("auto", **GPU, bits=Bits.ON_GRID).rule) is PlainRule


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"device": torch.device("cpu")}, "runs on a GPU, not on cpu"),
        ({"dtype": torch.float16}, "takes bf16, not torch.float16"),
        ({"state": StateShape(2, 64, 128)}, "takes heads of 128, not 64"),
        ({"state": StateShape(2, 128, 64)}, "takes heads of 128, not 64"),
        (
            {"lower_bound": None},
            "returns NaN .* gate_lower_bound=None. A layer with .*=-5.0",
        ),
        ({"lower_bound": -6.0}, "returns NaN .* gate_lower_bound=-6.0"),
        ({}, "compute capability 9.0"),
    ],
)
def test_cudnn_says_what_it_takes(monkeypatch, changed, said):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (10, 0))
    with pytest.raises(ValueError, match=f"backend='cudnn'.*{said}"):
        choose_kda("cudnn", **{**BOUNDED, **changed})


def test_fla_takes_its_faster_kernels_where_no_decay_is_below_their_limit():
    safe = {
        bound: FlaKDA(bound).chunk_and_backward_arguments["safe_gate"]
        for bound in (None, -5.001, -5.0, -1.0)
    }
    assert safe == {None: False, -5.001: False, -5.0: True, -1.0: True}


def test_cudnn_is_taken_by_name_alone(monkeypatch):
    for rule in (FlaKDA, cudnn.CudnnKDA):
        monkeypatch.setattr(rule, "why_not", lambda *_: None)
    assert choose_kda("cudnn", **BOUNDED).rule.name == "cudnn"
    assert choose_kda("auto", **GPU).rule.name == "fla"


@pytest.mark.parametrize(
    ("found", "installed", "said"),
    [
        (True, "1.31.0", r"1\.31\.0 is not supported \(pip install"),
        (True, None, r"not installed \(pip install"),
        (False, "1.32.0", r"not installed \(pip install"),
        (True, "1.32.7", None),
    ],
)
def test_another_cudnn_frontend_is_refused_with_what_to_install(
    monkeypatch, found, installed, said
):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(cudnn, "find_spec", lambda *_: object() if found else None)
    monkeypatch.setattr(cudnn, "installed_version", lambda *_: installed)
    cudnn._why_not_package.cache_clear()
    try:
        if said is None:
            assert choose_kda("cudnn", **BOUNDED).rule.name == "cudnn"
        else:
            with pytest.raises(ImportError, match=said):
                choose_kda("cudnn", **BOUNDED)
    finally:
        cudnn._why_not_package.cache_clear()


H, K = 2, cudnn.HEAD_DIM


def kda_fwd(
    q,
    k,
    v,
    g,
    beta,
    offsets,
    scale,
    initial_state=None,
    output_final_state=False,
    plan_name=None,
):
    assert scale == K**-0.5 and plan_name == "kda_hopper_cuda"
    assert initial_state is not None and output_final_state, (
        "cuDNN keeps a buffer for each"
    )
    require_dense(q, k, v, g, beta, offsets, initial_state)
    documents = Documents.from_cu_seqlens(offsets.tolist(), len(q), device="cpu")
    begun = PlainRule().begin(
        RuleInputs(*(x[None] for x in (q, k, v, g, beta))), documents
    )
    made = begun.run(initial_state.mT, final=True)
    return made.o[0], made.final_states.mT.contiguous(), q.new_empty(0)


def kda_bwd(
    d_o,
    q,
    k,
    v,
    g,
    beta,
    offsets,
    scale,
    initial_state=None,
    d_final_state=None,
    plan_name=None,
):
    assert scale == K**-0.5 and plan_name == "kda_hopper_cuda"
    require_dense(d_o, q, k, v, g, beta, offsets, initial_state, d_final_state)
    documents = Documents.from_cu_seqlens(offsets.tolist(), len(q), device="cpu")
    inputs = RuleInputs(*(x[None] for x in (q, k, v, g, beta)))
    initial = initial_state.mT
    d_final = d_final_state.mT
    rule = PlainRule()
    saved = rule.begin(inputs, documents).run(initial).saved
    begun = rule.begin_backward(d_o[None].clone(), inputs, saved, documents)
    maps = rule.begin(inputs, documents).state_map()
    d_initial = maps.transposed(begun.d_initial()).apply(d_final)
    grads = rule.begin_backward(d_o[None].clone(), inputs, saved, documents).run(
        initial, d_final
    )
    empty = q.new_empty(0)
    return (*(x[0] for x in grads[:5]), d_initial.mT.contiguous(), empty, empty)


@pytest.fixture(autouse=True)
def _kernels(monkeypatch):
    monkeypatch.setattr(
        cudnn,
        "_cudnn_functions",
        lambda: SimpleNamespace(kda_fwd=kda_fwd, kda_bwd=kda_bwd),
    )


def inputs_of(rows, tokens):
    shape = rows, tokens, H
    q, k, v = torch.randn(3, *shape, K, dtype=torch.float64)
    g = -torch.rand(*shape, K, dtype=torch.float64)
    beta = torch.rand(*shape, dtype=torch.float64)
    return RuleInputs(l2norm(q), l2norm(k), v, g, beta)


@pytest.mark.parametrize("with_states", [True, False], ids=["states", "from zeros"])
@pytest.mark.parametrize("lengths", [(1, 63, 0, 65), None], ids=["documents", "rows"])
def test_it_gives_what_the_plain_rule_gives(lengths, with_states):
    torch.manual_seed(0)
    inputs = inputs_of(1, sum(lengths)) if lengths else inputs_of(2, 70)
    documents = documents_of(lengths, "cpu") if lengths else None
    d_o = torch.randn_like(inputs.v)
    # heads before tokens in memory
    *given, d_o = (
        x.transpose(1, 2).contiguous().transpose(1, 2) for x in (*inputs, d_o)
    )
    inputs = RuleInputs(*given)
    states = torch.randn(2, 3 if lengths else 2, H, K, K, dtype=torch.float64)
    initial, d_final = states * with_states
    found, exact = (
        run_everything(rule, inputs, d_o, documents, initial, d_final)
        for rule in (cudnn.CudnnKDA(), PlainRule())
    )
    torch.testing.assert_close(found, exact, rtol=1e-9, atol=1e-9)
    assert cudnn.CudnnKDA().begin(inputs, documents).run().final_states is None


def test_fewer_key_heads_and_documents_in_fixed_buffers_are_refused():
    inputs = inputs_of(1, 9)
    rule = cudnn.CudnnKDA()
    with pytest.raises(
        NotImplementedError, match="backend='cudnn' does not take documents in fix"
    ):
        rule.begin(inputs, StaticDocuments(9, 2))
    inputs = inputs._replace(q=inputs.q[:, :, :1], k=inputs.k[:, :, :1])
    with pytest.raises(
        NotImplementedError, match="as many key heads as value heads, not 1 and 2"
    ):
        rule.begin(inputs, None)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_log_decays_of_16_bits_which_cudnn_computes_wrong_are_refused(dtype):
    """cudnn-frontend issue 1130: its 16-bit gate path on Hopper."""
    inputs = inputs_of(1, 9)
    with pytest.raises(NotImplementedError, match=f"g in fp32, not {dtype}"):
        cudnn.CudnnKDA().begin(inputs._replace(g=inputs.g.to(dtype)), None)
