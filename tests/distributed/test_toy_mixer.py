"""A mixer built from the base alone: what is its own beside the laws of every mixer."""

import torch

from megatron_gdn.ops.documents import Documents
from megatron_gdn.ops.state_maps.state_map import StateMap
from tests.toy_mixer import RULE, G, H, Inputs, K, V


def inputs_of(B: int, S: int) -> Inputs:
    torch.manual_seed(0)
    q, k, v, g = (
        torch.randn(B, S, *s, dtype=torch.float64) for s in ((G, K), (G, K), (H, V), (H,))
    )
    return Inputs(q, k, v, -g.abs())


def test_states_go_in_and_out():
    """Two halves with the state between them are the whole; a map says what a half does to it."""
    whole = inputs_of(2, 21)
    halves = [Inputs(*x) for x in zip(*(x.split([8, 13], dim=1) for x in whole), strict=True)]
    first = RULE.begin(halves[0], None).run(final=True)
    second = RULE.begin(halves[1], None).run(first.final, final=True)
    both = RULE.begin(whole, None).run(final=True)
    torch.testing.assert_close(torch.cat([first.o, second.o], dim=1), both.o)
    torch.testing.assert_close(second.final, both.final)
    maps = [RULE.begin(half, None).state_map() for half in halves]
    assert maps[1].is_diagonal
    torch.testing.assert_close(maps[1].apply(first.final), both.final)
    joined = maps[0].then(maps[1])
    torch.testing.assert_close(joined, StateMap(*RULE.begin(whole, None).state_map()))


def test_documents_of_several_rows_lie_end_to_end():
    rows, lengths = inputs_of(2, 10), (4, 6, 7, 3)
    documents = Documents((0, 4, 10, 17, 20), torch.device("cpu"))
    flat = Inputs(*(x.flatten(0, 1)[None] for x in rows))
    apart = [RULE.begin(Inputs(*x), None).run().o for x in
             zip(*(x.split(lengths, dim=1) for x in flat), strict=True)]  # fmt: skip
    o = RULE.begin(rows, documents).run().o
    torch.testing.assert_close(o.flatten(0, 1)[None], torch.cat(apart, dim=1))
