import pytest

from tests.ranks import RankPool


@pytest.fixture(scope="session")
def pools():
    """One pool of gloo ranks per world size, started when first asked for."""
    made: dict[int, RankPool] = {}

    def pool(size: int) -> RankPool:
        if size not in made:
            made[size] = RankPool(size)
        return made[size]

    yield pool
    for one in made.values():
        one.stop()
