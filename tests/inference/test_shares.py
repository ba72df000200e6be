"""Requests that were saved on some tensor-parallel ranks are loaded on others, bit for bit."""

import io

import pytest
import torch

from megatron_gdn.inference import Carry, CarryShape, RequestPool
from tests.inference.row_mixers import KINDS, Kind

PAST, TAPS = 3, 4


def shape_of(kind: Kind, rank: int, ranks: int, aligned: bool) -> CarryShape:
    state = kind.mixer().state
    state = state._replace(heads=state.heads // ranks)
    return CarryShape.of(kind.layout.share(ranks), state, TAPS, aligned, rank, ranks)


def share(whole: Carry, kind: Kind, rank: int, ranks: int, aligned: bool) -> Carry:
    """What a rank holds of a whole carry of one sequence: section by section, and heads."""
    widths = kind.layout.widths if aligned else kind.layout.conv_widths
    dim = int(aligned)
    history = [x.chunk(ranks, dim)[rank] for x in whole.history.split(widths, dim)]
    return Carry(torch.cat(history, dim), whole.state.chunk(ranks)[rank])


def pool_of(kind, rank, ranks, aligned):
    return RequestPool({1: shape_of(kind, rank, ranks, aligned)}, 2, dtype=torch.float32)


def in_a_file(saved):
    file = io.BytesIO()
    torch.save(saved, file)
    file.seek(0)
    return torch.load(file)


@pytest.mark.parametrize("aligned", [False, True], ids=["", "aligned"])
@pytest.mark.parametrize("ranks", [(1, 2), (2, 1), (2, 2)], ids=str)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_any_number_of_ranks_loads_what_any_other_saved(kind, ranks, aligned):
    before, after = ranks
    shape = shape_of(kind, 0, 1, aligned)
    whole = Carry(torch.randn(shape.history), torch.randn(shape.state))
    files = []
    for rank in reversed(range(before)):
        pool = pool_of(kind, rank, before, aligned)
        request = pool.allocate(tokens=30)
        mine = share(whole, kind, rank, before, aligned)
        pool.write(1, [request], Carry(*(x[None] for x in mine)), [9])
        files.append(in_a_file(pool.save(request)))
    for rank in range(after):
        pool = pool_of(kind, rank, after, aligned)
        loaded = pool.load(files)
        expected = share(whole, kind, rank, after, aligned)
        for ours, theirs in zip(pool.read(1, [loaded]), expected, strict=True):
            assert torch.equal(ours[0], theirs)
        assert loaded.tokens == 30 and pool.tokens_of(loaded) == 9


def test_what_is_missing_or_does_not_belong_together_is_named():
    kind = KINDS[0]
    files = []
    for rank, tokens in ((0, 4), (1, 4), (1, 5)):
        pool = pool_of(kind, rank, 2, False)
        request = pool.allocate()
        pool.write(1, [request], pool.read(1, [request]), [tokens])
        files.append(pool.save(request))
    one = pool_of(kind, 0, 1, False)
    with pytest.raises(ValueError, match="needs 0 to 15 .* none from 8 on; give what every"):
        one.load(files[0])
    with pytest.raises(ValueError, match="not of one request at one place"):
        one.load([files[0], files[2]])
    with pytest.raises(ValueError, match="sections of channels|of 16 channels or heads"):
        pool_of(KINDS[1], 0, 1, False).load(files[:2])
    assert one.free_slots == 2
    one.load(files[:2])


def test_a_history_with_columns_first_is_named():
    """As earlier versions saved those of an aligned mixer."""
    pool = pool_of(KINDS[0], 0, 1, True)
    file = pool.save(pool.allocate())
    history, state = file["layers"][1]
    file["layers"][1] = Carry(history.mT, state)
    with pytest.raises(ValueError, match="by an earlier version"):
        pool.load(file)
