"""The head exchange: its tables, shares and packing by definition, and around another mixer."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from megatron_gdn import Documents
from megatron_gdn.context_parallel import MambaContextParallel, SequenceLayout, local_indices
from megatron_gdn.context_parallel.headwise import pack_torch
from megatron_gdn.context_parallel.headwise.route import fragments_of, route
from megatron_gdn.context_parallel.headwise.shares import HeadShares, alignment, strips

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


def route_of(lengths, *where):
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    return route(Documents.from_cu_seqlens(offsets, sum(lengths)), *where)


@cases
@waves_of
def test_waves_cut_every_ranks_tokens_in_order(lengths, cp, layout, waves):
    layout = SequenceLayout(layout)
    for rank in range(cp):
        held = local_indices(lengths, cp, rank, layout)
        others = [local_indices(lengths, cp, r, layout) for r in range(cp) if r != rank]
        made = route_of(lengths, cp, rank, layout, waves)
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
        for wave in route_of(lengths, cp, rank, layout, waves):
            for peer, fragments in enumerate(wave.fragments):
                covered = []
                for one in fragments:
                    here, there = one.locally, one.in_sequence
                    assert here.start == len(covered) and here.stop > here.start
                    assert here.stop - here.start == there.stop - there.start
                    assert not covered or there.start != covered[-1] + 1, "two fragments are one"
                    covered += range(there.start, there.stop)
                assert covered == local_indices(lengths, cp, peer, layout)[wave.tokens].tolist()


def test_a_long_sequence_needs_two_messages_per_peer_and_documents_two_each():
    def most(lengths, layout=SequenceLayout.ZIGZAG):
        (wave,) = route_of(lengths, 4, 0, layout)
        return max(len(held) for held in wave.fragments)

    assert most((1024,)) == 2
    assert most((64, 32, 128)) == 6
    assert most((64, 32, 128), SequenceLayout.CONTIGUOUS) == 1
    assert most((64, 32, 128), SequenceLayout.ZIGZAG_BUFFER) == 2


def test_every_rank_finds_the_same_mean_fragment():
    """Ranks have different numbers of fragments: the last one's two are neighbours."""
    waves = [route_of((64,) * 3, 4, rank, SequenceLayout.ZIGZAG)[0] for rank in range(4)]
    assert [len(held) for held in waves[0].fragments] == [4, 6, 6, 3]
    assert {wave.mean_fragment for wave in waves} == {8.0}


def test_a_route_is_built_once_for_the_same_values():
    def built():
        return route_of((16, 32), 2, 1, SequenceLayout.ZIGZAG)

    assert built() is built()


def test_fragments_are_runs_of_neighbours():
    assert fragments_of(torch.tensor([3, 4, 9, 1, 2])) == (
        (slice(0, 2), slice(3, 5)), (slice(2, 3), slice(9, 10)), (slice(3, 5), slice(1, 3)),
    )  # fmt: skip
    assert fragments_of(torch.zeros(0, dtype=torch.int64)) == ()


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
        assert own == list(range(shares.rank_width))
        assert len(whole) == shares.rank_width
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
        assert whole == columns_of(shares, rank) and own == list(range(shares.rank_width))


def test_alignment_is_the_power_of_two_in_all_strides():
    assert alignment(48, 96) == 16 and alignment(24, 0) == 8 and alignment(7, 16) == 1


@each_share
def test_the_twin_packs_by_the_definition_and_unpacks_sums(shares):
    torch.manual_seed(0)
    s, B, rank = 3, 2, 1
    whole = torch.randn(s, B, shares.whole_width, dtype=torch.float64)
    place = torch.tensor([7, 0, 11])
    messages = torch.full((shares.ranks - 1, s, B, shares.rank_width), torch.nan).double()
    full = torch.full((4 * s, B, shares.rank_width), torch.nan).double()
    pack_torch.pack_peers(whole, messages, shares, rank)
    pack_torch.move_own(whole, full, shares, rank, place, to_full=True)
    held = {peer: whole[..., columns_of(shares, peer)] for peer in range(shares.ranks)}
    for message, peer in zip(messages, shares.peers(rank), strict=True):
        assert torch.equal(message, held[peer])
    assert torch.equal(full[place], held[rank])
    assert full[[t for t in range(4 * s) if t not in place]].isnan().all()

    back = torch.full_like(whole, torch.nan)
    pack_torch.move_own(back, full, shares, rank, place, to_full=False)
    pack_torch.unpack_peers(messages, full, back, shares, rank, place)
    times = torch.zeros(shares.whole_width, dtype=torch.float64)
    for peer in range(shares.ranks):
        times[columns_of(shares, peer)] += 1
    torch.testing.assert_close(back, whole * times, rtol=1e-15, atol=0)


STATE, DIM, TAPS = 3, 2, 4


class Owner(nn.Module):
    def __init__(self, heads: int, groups: int, bias: bool = True) -> None:
        super().__init__()
        channels = heads * DIM + 2 * groups * STATE
        self.conv1d = nn.Conv1d(channels, channels, TAPS, groups=channels, bias=bias)
        self.dt_bias, self.A_log, self.D = (nn.Parameter(torch.randn(heads)) for _ in range(3))


def adapter(heads, groups, ranks, place=0, **options):
    owner = Owner(heads, groups, **options)
    group = SimpleNamespace(size=lambda: ranks, rank=lambda: place)
    return MambaContextParallel(group, heads, DIM, groups, STATE, owner), owner


@pytest.mark.parametrize(
    ("sizes", "local"),
    [
        ((8, 8, 2), (4, 4, 1)), ((8, 8, 4), (2, 2, 1)), ((16, 8, 4), (4, 2, 1)),
        ((8, 1, 2), (4, 1, 2)), ((8, 2, 4), (2, 1, 2)), ((16, 1, 4), (4, 1, 4)),
        ((8, 2, 1), (8, 2, 1)),
    ],
)  # fmt: skip
def test_heads_groups_and_copies_of_a_rank(sizes, local):
    cp, _ = adapter(*sizes)
    assert (cp.num_heads_local, cp.n_groups_local, cp.group_repeat_count) == local
    assert (cp.d_inner, cp.d_inner_local) == (sizes[0] * DIM, local[0] * DIM)


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ((6, 2, 4), "cannot share the 6 head heads and 2 group heads .* use one of 1, 2, 6"),
        ((12, 3, 4), "use one of 1, 3, 6, 12"),
        ((12, 6, 4), "use one of 1, 2, 3, 6, 12"),
        ((7, 2, 1), "num_heads=7 is not a multiple of n_groups=2"),
    ],
)
def test_what_cannot_be_shared_is_refused_with_what_can(sizes, said):
    with pytest.raises(ValueError, match=said):
        adapter(*sizes)


@pytest.mark.parametrize(("heads", "groups", "ranks"), [(8, 8, 4), (8, 2, 4), (16, 1, 4)])
def test_parameters_are_read_when_asked_for_and_shared_by_section(heads, groups, ranks):
    inner, copies = heads * DIM, max(1, ranks // groups)
    for place in range(ranks):
        cp, owner = adapter(heads, groups, ranks, place)
        x, B, C = torch.arange(len(owner.conv1d.bias)).split([inner] + 2 * [groups * STATE])
        of_groups = [s.chunk(ranks // copies)[place // copies] for s in (B, C)]
        rows = torch.cat([x.chunk(ranks)[place], *of_groups])
        assert torch.equal(cp.get_conv1d_weight(), owner.conv1d.weight[rows, 0])
        assert torch.equal(cp.get_conv1d_bias(), owner.conv1d.bias[rows])
        first = place * heads // ranks
        for name in ("dt_bias", "A_log", "D"):
            share, whole = getattr(cp, f"get_{name}")(), getattr(owner, name)
            assert torch.equal(share, whole.chunk(ranks)[place])
            assert share.data_ptr() == whole[first:].data_ptr()
            gathered = torch.randn(heads)
            got = getattr(cp, f"get_{name}")(gathered)
            assert got.data_ptr() == gathered[first:].data_ptr()
        owner.D = nn.Parameter(torch.full((heads,), 5.0))
        assert cp.get_D().eq(5).all()
        (cp.get_conv1d_weight().sum() + cp.get_A_log().sum()).backward()
        assert owner.conv1d.weight.grad[:, 0, 0].nonzero().flatten().equal(rows.sort()[0])
        assert owner.A_log.grad.sum() == heads // ranks


def test_one_rank_gets_the_very_tensors():
    cp, owner = adapter(8, 2, 1, bias=False)
    x = torch.randn(2, 5, 9)
    assert cp.pre_conv_ssm(x) is x and cp.post_conv_ssm(x) is x
    assert cp.get_A_log() is owner.A_log and cp.get_conv1d_bias() is None
    assert cp.get_conv1d_weight().shape == (len(owner.conv1d.weight), TAPS)
    assert not isinstance(cp, nn.Module)
