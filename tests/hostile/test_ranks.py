"""Ranks of a context-parallel group that send what they should not."""

import os
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from megatron_gdn.context_parallel import agreement
from megatron_gdn.context_parallel.layouts import SequenceLayout
from tests.distributed.layer_laws import over_ranks
from tests.ranks import on_ranks


def run(layer) -> None:
    layer(torch.zeros(8, 1, layer.hidden_size), None)


def refusal(layer) -> str:
    try:
        run(layer)
    except (ValueError, RuntimeError) as error:
        return str(error)
    raise AssertionError("accepted")


@on_ranks(cp=2)
def test_a_switch_on_one_rank_alone_is_told_by_all():
    """The rank that compares would wait without end for the one that does not."""
    layer = over_ranks()
    with patch.dict(os.environ, {agreement.CHECK_RANKS_VARIABLE: str(dist.get_rank())}):
        message = refusal(layer)
    assert (
        f"{agreement.CHECK_RANKS_VARIABLE} differs" in message
        and "0 on rank(s) 0 and" in message
    )
    run(layer)  # the ranks ask each other again


@on_ranks(cp=2)
def test_a_switch_on_all_ranks_compares_nothing():
    layer = over_ranks()
    with patch.dict(os.environ, {agreement.CHECK_RANKS_VARIABLE: "0"}):
        run(layer)
        with patch.object(agreement, "_gather", side_effect=AssertionError("compared")):
            run(layer)


@on_ranks(cp=2)
def test_numbers_that_name_no_layout_are_told():
    layer = over_ranks()
    gather = agreement._gather
    rank = dist.get_rank()
    for layout in (99, -1, 2**62):

        def faulty(numbers, *where, layout=layout):
            changed = (*numbers[:4], layout) if len(numbers) == 5 and rank else numbers
            return gather(changed, *where)

        with patch.object(agreement, "_gather", faulty):
            message = refusal(layer)
        assert f"an unknown layout {layout}" in message and "disagree" in message


def test_a_collective_that_fails_says_what_was_asked():
    """As between two versions of the package, one of which sends six numbers for
    five."""

    class Group:
        def size(self):
            return 2

    def fail(*_, **__):
        raise RuntimeError("op.preamble.length <= op.nbytes")

    told = pytest.raises(
        RuntimeError, match=r"exchange 5 numbers .*nbytes.*same version"
    )
    with patch.object(dist, "all_gather_into_tensor", fail), told:
        agreement._gather((1, 2, 3, 4, 5), Group(), torch.device("cpu"))


@pytest.mark.parametrize("layout", [*range(len(SequenceLayout)), 99, -1])
def test_every_row_of_numbers_has_words(layout):
    for count in (-2, -1, 0, 3, 2**62):
        assert agreement._describe(1, -5, count, 2**62, layout)
