"""A front over pieces with the rows before them gives what it gives over whole sequences."""

from itertools import pairwise

import pytest
import torch

from megatron_gdn.gdn.front import gdn_front
from megatron_gdn.kda.front import kda_front
from megatron_gdn.kda.sizes import rows_of
from megatron_gdn.mamba2.front import mamba2_front
from megatron_gdn.mamba2.plain import SSDInputs
from megatron_gdn.ops.delta_rule.base import HeadSizes, RuleGrads
from megatron_gdn.ops.documents import Documents
from megatron_gdn.ops.front.history import History, HistoryTable
from megatron_gdn.ops.mixer import add_returned
from tests.mamba2.oracle import layout_of

SIZES, CPU = HeadSizes(1, 2, 4, 6), torch.device("cpu")
G, H, K, V = SIZES

# Sequences, cut at any token: pieces of one token, shorter than the taps, none cut, all cut.
CUTS = {
    "one cut": ((12,), (5,)),
    "every token": ((7,), (1, 2, 3, 4, 5, 6)),
    "short pieces": ((14,), (1, 3, 4, 9, 11)),
    "two sequences": ((3, 9), (1, 2, 4, 7)),
    "one of two": ((6, 8), (8, 9)),
}


def fronts():
    def of_delta(*shape):
        return RuleGrads(*(torch.randn(*shape, *x) for x in ((G, K), (G, K), (H, V), (H,), (H,))))

    def of_channels(*shape):
        heads = ((H, K), (H, K), (H, V), (H, K), (H,))
        return RuleGrads(*(torch.randn(*shape, *x) for x in heads))

    def of_states(*shape):
        heads = ((H, V), (G, K), (G, K), (H,), (H,), (H, 1))
        return SSDInputs(*(torch.randn(*shape, *x) for x in heads))

    kind = "cpu", torch.float64
    rows = rows_of(H, H, K, V)
    gdn, kda = gdn_front(*kind, 4, SIZES), kda_front(*kind, 4, rows)
    mamba2 = mamba2_front(*kind, 4, layout_of(H, G, V, K))
    return {
        "GDN": (gdn, (H, H), of_delta),
        "KDA": (kda, (H, H * K), of_channels),
        "Mamba2": (mamba2, (H, H, H), of_states),
    }


@pytest.fixture(autouse=True)
def fp64():
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(torch.float32)


def pieces_of(lengths, cuts, past):
    """Boundaries with these cuts; the tokens whose rows pieces read, and the table of these."""
    starts = [sum(lengths[:n]) for n in range(len(lengths) + 1)]
    offsets = sorted({*starts, *cuts})
    sent, lines = [], []
    for first, end in pairwise(offsets):
        begin = max(start for start in starts if start <= first)
        if first > begin:
            known = min(first - begin, past)
            line = [len(sent) + age if age < known else -1 for age in range(past)]
            sent += range(first - 1, first - 1 - known, -1)
            lines.append((first, end - first, line))
    first, length, before = (torch.tensor(x) for x in zip(*lines, strict=True))
    sent = torch.tensor(sent)
    table = HistoryTable.build(first, length, before, sent, offsets[-1], CPU)
    return Documents(tuple(offsets), CPU), sent, table


def drawn(mixer, S, B, taps):
    front, sizes, grads = fronts()[mixer]
    layout = front.layout
    proj = torch.randn(S, B, layout.width)
    conv = torch.randn(layout.conv_width, 1, taps), torch.randn(layout.conv_width)
    return front, proj, [*conv, *(torch.randn(n) for n in sizes)], grads(B, S)


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("mixer", ["GDN", "KDA", "Mamba2"])
@pytest.mark.parametrize("taps", [2, 4])
def test_pieces_with_their_history_equal_whole_sequences(mixer, cut, taps):
    lengths, cuts = CUTS[cut]
    S, B = sum(lengths), 2
    front, proj, parameters, grads = drawn(mixer, S, B, taps)
    columns, gate = front.layout.conv_columns, front.layout.gate_columns
    whole = Documents((0, *torch.tensor(lengths).cumsum(0).tolist()), CPU)
    documents, sent, table = pieces_of(lengths, cuts, taps - 1)
    history = History(proj[..., columns].index_select(0, sent), table).for_backward()

    made = front.forward(proj, parameters, documents, history=history)
    for name, x, y in zip(made._fields, made, front.forward(proj, parameters, whole), strict=True):
        torch.testing.assert_close(x, y, msg=name)
    d_rows, d_whole = torch.zeros_like(proj), torch.zeros_like(proj)
    got = front.backward(proj, parameters, grads, d_rows, documents, history)
    right = front.backward(proj, parameters, grads, d_whole, whole)
    assert history.d_rows is not None
    add_returned(d_rows[..., columns], history.d_rows, table)
    assert (d_rows[..., gate] == 0).all()
    torch.testing.assert_close(d_rows, d_whole)
    for x, y in zip(got, right, strict=True):
        torch.testing.assert_close(x, y)


@pytest.mark.parametrize("mixer", ["GDN", "KDA", "Mamba2"])
def test_what_is_no_number_in_one_pieces_history_reaches_no_other_piece(mixer):
    front, proj, parameters, grads = drawn(mixer, 12, 1, 4)
    documents, sent, table = pieces_of((12,), (3, 5, 8), 3)
    rows = proj[..., front.layout.conv_columns].index_select(0, sent)
    rows[table.before[1, 0]] = torch.nan  # of tokens 5, 6 and 7
    history = History(rows, table).for_backward()
    made = front.forward(proj, parameters, documents, history=history)
    x = getattr(made, front.convolved[2])[0]
    assert (
        x[5:8].isnan().any(-1).any(-1).all() and x[:5].isfinite().all() and x[8:].isfinite().all()
    )
    d_rows = torch.zeros_like(proj)
    front.backward(proj, parameters, grads, d_rows, documents, history)
    assert d_rows[:5].isfinite().all() and d_rows[8:].isfinite().all()
    assert history.d_rows is not None
    others = table.before[[0, 2]].flatten()
    assert history.d_rows[others[others >= 0]].isfinite().all()
