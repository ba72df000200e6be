"""Tables of documents in fixed buffers, against those that the host makes of the same documents."""

import pytest
import torch
import torch.nn.functional as F

from megatron_gdn.ops import Documents, StaticDocuments
from megatron_gdn.ops.delta_rule.base import RuleInputs
from megatron_gdn.ops.delta_rule.plain import PlainRule
from megatron_gdn.ops.state_maps.parts import CHUNK, Parts, parts_by_length, static_parts
from tests.whole_groups import whole_groups

CPU = torch.device("cpu")


def random_offsets(tokens: int, most: int) -> list[int]:
    """Some on the grid of chunks, some equal, none or many."""
    between = torch.randint(tokens + 1, (int(torch.randint(most, ())),))
    on_grid = torch.rand(len(between)) < 0.5
    between = torch.where(on_grid, between // CHUNK * CHUNK, between)
    return [0, *between.sort().values.tolist(), tokens]


def chunks_of(offsets) -> list[list[int]]:
    """The sequence of every chunk, and the chunk's number in it."""
    pairs = enumerate(zip(offsets, offsets[1:], strict=False))
    return [[n, c] for n, (start, end) in pairs for c in range(-(-(end - start) // CHUNK))]


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
def test_parts_are_those_that_the_host_cuts(heads):
    for tokens, most in ((8192, 6), (130, 9), (20000, 2)):
        static = StaticDocuments(tokens, most)
        parts = static_parts(static, heads)
        for _ in range(10):
            offsets = random_offsets(tokens, most)
            static.fill(offsets)
            filled = Documents(tuple(offsets), CPU).filled_offsets
            cut = parts_by_length(filled, heads)
            host = Parts.build(filled, cut, CPU)
            n, N = len(cut) - 1, len(filled) - 1
            assert n < len(parts.owner)  # the last part never has tokens
            assert parts.offsets[: n + 1].tolist() == cut and (parts.offsets[n:] == tokens).all()
            assert torch.equal(parts.first[: N + 1], host.first) and (parts.first[N:-1] == n).all()
            assert parts.first[-1] == len(parts.owner)
            assert torch.equal(parts.owner[:n], host.owner) and (parts.owner[n:] == most).all()
            assert torch.equal(parts.opens[:n], host.opens)
            assert torch.equal(parts.closes[:n], host.closes) and parts.closes[n:].all()
            wanted = chunks_of(cut)
            assert parts.chunk_offsets[-1] == len(wanted) <= len(parts.chunk_indices)
            assert parts.chunk_indices[: len(wanted)].tolist() == wanted


@pytest.mark.parametrize("at_once", [1, 5, 20])
def test_the_plain_rule_in_groups_of_chunks(at_once):
    """States are carried from group to group; a sequence may begin and end in any of them."""
    torch.manual_seed(0)
    tokens, rule = 700, PlainRule()
    q, k = (F.normalize(torch.randn(1, tokens, 2, 8), dim=-1) for _ in "qk")
    v, d_o = torch.randn(2, 1, tokens, 4, 8).unbind()
    inputs = RuleInputs(q, k, v, -torch.rand(1, tokens, 4), torch.rand(1, tokens, 4))
    static = StaticDocuments(tokens, 6)
    for offsets in ((0, 700), (0, 1, 2, 64, 300, 699, 700), (0, 0, 128, 128, 448, 700)):
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
        assert torch.equal(found.final[: len(expected.final)], expected.final)
        assert not found.final[len(expected.final) :].any()
        for x, y in zip(*grads, strict=True):
            assert x is y is None or torch.equal(x, y)
