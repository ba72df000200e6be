"""Fronts of pieces that have a history: kernels against the plain twins in fp64, by
real routes."""

from itertools import accumulate

import pytest
import torch

from megatron_gdn import SequenceLayout
from megatron_gdn.context_parallel.chunkwise.fragments import (
    SequencePartition,
    pieces_of,
)
from megatron_gdn.context_parallel.chunkwise.history import history_route
from megatron_gdn.gdn.front import gdn_table
from megatron_gdn.mamba2.front import mamba2_table
from megatron_gdn.mamba2.rule import SSDInputs
from megatron_gdn.ops import Documents, StaticDocuments
from megatron_gdn.ops.delta_rule.base import HeadSizes, RuleGrads
from megatron_gdn.ops.front.history import History
from megatron_gdn.ops.front.history_kernels import (
    _CHANNELS,
    add_rows,
    lead_in,
    lead_in_backward,
)
from megatron_gdn.ops.front.plain import front_of
from megatron_gdn.ops.mixer import add_returned
from megatron_gdn.ops.rules.base import Bits
from megatron_gdn.ops.trees import TreeDocuments

from . import test_other_fronts as mamba2
from .kernel_cases import FP32, Case, assert_close

# A prompt of two tokens with 18 children, one of which has a child: rows that many
# read.
PARENTS = (-1, *[0] * 18, 5)

# Of six documents.
BUFFERS = "buffers"

# Lengths, ranks, layout or parents, and the rank at hand.
CUTS = {
    "one sequence": ((48,), 2, "zigzag", 1),
    "first rank": ((48,), 2, "zigzag", 0),
    "pieces of one token and more": ((4, 0, 8, 12, 40), 2, "zigzag", 0),
    "a fragment of many documents": ((3, 0, 29, 1, 1, 14), 4, "zigzag_buffer", 2),
    "it sends and gets nothing": ((24,), 3, "contiguous", 0),
    "it gets and sends nothing": ((24,), 3, "contiguous", 2),
    "several pieces read one row": ((8, 8), 8, "contiguous", 1),
    "a shared prefix": ((2, *[1, 4, 2] * 6, 3), 1, PARENTS, 0),
    "in fixed buffers": ((4, 0, 8, 12, 40), 2, "zigzag", 1, BUFFERS),
    "in fixed buffers, first rank": ((8, 40), 4, "zigzag", 0, BUFFERS),
    "in fixed buffers, a fragment of many": (
        (3, 0, 29, 1, 1, 14),
        4,
        "zigzag_buffer",
        2,
        BUFFERS,
    ),
    "in fixed buffers, contiguous": ((8, 8), 8, "contiguous", 1, BUFFERS),
}


def history_of(cut, taps, batch, channels, device, normal):
    """The documents of the rank at hand, the rows before them, and gradients that come
    back."""
    lengths, cp, layout, rank, *buffers = cut
    if layout is PARENTS:
        tree = TreeDocuments((0, *accumulate(lengths)), device, PARENTS, lengths)
        link = tree.history(taps - 1)
        assert link is not None
        table = link.table
        count = int(table.rows_before.max()) + 1
        rows = normal(count, batch, channels)
        returned = normal(count, batch, channels)
        return tree, History(rows, table), returned
    offsets = (0, *accumulate(lengths))
    if buffers:
        whole = StaticDocuments(sum(lengths), 6, device)
        whole.fill(offsets)
    else:
        whole = Documents(offsets, device)
    partition = SequencePartition(cp, SequenceLayout.parse(layout), rank)
    route = history_route(whole, partition, taps)
    documents = pieces_of(whole, partition)
    assert route is not None
    rows = normal(sum(route.receive_counts), batch, channels)
    # Its strides are not always those of a tensor of its own: a cache lies the other
    # way round.
    rows = rows.permute(1, 2, 0).contiguous().permute(2, 0, 1)
    returned = normal(sum(route.send_counts), batch, channels)
    return documents, History(rows, route.history_table), returned


def compare(front, plain, history, returned, proj, parameters, grads, documents, only):
    columns = front.layout.conv_columns
    exact_proj = proj.double()
    exact_parameters = [None if x is None else x.double() for x in parameters]
    exact_grads = type(grads)(*(None if x is None else x.double() for x in grads))
    exact_history = history._replace(rows=history.rows.double())
    for names in (None, only):
        made = front.forward(proj, parameters, documents, names, history)
        right = plain.forward(
            exact_proj, exact_parameters, documents, names, exact_history
        )
        for name in front.convolved_inputs:
            x, y = getattr(made, name), getattr(right, name)
            assert (x is None) == (y is None)
            if x is not None:
                assert_close(name, x, y)
    history = history.with_gradient_buffer()
    exact_history = exact_history.with_gradient_buffer()
    d_proj, exact_d_proj = (
        torch.full_like(x, float("nan")) for x in (proj, exact_proj)
    )
    got = front.backward(proj, parameters, grads, d_proj, documents, history)
    right = plain.backward(
        exact_proj,
        exact_parameters,
        exact_grads,
        exact_d_proj,
        documents,
        exact_history,
    )
    d_proj = d_proj[..., columns]
    exact_d_proj = exact_d_proj[..., columns]
    assert_close("d_proj", d_proj, exact_d_proj)
    assert history.d_rows is not None and exact_history.d_rows is not None
    assert history.d_rows.dtype == torch.float32
    assert_close("d_rows", history.d_rows, exact_history.d_rows)
    for number, (x, y) in enumerate(zip(got, right, strict=True)):
        assert (x is None) == (y is None)
        if x is not None:
            assert_close(f"parameter {number}", x, y)
    if history.table.gradient_additions.numel():
        add_rows(d_proj, returned, history.table.gradient_additions)
        add_returned(exact_d_proj, returned.double(), history.table)
        assert_close("d_proj and what came back", d_proj, exact_d_proj)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_programs_have_all_channels_of_wide_rows(dtype, device):
    """More channels than two programs compute; sums are fp32."""
    C = 2 * _CHANNELS + 3
    make = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=make).to(device)

    documents, history, returned = history_of(
        CUTS["one sequence"], 4, 2, C, device, normal
    )
    history = history._replace(rows=history.rows.to(dtype)).with_gradient_buffer()
    table = history.table
    weight = normal(C, 1, 4).to(dtype)
    lead, _ = lead_in(history, weight)
    d_lead = normal(*lead.shape)
    partial = torch.empty(len(lead) * 2, 4 * C, device=device)
    lead_in_backward(history, weight, d_lead, partial)
    rows, taps = (x.double().requires_grad_() for x in (history.rows, weight))
    exact = history._replace(rows=rows).add_lead_in_to(
        taps.new_zeros(2, documents.total_tokens, C), taps.flatten(1)
    )
    # [N, W - 1, B, C]; no piece of this sequence is shorter than its edge
    exact = exact[:, table.edge_tokens].permute(1, 2, 0, 3)
    assert_close("lead-in", lead, exact.detach())
    d_rows, d_taps = torch.autograd.grad(exact, (rows, taps), d_lead.double())
    assert_close("d_rows", history.d_rows, d_rows)
    assert_close("d_taps", partial.sum(0), d_taps.flatten())
    sums = normal(documents.total_tokens, 2, C).to(dtype)
    exact_sums = sums.double()
    add_rows(sums, returned, table.gradient_additions)
    add_returned(exact_sums, returned.double(), table)
    rounding = 0 if dtype == torch.float32 else torch.finfo(dtype).eps
    assert_close("sums", sums, exact_sums, FP32 + rounding)


# Of GDN's front, whose cases take the interpreter some seconds each; Mamba2's takes all
# cuts.
OPTIONS = {
    "4 taps": {"batch": 2, "sizes": HeadSizes(1, 2, 12, 20), "bias": True},
    "5 taps, scaled": {
        "sizes": HeadSizes(2, 4, 16, 8),
        "per_value_head": True,
        "scaled": True,
        "taps": 5,
    },
    "2 taps, not normalised": {
        "sizes": HeadSizes(1, 1, 8, 8),
        "normalise": False,
        "taps": 2,
    },
    "8 taps": {"sizes": HeadSizes(1, 2, 8, 16), "taps": 8, "bits": Bits.DETERMINISTIC},
}
CASES = [
    *(("4 taps", cut) for cut in ("one sequence", "pieces of one token and more")),
    ("4 taps", "a shared prefix"),
    *((name, "a fragment of many documents") for name in OPTIONS),
    *((name, "in fixed buffers") for name in ("4 taps", "8 taps")),
]


@pytest.mark.parametrize(("name", "cut"), CASES)
def test_a_gdn_front_equals_the_plain_way(name, cut, device):
    options = OPTIONS[name]
    cut = CUTS[cut]
    taps = options.get("taps", 4)
    batch = options.get("batch", 1)
    lengths, ranks = cut[:2]
    case = Case(
        device,
        S=sum(lengths) // ranks,
        B=batch,
        sizes=options["sizes"],
        taps=taps,
        bias=options.get("bias", False),
    )
    sizes = case.sizes
    normalise = options.get("normalise", True)
    documents, history, returned = history_of(
        cut, taps, batch, sizes.layout.conv_width, device, case._normal
    )
    factor = None
    if options.get("scaled"):
        ratio = sizes.value_heads // sizes.key_heads
        factor = (
            2.0 ** torch.arange(sizes.key_heads, device=device)
        ).repeat_interleave(ratio)
    grads = RuleGrads(*case.grads(options.get("per_value_head", False)), factor=factor)
    kind = (gdn_table(sizes.layout, normalise), "cpu", torch.float32)
    bits = options.get("bits", Bits.FREE)
    ours, twin = (
        front_of(*kind, taps, kernels, bits) for kernels in ("triton", "torch")
    )
    compare(
        ours,
        twin,
        history,
        returned,
        case.proj,
        case.parameters,
        grads,
        documents,
        ("q",),
    )


# One kernel reads all fronts: cuts that GDN's 4 taps meet above are nightly here.
OF_GDN = {cut for name, cut in CASES if name == "4 taps"}


@pytest.mark.parametrize(
    "cut",
    [pytest.param(x, marks=[pytest.mark.nightly] if x in OF_GDN else []) for x in CUTS],
)
def test_a_mamba2_front_equals_the_plain_way(cut, device):
    cut = CUTS[cut]
    lengths, ranks = cut[:2]
    S = sum(lengths) // ranks
    B = 2
    H = 2
    G = 1
    V = 6
    K = 20
    layout, proj, parameters, normal = mamba2.case(device, S=S, B=B, sizes=(H, G, V, K))
    documents, history, returned = history_of(
        cut, 4, B, layout.conv_width, device, normal
    )
    shapes = [(H, V), (G, K), (G, K), (H,), (H,), (H, 1)]
    grads = SSDInputs(*(normal(B, S, *shape) for shape in shapes))
    kind = mamba2_table(layout), "cpu", torch.float32, 4
    ours, twin = (front_of(*kind, kernels) for kernels in ("triton", "torch"))
    compare(
        ours, twin, history, returned, proj, parameters, grads, documents, ("B", "C")
    )
