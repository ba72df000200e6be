"""Sequences cut into segments, documents in fixed buffers: where cuts lie, how maps
chain."""

from itertools import pairwise

import pytest
import torch

from megatron_gdn.ops import Documents, StaticDocuments
from megatron_gdn.ops.delta_rule.base import RuleInputs
from megatron_gdn.ops.delta_rule.fla import segments_of
from megatron_gdn.ops.delta_rule.plain import PlainRule
from megatron_gdn.ops.state_maps.segments import (
    CHUNK,
    PROGRAMS_OF_A_FULL_GPU,
    Segments,
    compose,
    cut_by_length,
    entering_states,
    initial_gradients,
    leaving_gradients,
)
from tests.ops.delta_rule.states import Oracle, random_inputs, segments_at
from tests.whole_groups import whole_groups

CPU = torch.device("cpu")


def offsets_of(lengths):
    return torch.tensor([0, *lengths]).cumsum(0).tolist()


def segments_by_length(offsets, heads):
    """Offsets of segments, from what the cut promises; and the cut has them."""
    most = max(1, PROGRAMS_OF_A_FULL_GPU // heads)
    fewest = max(8, min(32, heads))
    wanted = []
    for start, end in pairwise(offsets):
        chunks = -(-(end - start) // CHUNK)
        step = max(-(-chunks // most), fewest) * CHUNK
        wanted += range(start, end, step)
    wanted.append(offsets[-1])
    assert (
        cut_by_length(Documents(tuple(offsets), CPU), heads).offsets.tolist() == wanted
    )
    return wanted


@pytest.mark.parametrize("heads", [1, 4, 32, 48, 64, 200])
@pytest.mark.parametrize("length", [1, 64, 4096, 4097, 8192, 32768, 100_001])
def test_the_cut_of_a_sequence_depends_on_its_length_alone(length, heads):
    alone = segments_by_length([0, length], heads)
    among = segments_by_length(offsets_of([9000, length, 1]), heads)
    assert [x - 9000 for x in among if 9000 <= x <= 9000 + length] == alone
    assert all((x - alone[0]) % CHUNK == 0 for x in alone[:-1])
    assert len(alone) - 1 <= max(1, PROGRAMS_OF_A_FULL_GPU // heads)


@pytest.mark.parametrize(("heads", "dim"), [(64, 128), (32, 256), (1, 128)])
def test_no_segment_that_fla_gets_is_longer_than_its_32_bit_offsets_reach(heads, dim):
    tokens = 2**22
    narrow, wide = (torch.empty(1).expand(1, tokens, heads, size) for size in (8, dim))
    by_length = segments_by_length([0, tokens], heads)[1]
    assert (by_length * heads * dim > 2**31) == (heads > 1), (
        "the cases that are and are not cut"
    )
    for k, v in ((narrow, wide), (wide, narrow)):
        offsets = segments_of(RuleInputs(k, k, v, None, None), None).offsets.tolist()
        step = offsets[1]
        assert offsets == [*range(0, tokens, step), tokens] and step % CHUNK == 0
        assert step * heads * dim <= 2**31
        # No shorter than it must be: a sequence that fits is cut as for the other
        # cores.
        assert step == by_length or (step + CHUNK) * heads * dim > 2**31


@pytest.mark.parametrize("default_device", ["cpu", "meta"])
def test_tables_of_segments(default_device):
    with torch.device(default_device):
        segments = segments_at([0, 1, 1000, 1128], [0, 1, 513, 1000, 1128])
    assert segments.first_segment.tolist() == [0, 1, 3, 4]
    assert segments.sequence_of_segment.tolist() == [0, 1, 1, 2]
    assert segments.begins_sequence.tolist() == [True, True, False, True]
    assert segments.ends_sequence.tolist() == [True, False, True, True]
    assert segments.chunk_counts.flatten().tolist() == [1, 8, 8, 2]
    assert segments.ends_inside_chunk.flatten().tolist() == [True, False, True, False]
    out = [-1, -1]
    none = -1
    assert segments.to_entering_states.table.tolist() == [
        [[0, none], out],
        [[1, 1], [2, none]],
        [[3, none], out],
    ]
    assert not segments.are_sequences


LENGTHS = {
    "uncut": [5, 1, 130],
    "cut": [64, 300, 1, 257],
    "one": [500],
    "many": [130] * 7 + [5],
}
CUTS = {
    "uncut": [0, 5, 6, 136],
    "cut": [0, 64, 128, 320, 364, 365, 429, 493, 557, 622],
    "one": [0, 64, 448, 500],
    "many": sorted([*range(0, 911, 130), *range(64, 910, 130), 915]),
}


@pytest.mark.parametrize("case", LENGTHS)
def test_the_maps_of_segments_chain_into_those_of_sequences(case):
    lengths = LENGTHS[case]
    cut = CUTS[case]
    segments = segments_at(offsets_of(lengths), cut)
    inputs, d_o = random_inputs(sum(lengths))
    whole = Oracle(inputs, lengths)
    pieces = Oracle(inputs, torch.tensor(cut).diff().tolist())
    local = pieces.forward()[1]
    through = pieces.through()

    for got, exact in zip(
        compose(local, through, segments),
        (whole.forward()[1], whole.through()),
        strict=True,
    ):
        torch.testing.assert_close(got, exact)

    make = torch.Generator().manual_seed(1)
    initial, d_final = (
        torch.randn(whole.zeros().shape, generator=make, dtype=torch.float64)
        for _ in range(2)
    )
    entering = entering_states(local, through, segments, initial)
    torch.testing.assert_close(pieces.forward(entering)[0], whole.forward(initial)[0])
    entering = entering_states(local, through, segments, None)
    torch.testing.assert_close(pieces.forward(entering)[0], whole.forward()[0])

    d_local = pieces.backward(d_o)[1]
    torch.testing.assert_close(
        initial_gradients(d_local, through, segments), whole.backward(d_o)[1]
    )
    for d_last in (None, d_final):
        leaving = leaving_gradients(d_local, through, segments, d_last)
        entering = entering_states(local, through, segments, initial)
        got = pieces.backward(d_o, entering, leaving)[0]
        for a, b in zip(got, whole.backward(d_o, initial, d_last)[0], strict=True):
            torch.testing.assert_close(a, b)


def random_offsets(tokens: int, most: int) -> list[int]:
    """Some on the grid of chunks, some equal, none or many."""
    between = torch.randint(tokens + 1, (int(torch.randint(most, ())),))
    on_grid = torch.rand(len(between)) < 0.5
    between = torch.where(on_grid, between // CHUNK * CHUNK, between)
    return [0, *between.sort().values.tolist(), tokens]


def chunks_of(offsets) -> list[list[int]]:
    pairs = enumerate(zip(offsets, offsets[1:], strict=False))
    return [
        [n, c] for n, (start, end) in pairs for c in range(-(-(end - start) // CHUNK))
    ]


@pytest.mark.parametrize(("tokens", "most"), [(1, 1), (130, 9), (3000, 3), (20000, 5)])
def test_positions_and_chunks_are_those_of_the_documents(tokens, most):
    static = StaticDocuments(tokens, most)
    for _ in range(10):
        offsets = random_offsets(tokens, most)
        documents = Documents(tuple(offsets), CPU)
        static.fill(offsets)
        filled = list(documents.filled_offsets)
        rest = [tokens] * (most + 2 - len(filled))
        assert static.cu_seqlens.tolist() == filled + rest
        assert torch.equal(static.position_T, documents.position_T)
        wanted = chunks_of(filled)
        places = static.chunks(CHUNK)
        assert places.offsets[-1] == len(wanted) <= len(places.indices)
        assert places.indices[: len(wanted)].tolist() == wanted
        assert (places.indices[len(wanted) :] == torch.tensor([most, 0])).all()


def test_the_worst_case_fills_all_chunks():
    static = StaticDocuments(8 * 65, 8)
    static.fill(range(0, 8 * 65 + 1, 65))
    places = static.chunks(CHUNK)
    assert places.offsets[-1] == len(places.indices) == 16


@pytest.mark.parametrize("heads", [2, 16, 32, 200])
def test_segments_are_those_that_the_host_cuts(heads):
    for tokens, most in ((8192, 6), (130, 9), (20000, 2)):
        static = StaticDocuments(tokens, most)
        segments = Segments.of(static, cut_by_length, heads)
        for _ in range(10):
            offsets = random_offsets(tokens, most)
            static.fill(offsets)
            filled = Documents(tuple(offsets), CPU).filled_offsets
            cut = segments_by_length(filled, heads)
            host = segments_at(filled, cut)
            n, N = len(cut) - 1, len(filled) - 1
            assert n < len(
                segments.sequence_of_segment
            )  # the last segment never has tokens
            assert (
                segments.offsets[: n + 1].tolist() == cut
                and (segments.offsets[n:] == tokens).all()
            )
            assert (
                torch.equal(segments.first_segment[: N + 1], host.first_segment)
                and (segments.first_segment[N:-1] == n).all()
            )
            assert segments.first_segment[-1] == len(segments.sequence_of_segment)
            assert (
                torch.equal(segments.sequence_of_segment[:n], host.sequence_of_segment)
                and (segments.sequence_of_segment[n:] == most).all()
            )
            assert torch.equal(segments.begins_sequence[:n], host.begins_sequence)
            assert (
                torch.equal(segments.ends_sequence[:n], host.ends_sequence)
                and segments.ends_sequence[n:].all()
            )
            wanted = chunks_of(cut)
            offsets, indices = segments.chunk_places
            assert offsets[-1] == len(wanted) <= len(indices)
            assert indices[: len(wanted)].tolist() == wanted


@pytest.mark.parametrize("at_once", [1, 3, 20])
def test_the_plain_rule_in_groups_of_chunks(at_once):
    """States are carried from group to group; a sequence may begin and end in any of
    them."""
    tokens = 330
    rule = PlainRule()
    inputs, d_o = random_inputs(tokens)
    inputs = RuleInputs(*(x.float() for x in inputs))
    d_o = d_o.float()
    static = StaticDocuments(tokens, 6)
    for offsets in ((0, 330), (0, 1, 2, 64, 150, 329, 330), (0, 0, 128, 128, 256, 330)):
        documents = Documents(offsets, CPU)
        static.fill(offsets)
        with whole_groups(4 * at_once):
            expected = rule.begin(inputs, documents).run(final=True)
            found = rule.begin(inputs, static).run(final=True)
            grads = [
                rule.begin_backward(d_o, inputs, output.saved, these).run()
                for output, these in ((found, static), (expected, documents))
            ]
        assert torch.equal(found.o, expected.o)
        assert torch.equal(
            found.final_states[: len(expected.final_states)], expected.final_states
        )
        assert not found.final_states[len(expected.final_states) :].any()
        for x, y in zip(*grads, strict=True):
            assert x is y is None or torch.equal(x, y)


def test_segments_are_cut_on_the_host_wherever_the_documents_are():
    """A table on meta, which stands for a GPU here, tells the host nothing."""
    offsets = (0, 100, 1000)
    there = Documents(offsets, torch.device("meta"))
    segments = Segments.of(there, cut_by_length, 4)
    here = Segments.of(Documents(offsets, CPU), cut_by_length, 4)
    assert segments.offsets.is_meta
    assert segments.to_final_states.chains == here.to_final_states.chains
