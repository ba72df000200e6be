import pytest

from tests.distributed import exchange_laws as laws

sizes = pytest.mark.parametrize("size", [2, 4])
directly = pytest.mark.parametrize("direct", [True, False], ids=["runs", "second pass"])


@sizes
@pytest.mark.parametrize("balanced", [True, False], ids=["zigzag", "rank order"])
def test_cp2hp_gives_all_tokens_of_a_share_of_every_section(pools, size, balanced):
    pools(size).run(laws.cp2hp_gives_all_tokens_of_a_share_of_every_section, balanced)


@sizes
@pytest.mark.parametrize("sections", [None, laws.SECTIONS])
def test_hp2cp_is_the_inverse_of_cp2hp(pools, size, sections):
    pools(size).run(laws.hp2cp_is_the_inverse_of_cp2hp, sections)


@pytest.mark.parametrize("sections", [None, laws.SECTIONS])
def test_the_all_to_alls_are_upstreams(pools, sections):
    pools(2).run(laws.the_all_to_alls_are_upstreams, sections)


@sizes
def test_parameter_shares_rebuild_the_parameter_and_its_gradient(pools, size):
    pools(size).run(laws.parameter_shares_rebuild_the_parameter_and_its_gradient)


def test_bad_exchanges_are_refused(pools):
    pools(2).run(laws.bad_exchanges_are_refused)


@directly
@sizes
@pytest.mark.parametrize("waves", [1, 2])
@pytest.mark.parametrize("batch", [1, 2, 3])
@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
def test_open_gives_every_rank_its_heads(pools, size, layout, batch, waves, direct):
    pools(size).run(laws.open_gives_every_rank_its_heads, layout, "dense", batch, waves, direct)


@directly
@sizes
@pytest.mark.parametrize("waves", [1, 3])
@pytest.mark.parametrize("layout", ["zigzag", "zigzag_buffer", "contiguous"])
def test_open_gives_every_rank_its_heads_of_unequal_documents(pools, size, layout, waves, direct):
    pools(size).run(laws.open_gives_every_rank_its_heads, layout, "unequal", 1, waves, direct)


@directly
@pytest.mark.parametrize("packed", ["dense", "unequal"])
@pytest.mark.parametrize("heads", [(1, 4), (2, 4), (2, 8), (4, 4)], ids=str)
def test_key_heads_fewer_than_ranks_are_replicated(pools, packed, heads, direct):
    pools(4).run(
        laws.open_gives_every_rank_its_heads, "zigzag", packed, 1, 2, direct,
        num_key_heads=heads[0], num_value_heads=heads[1],
    )  # fmt: skip


@directly
@pytest.mark.parametrize("lengths", [None, (8, 0, 24, 16)], ids=["batch", "packed"])
@pytest.mark.parametrize(("tp", "cp"), [(2, 2), (1, 4)])
def test_the_layer_equals_one_rank_whichever_way_rows_travel(pools, tp, cp, lengths, direct):
    pools(4).run(
        laws.layer_equals_one_rank, 2, direct, tp, cp, lengths=lengths,
        changes={"linear_num_key_heads": 2},
    )  # fmt: skip


@sizes
def test_sums_over_copies_are_rounded_once_in_the_order_of_ranks(pools, size):
    pools(size).run(laws.sums_over_copies_are_rounded_once_in_the_order_of_ranks)


@sizes
def test_shared_key_heads_have_their_rows_on_every_rank_that_uses_them(pools, size):
    pools(size).run(laws.shared_key_heads_have_their_rows_on_every_rank_that_uses_them)


def test_the_second_derivative_goes_through(pools):
    pools(2).run(laws.the_second_derivative_goes_through)


def test_the_second_derivative_of_moved_rows_goes_through(pools):
    pools(2).run(laws.the_second_derivative_of_moved_rows_goes_through)


def test_head_counts_that_cannot_be_shared_are_refused(pools):
    pools(2).run(laws.head_counts_that_cannot_be_shared_are_refused)
