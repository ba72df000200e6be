"""Shares of heads, and the plain-torch packing, against their definition."""

import pytest
import torch

from megatron_gdn.context_parallel.headwise import pack_torch
from megatron_gdn.context_parallel.headwise.shares import HeadShares, alignment, strips

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
