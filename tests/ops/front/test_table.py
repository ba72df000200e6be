"""A front by its table: gates at the ends of their range, gradients of value heads."""

import random
from dataclasses import replace

import pytest
import torch

from megatron_gdn.gdn.front import gdn_table
from megatron_gdn.gdn2.front import gdn2_table
from megatron_gdn.gdn2.sizes import gdn2_layout
from megatron_gdn.gdp.front import gdp_table
from megatron_gdn.gdp.sizes import gdp_layout
from megatron_gdn.kda.front import kda_table
from megatron_gdn.kda.sizes import kda_layout
from megatron_gdn.mamba2.front import mamba2_table
from megatron_gdn.ops.delta_rule.base import HeadSizes, RuleGrads
from megatron_gdn.ops.front import gates
from megatron_gdn.ops.front.history import HistoryTable, history_of
from megatron_gdn.ops.front.plain import PlainFront, front_of
from megatron_gdn.ops.obstacles import log_obstacle_once
from megatron_gdn.ops.trees import TreeDocuments
from tests.mamba2.oracle import layout_of
from tests.ops.delta_rule.states import documents_of
from tests.ops.test_mixer import make_inputs

SIZES = HeadSizes(1, 2, 6, 4)
TABLES = {
    "gdn": gdn_table(SIZES.layout),
    "gdn2": gdn2_table(gdn2_layout(SIZES)),
    "gdp": gdp_table(gdp_layout(SIZES, 2)),
    "kda": kda_table(kda_layout(SIZES)),
    "mamba2": mamba2_table(layout_of(2, 1, 4, 6)),
}


@pytest.mark.parametrize(
    ("function", "numbers"),
    [
        (gates.decay, (0, 1)),
        (gates.bounded_decay, (-5, 1)),
        (gates.time_step, (0.0, 1e30)),
    ],
    ids=["decay", "bounded_decay", "time_step"],
)
def test_extreme_columns_and_rates_give_a_decay_and_no_nan(function, numbers):
    x = torch.tensor([[-1e30, 1e30, 0.0]]).T.requires_grad_()
    A_log = torch.tensor([0.0, 0.0, 1e4])[:, None].requires_grad_()
    made = function(x, A_log, *numbers)
    assert made[0].exp()[0].item() == 1 and made[0].exp()[1].item() < 0.01
    sum(y.clamp(max=1).sum() for y in made).backward()
    assert x.grad.isfinite().all() and A_log.grad.isfinite().all()


def test_gradients_of_value_heads_are_summed_for_the_key_head_that_they_share():
    """As rules on a GPU give those of q and k."""
    sizes = HeadSizes(2, 4, 3, 5)
    tokens = 9
    (proj, *given, _), _ = make_inputs(sizes, tokens, bias=True)
    proj, *given = (x.detach() for x in (proj, *given))
    front = front_of(gdn_table(sizes.layout), "cpu", torch.float64, 4, "torch")
    shapes = ((4, 3), (4, 3), (4, 5), (4,), (4,))
    many = RuleGrads(
        *(torch.randn(1, tokens, *shape, dtype=torch.float64) for shape in shapes)
    )
    summed = {
        name: getattr(many, name).unflatten(2, (2, 2)).sum(3) for name in ("q", "k")
    }
    found = []
    for grads in (many, many._replace(**summed)):
        d_proj = torch.zeros_like(proj)
        found.append([d_proj, *front.backward(proj, given, grads, d_proj, None)])
    for one, other in zip(*found, strict=True):
        assert one is other is None or torch.equal(one, other)


def soft(x, A_log, low, high):
    """A gate that has no Triton twin."""
    return (x / (1 + x.abs()),)


def strength(x, A_log, low, high):
    """A gate with the name of a Triton function that computes another gate."""
    return (x.tanh(),)


@pytest.mark.parametrize("function", [soft, strength])
def test_a_gate_without_a_triton_twin_runs_in_torch_on_a_gpu_and_the_log_says_so(
    caplog, function
):
    pytest.importorskip("triton")
    table = gdn_table(HeadSizes(2, 4, 16, 16).layout)
    g, beta = table.gate_sections
    assert front_of(table, "cuda", torch.float32, 4).is_triton
    ours = replace(table, gate_sections=(g, beta._replace(function=function)))
    front_of.cache_clear()
    log_obstacle_once.cache_clear()
    for taps in (3, 4):
        assert type(front_of(ours, "cuda", torch.float32, taps)) is PlainFront
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "run in plain torch: the gates beta have no functions in" in caplog.text
    with pytest.raises(
        ValueError, match="kernels='triton': the gates beta .* Use 'auto' or 'torch'"
    ):
        front_of(ours, "cuda", torch.float32, 4, "triton")
    with pytest.raises(ValueError, match="unknown kernels 'cuda'; use 'auto'"):
        front_of(ours, "cuda", torch.float32, 4, "cuda")


@pytest.mark.parametrize(
    ("dtype", "taps", "said"),
    [
        (torch.float64, 4, "in fp32, not in fp64"),
        (torch.float32, 1, "take 2 to 8 conv taps, not 1"),
        (torch.float32, 9, "take 2 to 8 conv taps, not 9"),
    ],
)
def test_rows_that_kernels_cannot_take_run_in_torch_on_a_gpu(dtype, taps, said):
    pytest.importorskip("triton")
    table = gdn_table(HeadSizes(2, 4, 16, 16).layout)
    assert type(front_of(table, "cuda", dtype, taps)) is PlainFront
    with pytest.raises(ValueError, match=said):
        front_of(table, "cuda", dtype, taps, "triton")


def test_the_gradients_that_return_for_a_token_are_added_in_the_order_of_its_rows():
    """A sort that is not stable keeps the order of few rows by luck."""
    drawn = random.Random(1)
    sent = [drawn.randrange(40) for _ in range(3000)]
    table = HistoryTable.build(
        first=torch.tensor([0]),
        count=torch.tensor([40]),
        before=torch.full((1, 3), -1),
        sent=torch.tensor(sent),
        tokens=40,
        device=torch.device("cpu"),
    )
    for token, *sources in table.gradient_additions.tolist():
        expected = [number for number, other in enumerate(sent) if other == token]
        assert [source for source in sources if source >= 0] == expected


def _tables_of_histories():
    """Of batch rows, of documents and of a tree, all with W = 4."""
    yield history_of(torch.zeros(2, 5, 3), None, 7).table
    documents = documents_of((5, 0, 1, 9, 2))
    yield history_of(torch.zeros(5, 5, 3), documents, 17).table
    tree = TreeDocuments((0, 5, 6, 10), torch.device("cpu"), (-1, 0, 1), (5, 1, 4))
    link = tree.history(3)
    assert link is not None
    yield link.table


def test_no_gradient_returns_for_rows_that_were_not_sent():
    """Those of a tree are of the same rank: the tokens 4, 3, 2 and 5, 4, 3."""
    of_rows, of_documents, of_tree = _tables_of_histories()
    assert not of_rows.gradient_additions.numel()
    assert not of_documents.gradient_additions.numel()
    assert of_tree.gradient_additions[:, 0].tolist() == [2, 3, 4, 5]


def test_a_token_has_the_index_of_its_place_in_an_edge_or_none():
    """Token 0 too."""
    for table in _tables_of_histories():
        edge = table.edge_tokens.flatten().tolist()
        tokens = range(len(table.edge_index))
        expected = [edge.index(token) if token in edge else -1 for token in tokens]
        assert table.edge_index.tolist() == expected


@pytest.mark.parametrize("name", TABLES)
def test_parameters_and_rows_in_bf16_are_computed_with_in_fp32(name):
    """Convolved inputs and gradients are rounded once, gates and what all tokens share
    are not."""
    torch.manual_seed(0)
    table = TABLES[name]
    layout = table.layout
    (gate,) = (x for x in table.gate_sections if x.has_A_log)
    heads, width = layout.shape_of(gate.section)
    rates = heads, heads * (width if gate.per_channel else 1)
    shared = [layout.state_heads] if table.shared_input else []
    C = layout.conv_width
    shapes = [(9, 1, layout.width), (C, 1, 4), (C,), *((n,) for n in (*rates, *shared))]
    narrow = [torch.randn(shape).bfloat16() for shape in shapes]
    front = front_of(table, "cpu", torch.bfloat16, 4, "torch")

    def run(proj, *parameters):
        made = front.forward(proj, parameters, None)
        make = torch.Generator().manual_seed(1)
        grads = type(made)(*(torch.randn(x.shape, generator=make) for x in made))
        d_proj = torch.zeros_like(proj)
        return made, [d_proj, *front.backward(proj, parameters, grads, d_proj, None)]

    (made, d_narrow), (exact, d_exact) = run(*narrow), run(*(x.float() for x in narrow))
    for field, x in zip(made._fields, made, strict=True):
        is_rounded = field in front.convolved_inputs
        assert x.dtype == (torch.bfloat16 if is_rounded else torch.float32), field
    assert all(x.dtype == torch.bfloat16 for x in d_narrow)
    for x, y in zip((*made, *d_narrow), (*exact, *d_exact), strict=True):
        # one rounding to 8 bits, and some of fp32
        room = 2**-8 if x.dtype == torch.bfloat16 else 0
        torch.testing.assert_close(x.float(), y, rtol=room + 1e-5, atol=1e-5)
