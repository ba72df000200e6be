"""Padded batches over ranks; fp32 on gloo, tolerance as in ``test_layer_parallel``."""

import pytest

from tests.distributed.padding_laws import padded_batch_equals_one_rank


@pytest.mark.parametrize("mode", ["headwise", "chunkwise"])
@pytest.mark.parametrize("cp", [2, 4])
def test_a_padded_batch_over_ranks_equals_one_rank(pools, cp, mode):
    pools(cp).run(padded_batch_equals_one_rank, cp, mode)
