import pytest

from tests.ranks import RankPool


@pytest.fixture(scope="session")
def pools():
    """One pool of gloo ranks per world size, started when first asked for."""
    made: dict[int, RankPool] = {}
    busy: list[int] = []

    def pool(size: int) -> RankPool:
        if busy and busy != [size]:
            from tests.parallel import end_groups

            made[busy.pop()].run(end_groups)  # their threads wake up even when nobody calls
        busy[:] = [size]
        if size not in made:
            made[size] = RankPool(size)
        return made[size]

    yield pool
    for one in made.values():
        one.stop()
