"""Routes of the head exchange: pure tables, checked against the definition of the layouts."""

import pytest
import torch

from megatron_gdn.context_parallel import SequenceLayout, local_indices
from megatron_gdn.context_parallel.headwise.route import fragments_of, route

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
                    here, there = one.locally, one.in_sequence
                    assert here.start == len(covered) and here.stop > here.start
                    assert here.stop - here.start == there.stop - there.start
                    assert not covered or there.start != covered[-1] + 1, "two fragments are one"
                    covered += range(there.start, there.stop)
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


def test_fragments_are_runs_of_neighbours():
    assert fragments_of(torch.tensor([3, 4, 9, 1, 2])) == (
        (slice(0, 2), slice(3, 5)), (slice(2, 3), slice(9, 10)), (slice(3, 5), slice(1, 3)),
    )  # fmt: skip
    assert fragments_of(torch.zeros(0, dtype=torch.int64)) == ()
