"""Nothing orders two CUDA streams, so a table that one of them made is not read on another."""

import pytest

from tests.distributed import stream_laws as laws


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("cp", "mode"), [(1, "auto"), (2, "headwise"), (2, "chunkwise")])
def test_tables_belong_to_a_stream(pools, cp, mode, packed):
    pools(cp).run(laws.tables_belong_to_a_stream, cp, mode, packed)
