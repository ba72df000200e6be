"""The history of documents in fixed buffers: which rows arrive, and where their gradients go."""

import pytest
import torch

from megatron_gdn.context_parallel import local_indices
from megatron_gdn.context_parallel.chunkwise.static_history import static_history_route
from megatron_gdn.ops import StaticDocuments

UNITS = 24  # tokens of the buffer, in the smallest documents that zigzag can cut
FILLS = ((24,), (1,) * 8 + (16,), (2, 0, 3, 1, 18), (5, 1, 1, 17), (0, 0, 23, 1))


def exchanged(rows: list, counts: list) -> list[torch.Tensor]:
    """What each rank receives if rank r sends ``counts[r][t]`` of its rows to rank t."""
    sent = [x.split(list(n)) for x, n in zip(rows, counts, strict=True)]
    return [torch.cat([of[t] for of in sent]) for t in range(len(rows))]


@pytest.mark.parametrize("cp", [2, 3, 4, 8])
@pytest.mark.parametrize("taps", [2, 3, 4, 6])
def test_every_piece_gets_the_rows_before_it_and_their_gradients_return(cp, taps):
    reach, unit = taps - 1, 2 * cp
    documents = StaticDocuments(UNITS * unit, 9)
    routes = [static_history_route(documents, cp, rank, taps) for rank in range(cp)]
    sends = [route.send_counts for route in routes]
    receives = [route.receive_counts for route in routes]
    assert [list(x) for x in zip(*sends, strict=True)] == [list(x) for x in receives]
    make = torch.Generator().manual_seed(cp * taps)
    for fill in FILLS:
        lengths = [units * unit for units in fill]
        ends = torch.tensor(lengths).cumsum(0)
        documents.fill([0, *ends.tolist()])
        tokens = [local_indices(lengths, cp, rank) for rank in range(cp)]
        rows = [x[route.send_rows] for x, route in zip(tokens, routes, strict=True)]
        arrived = exchanged(rows, sends)
        expected = torch.zeros(UNITS * unit, dtype=torch.int64)
        redone_of, d_histories = [], []
        for mine, route, history in zip(tokens, routes, arrived, strict=True):
            d_history, redone = torch.zeros_like(history), []
            for first, count, *before in route.table.pieces.tolist():
                grads = torch.randint(1, 99, (reach,), generator=make).tolist()
                redone += grads
                if not count:
                    assert before == [-1] * reach
                    continue
                start = mine[first].item()
                document = int((ends <= start).sum())
                begin = int(ends[document]) - lengths[document]
                assert count == min(reach, lengths[document] // (2 * cp))
                expected.index_add_(0, mine[first : first + count], torch.tensor(grads[:count]))
                for age, row in enumerate(before, 1):
                    assert (row >= 0) == (start - age >= begin)
                    if row >= 0:
                        assert history[row] == start - age
                        grad = int(torch.randint(1, 99, (), generator=make))
                        d_history[row] += grad
                        expected[start - age] += grad
            redone_of.append(torch.tensor(redone))
            d_histories.append(d_history)
        returned = exchanged(d_histories, receives)
        found = torch.zeros_like(expected)
        for mine, route, redone, back in zip(tokens, routes, redone_of, returned, strict=True):
            sources = torch.cat([redone, back, torch.zeros(1, dtype=torch.int64)])
            lines = route.table.additions.long()
            there = lines[lines[:, 0] >= 0]
            assert len(there[:, 0].unique()) == len(there)
            found[mine[there[:, 0]]] += sources[there[:, 1:]].sum(1)
        assert torch.equal(found, expected)
