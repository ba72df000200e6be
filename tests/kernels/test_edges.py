"""The first tokens of pieces on their kernels against the plain way in fp64, by real routes."""

from itertools import accumulate

import pytest
import torch

from megatron_gdn import SequenceLayout
from megatron_gdn.context_parallel.chunkwise.pieces import documents_of_pieces, history_route
from megatron_gdn.context_parallel.chunkwise.static_history import (
    static_history_route,
    static_pieces,
)
from megatron_gdn.gdn.front import GDNFront
from megatron_gdn.mamba2.front import Mamba2Front
from megatron_gdn.mamba2.plain import SSDInputs
from megatron_gdn.ops import StaticDocuments
from megatron_gdn.ops.delta_rule import front_torch as gdn_torch
from megatron_gdn.ops.delta_rule import front_triton as gdn
from megatron_gdn.ops.delta_rule.base import HeadSizes, RuleGrads
from megatron_gdn.ops.front.edges import ContinuedFront
from megatron_gdn.ops.front.fused_edges import FusedEdges
from megatron_gdn.ops.trees import TreeDocuments

from . import test_other_fronts as mamba2
from .kernel_cases import Case, assert_close

# A prompt of two tokens with 18 children, one of which has a child: rows that many read.
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
    "in fixed buffers": ((4, 0, 8, 12, 40), 2, BUFFERS, 1),
    "in fixed buffers, first rank": ((8, 40), 4, BUFFERS, 0),
}

# For GDN's front, whose cases take the interpreter up to ten seconds each; Mamba2's takes all cuts.
FEW_CUTS = (
    "one sequence",
    "pieces of one token and more",
    "a fragment of many documents",
    "a shared prefix",
    "in fixed buffers",
)


class Link:
    def __init__(self, route, history, returned):
        self.table, self.history, self.returned, self.d_history = (
            route.table, history, returned, None,
        )  # fmt: skip

    def fetch(self, rows):
        return self.history, self

    def give_back(self, d_history):
        self.d_history = d_history
        return self.returned, self

    def wait(self):
        pass

    def double(self):
        other = object.__new__(Link)
        vars(other).update(vars(self))
        other.history, other.returned = self.history.double(), self.returned.double()
        return other


def link_of(cut, taps, batch, channels, device, normal):
    lengths, cp, layout, rank = cut
    if layout is PARENTS:
        tree = TreeDocuments((0, *accumulate(lengths)), device, PARENTS, lengths)
        route = tree.history(taps - 1)
        count = len(route.table.buffer.arrived)
        return Link(route, normal(count, batch, channels), normal(count, batch, channels)), tree
    if layout is BUFFERS:
        documents = StaticDocuments(sum(lengths), 6, device)
        documents.fill([0, *accumulate(lengths)])
        route = static_history_route(documents, cp, rank, taps)
        pieces = static_pieces(documents, cp, SequenceLayout.ZIGZAG)
        rows = (normal(sum(n), batch, channels) for n in (route.receive_counts, route.send_counts))
        return Link(route, *rows), pieces
    where = lengths, cp, SequenceLayout.parse(layout), rank
    route = history_route(*where, taps, device)
    history = normal(sum(route.receive_counts), batch, channels)
    # Its strides are not always those of a tensor of its own: a cache lies the other way round.
    history = history.permute(1, 2, 0).contiguous().permute(2, 0, 1)
    returned = normal(sum(route.send_counts), batch, channels)
    return Link(route, history, returned), documents_of_pieces(*where, device)


def compare(front, plain, link, proj, parameters, grads, documents, only):
    assert isinstance(front.edges(), FusedEdges) and plain.edges() is None
    exact_link, columns = link.double(), front.layout.conv_columns
    exact_proj = proj.double()
    exact_parameters = [None if x is None else x.double() for x in parameters]
    exact_grads = type(grads)(*(None if x is None else x.double() for x in grads))
    ours, exact = ContinuedFront(front, link), ContinuedFront(plain, exact_link)
    for names in (None, only):
        made = ours.forward(proj, parameters, documents, names)
        right = exact.forward(exact_proj, exact_parameters, documents, names)
        for name in front.convolved:
            x, y = getattr(made, name), getattr(right, name)
            assert (x is None) == (y is None)
            if x is not None:
                assert_close(name, x, y)
    d_proj, exact_d_proj = (torch.full_like(x, float("nan")) for x in (proj, exact_proj))
    got = ours.backward(proj, parameters, grads, d_proj, documents)
    right = exact.backward(exact_proj, exact_parameters, exact_grads, exact_d_proj, documents)
    assert_close("d_proj", d_proj[..., columns], exact_d_proj[..., columns])
    assert link.d_history.dtype == torch.float32
    assert_close("d_history", link.d_history, exact_link.d_history)
    for number, (x, y) in enumerate(zip(got, right, strict=True)):
        assert (x is None) == (y is None)
        if x is not None:
            assert_close(f"parameter {number}", x, y)


@pytest.mark.parametrize("cut", FEW_CUTS)
@pytest.mark.parametrize(
    "options",
    [
        {"batch": 2, "sizes": HeadSizes(1, 2, 12, 20), "bias": True},
        {"sizes": HeadSizes(2, 4, 16, 8), "per_value_head": True, "scaled": True, "taps": 5},
        {"sizes": HeadSizes(1, 1, 8, 8), "normalise": False, "taps": 2},
        {"sizes": HeadSizes(1, 2, 8, 16), "taps": 8, "batch_invariant": True},
    ],
    ids=["4 taps", "5 taps, scaled", "2 taps, not normalised", "8 taps"],
)
def test_a_gdn_front_equals_the_plain_way(cut, options, device):
    cut, taps, batch = CUTS[cut], options.get("taps", 4), options.get("batch", 1)
    lengths, ranks = cut[:2]
    case = Case(
        device, S=sum(lengths) // ranks, B=batch, sizes=options["sizes"], taps=taps,
        bias=options.get("bias", False),
    )  # fmt: skip
    sizes, normalise = case.sizes, options.get("normalise", True)
    link, documents = link_of(cut, taps, batch, sizes.conv_width, device, case._normal)
    factor = None
    if options.get("scaled"):
        ratio = sizes.value_heads // sizes.key_heads
        factor = (2.0 ** torch.arange(sizes.key_heads, device=device)).repeat_interleave(ratio)
    grads = RuleGrads(*case.grads(options.get("per_value_head", False)), factor)
    compare(
        GDNFront(sizes, gdn, normalise, batch_invariant=options.get("batch_invariant", False)),
        GDNFront(sizes, gdn_torch, normalise), link, case.proj, case.parameters, grads, documents,
        ("q",),
    )  # fmt: skip


@pytest.mark.parametrize("cut", CUTS)
def test_a_mamba2_front_equals_the_plain_way(cut, device):
    cut = CUTS[cut]
    lengths, ranks = cut[:2]
    S, B, (H, G, V, K) = sum(lengths) // ranks, 2, (2, 1, 6, 20)
    layout, proj, parameters, normal = mamba2.case(device, S=S, B=B, sizes=(H, G, V, K))
    link, documents = link_of(cut, 4, B, layout.conv_width, device, normal)
    shapes = [(H, V), (G, K), (G, K), (H,), (H,), (H, 1)]
    grads = SSDInputs(*(normal(B, S, *shape) for shape in shapes))
    compare(
        Mamba2Front(layout, triton=True), Mamba2Front(layout), link, proj, parameters, grads,
        documents, ("B", "C"),
    )  # fmt: skip
