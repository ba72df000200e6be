"""Tables of the head exchange, its shares and its plain-torch packing, against definitions."""

import pytest
import torch

from megatron_gdn.context_parallel import SequenceLayout, local_indices
from megatron_gdn.context_parallel.headwise import pack_torch
from megatron_gdn.context_parallel.headwise.route import route, stretches
from megatron_gdn.context_parallel.headwise.shares import HeadShares, alignment, strips

CPU = torch.device("cpu")
CASES = [
    ((48,), 2, "zigzag"),
    ((48,), 4, "zigzag"),
    ((8, 0, 24, 16), 4, "zigzag"),
    ((3, 0, 29, 16), 4, "zigzag_buffer"),
    ((7, 5), 3, "contiguous"),
    ((12,) * 9, 3, "zigzag"),
    ((0,), 2, "zigzag"),
]
cases = pytest.mark.parametrize(("lengths", "cp", "layout"), CASES)
waves_of = pytest.mark.parametrize("waves", [1, 2, 3])


@cases
@waves_of
def test_waves_cut_every_ranks_tokens_in_order(lengths, cp, layout, waves):
    layout = SequenceLayout(layout)
    for rank in range(cp):
        held = local_indices(lengths, cp, rank, layout)
        others = [local_indices(lengths, cp, r, layout) for r in range(cp) if r != rank]
        made = route(lengths, cp, rank, layout, CPU, waves)
        assert len(made) <= waves
        assert torch.equal(torch.cat([held[:0], *(w.own_place for w in made)]).long(), held)
        for wave in made:
            peers = torch.cat([other[wave.tokens] for other in others])
            assert torch.equal(wave.peer_place.long(), peers)


@cases
@waves_of
def test_fragments_are_the_positions_of_every_rank_and_as_few_as_can_be(lengths, cp, layout, waves):
    layout = SequenceLayout(layout)
    for rank in range(cp):
        for wave in route(lengths, cp, rank, layout, CPU, waves):
            for peer, fragments in enumerate(wave.fragments):
                covered = []
                for one in fragments:
                    assert one.local == len(covered) and one.tokens > 0
                    assert not covered or one.sequence != covered[-1] + 1, "two fragments are one"
                    covered += range(one.sequence, one.sequence + one.tokens)
                assert covered == local_indices(lengths, cp, peer, layout)[wave.tokens].tolist()


def test_a_long_sequence_needs_two_messages_per_peer_and_documents_two_each():
    def most(lengths, layout=SequenceLayout.ZIGZAG):
        (wave,) = route(lengths, 4, 0, layout, CPU)
        return max(len(held) for held in wave.fragments)

    assert most((1024,)) == 2
    assert most((64, 32, 128)) == 6
    assert most((64, 32, 128), SequenceLayout.CONTIGUOUS) == 1
    assert most((64, 32, 128), SequenceLayout.ZIGZAG_BUFFER) == 2


def test_every_rank_finds_the_same_mean_fragment():
    """Ranks have different numbers of fragments: the last one's two are neighbours."""
    waves = [route((64,) * 3, 4, rank, SequenceLayout.ZIGZAG, CPU)[0] for rank in range(4)]
    assert [len(held) for held in waves[0].fragments] == [4, 6, 6, 3]
    assert {wave.mean_fragment for wave in waves} == {8.0}


def test_a_route_is_built_once_for_the_same_values():
    def built():
        return route((16, 32), 2, 1, SequenceLayout.ZIGZAG, CPU)

    assert built() is built()


def test_stretches_are_runs_of_neighbours():
    assert stretches(torch.tensor([3, 4, 9, 1, 2])) == [(3, 2), (9, 1), (1, 2)]
    assert stretches(torch.zeros(0, dtype=torch.int64)) == []


EVEN = HeadShares.even(4, (12, 4, 40))
COPIED = HeadShares(4, (6, 6, 24, 8), (2, 2, 1, 1))
ALL_COPIED = HeadShares(4, (5, 8), (4, 1))
each_share = pytest.mark.parametrize("shares", [EVEN, COPIED, ALL_COPIED])


def columns_of(shares: HeadShares, rank: int) -> list[int]:
    """By the definition: blocks of equal width, rank r holds block r // copies."""
    held, start = [], 0
    for section, copies in zip(shares.sections, shares.copies, strict=True):
        blocks = torch.arange(start, start + section).chunk(shares.ranks // copies)
        held += blocks[rank // copies].tolist()
        start += section
    return held


@each_share
def test_blocks_are_the_definition(shares):
    for rank in range(shares.ranks):
        blocks = shares.blocks(rank)
        whole = [c for p in blocks for c in range(p.columns.start, p.columns.stop)]
        own = [c for p in blocks for c in range(p.own_columns.start, p.own_columns.stop)]
        assert whole == columns_of(shares, rank)
        assert own == list(range(shares.own_width))
        assert len(whole) == shares.own_width
    assert sum(shares.sections) == shares.whole_width


@each_share
@pytest.mark.parametrize("most", [1, 4, 1024])
def test_strips_cover_every_block_once(shares, most):
    for rank in range(shares.ranks):
        whole, own = [], []
        for strip in strips(shares, most):
            assert strip.block <= most and strip.block & (strip.block - 1) == 0
            start = strip.whole + rank // strip.copies * strip.step
            whole += range(start, start + strip.block * strip.repeats)
            own += range(strip.own, strip.own + strip.block * strip.repeats)
        assert whole == columns_of(shares, rank) and own == list(range(shares.own_width))


def test_alignment_is_the_power_of_two_in_all_strides():
    assert alignment(48, 96) == 16 and alignment(24, 0) == 8 and alignment(7, 16) == 1


@each_share
def test_the_twin_packs_by_the_definition_and_unpacks_sums(shares):
    torch.manual_seed(0)
    s, B, rank = 3, 2, 1
    whole = torch.randn(s, B, shares.whole_width, dtype=torch.float64)
    place = torch.tensor([7, 0, 11])
    messages = torch.full((shares.ranks - 1, s, B, shares.own_width), torch.nan).double()
    full = torch.full((4 * s, B, shares.own_width), torch.nan).double()
    pack_torch.pack_peers(whole, messages, shares, rank)
    pack_torch.pack_own(whole, full, shares, rank, place)
    held = {peer: whole[..., columns_of(shares, peer)] for peer in range(shares.ranks)}
    for message, peer in zip(messages, shares.peers(rank), strict=True):
        assert torch.equal(message, held[peer])
    assert torch.equal(full[place], held[rank])
    assert full[[t for t in range(4 * s) if t not in place]].isnan().all()

    back = torch.full_like(whole, torch.nan)
    pack_torch.unpack_own(full, back, shares, rank, place)
    pack_torch.unpack_peers(messages, full, back, shares, rank, place)
    times = torch.zeros(shares.whole_width, dtype=torch.float64)
    for peer in range(shares.ranks):
        times[columns_of(shares, peer)] += 1
    torch.testing.assert_close(back, whole * times, rtol=1e-15, atol=0)
