import pytest

from tests.distributed import exchange_laws as laws

sizes = pytest.mark.parametrize("size", [2, 4])


@sizes
@pytest.mark.parametrize("balanced", [True, False], ids=["zigzag", "rank order"])
def test_cp2hp_gives_all_tokens_of_a_share_of_every_section(pools, size, balanced):
    pools(size).run(laws.cp2hp_gives_all_tokens_of_a_share_of_every_section, balanced)


@sizes
@pytest.mark.parametrize("sections", [None, laws.SECTIONS])
def test_hp2cp_is_the_inverse_of_cp2hp(pools, size, sections):
    pools(size).run(laws.hp2cp_is_the_inverse_of_cp2hp, sections)


@sizes
def test_parameter_shares_rebuild_the_parameter_and_its_gradient(pools, size):
    pools(size).run(laws.parameter_shares_rebuild_the_parameter_and_its_gradient)


def test_bad_exchanges_are_refused(pools):
    pools(2).run(laws.bad_exchanges_are_refused)
