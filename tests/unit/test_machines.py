"""How many successive ranks of a group lie on one machine."""

import math

import pytest
import torch

from megatron_gdn.context_parallel.machines import (
    check_ranks_per_machine,
    ranks_per_machine,
    stretch,
)

META = torch.device("meta")


class Group:
    """Nothing is sent over it: rows on the meta device have no values."""

    def __init__(self, size: int) -> None:
        self.size = lambda: size


@pytest.mark.parametrize(
    ("machines", "ranks"),
    [("aaaa", 4), ("aabb", 2), ("aaaabb", 2), ("aaaaaaaabbbb", 4), ("aab", 1), ("abab", 1)],
)
def test_no_stretch_of_ranks_is_on_two_machines(machines, ranks):
    assert stretch(machines) == ranks
    for first in range(0, len(machines), ranks):
        assert len(set(machines[first : first + ranks])) == 1


@pytest.mark.parametrize("size", range(1, 17))
def test_what_is_told_may_be_more_than_the_ranks_and_need_not_divide_them(size):
    for told in range(1, 20):
        expected = size if told >= size else math.gcd(told, size)
        assert ranks_per_machine(Group(size), told, META) == expected


def test_without_values_nothing_is_sent():
    assert ranks_per_machine(Group(6), None, META) == 6


@pytest.mark.parametrize("told", [0, -8, 8.0, "8", True])
def test_what_is_no_number_of_ranks_is_refused(told):
    with pytest.raises(ValueError, match="cp_ranks_per_machine=.*integer of at least 1"):
        check_ranks_per_machine(told)
