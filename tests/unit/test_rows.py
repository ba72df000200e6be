"""Rows by index and as even views are the same rows."""

import pytest
import torch

from megatron_gdn.ops.rows import (
    EvenRows,
    put,
    rows_at,
    stretches,
    take,
    zero,
)

CPU = torch.device("cpu")
CASES = {
    "none": [],
    "one run": [4, 5, 6],
    "two runs": [1, 2, 7, 8],
    "runs that touch": [0, 1, 2, 3],
    "three": [0, 3, 6],
    "backwards": [7, 8, 1, 2],
    "uneven": [0, 1, 4, 5, 6],
    "uneven steps": [0, 2, 5],
}
EVEN = {"one run", "two runs", "runs that touch", "three"}


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("case", CASES)
def test_even_rows_are_those_of_the_index(case, dim):
    index = torch.tensor(CASES[case], dtype=torch.int64)
    rows = rows_at(index, CPU)
    assert isinstance(rows, EvenRows) == (case in EVEN)
    x = torch.randn(10, 10, 6)[..., 1:4]  # not all that is stored
    assert torch.equal(take(x, rows, dim), x.index_select(dim, index))
    emptied = x.clone()
    zero(emptied, rows, dim)
    assert torch.equal(emptied, x.index_fill(dim, index, 0))

    other = torch.randn(10, 10, 3, dtype=torch.float64)
    for of in (None, *CASES.values()):
        if of is not None and len(of) != len(index):
            continue
        of = None if of is None else torch.tensor(of, dtype=torch.int64)
        y = other.narrow(dim, 0, len(index)) if of is None else other
        changed = x.clone()
        put(changed, rows, dim, y, None if of is None else rows_at(of, CPU))
        right = (y if of is None else other.index_select(dim, of)).float()
        assert torch.equal(changed, x.index_copy(dim, index, right))


def test_stretches_are_runs_of_neighbours():
    assert stretches(torch.tensor([3, 4, 9, 1, 2])) == [(3, 2), (9, 1), (1, 2)]
    assert stretches(torch.zeros(0, dtype=torch.int64)) == []
