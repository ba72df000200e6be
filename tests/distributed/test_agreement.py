"""Context-parallel ranks are given the same micro-batch, or told that they were not."""

from tests.distributed import agreement_laws as laws


def test_ranks_that_disagree_are_told_what_each_was_given(pools):
    pools(2).run(laws.ranks_that_disagree_are_told_what_each_was_given)


def test_ranks_that_disagree_about_sizes_or_packing_are_told_so(pools):
    pools(2).run(laws.ranks_that_disagree_about_sizes_or_packing_are_told_so)


def test_nobody_waits_alone_for_an_object_that_another_rank_has_resolved(pools):
    pools(2).run(laws.nobody_waits_alone_for_an_object_that_another_rank_has_resolved)


def test_one_layer_compares_and_knows_contents_that_it_has_seen(pools):
    pools(2).run(laws.one_layer_compares_and_knows_contents_that_it_has_seen)


def test_schemes_of_groups_that_went_are_not_kept(pools):
    """Sixteen groups are kept at a time, the layer's own (none) among them; each has one scheme."""
    alive = pools(2).run(laws.schemes_alive_while_groups_come_and_go, 20, 80)
    assert alive == [15, 15]
