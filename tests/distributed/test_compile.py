"""Dynamo captures the projections and leaves what stands between them to run as it is."""

import pytest

from tests.distributed.compile_laws import compiled_equals_eager

RECOMPUTE = {"recompute_qkv": True, "recompute_norm_out": True}
slow = pytest.mark.slow


@pytest.mark.parametrize(
    ("cp", "options", "packed"),
    [
        pytest.param(1, {}, False, id="one rank-batch"),
        pytest.param(1, {}, True, id="one rank-packed", marks=slow),
        pytest.param(1, RECOMPUTE, False, id="recompute-batch", marks=slow),
        pytest.param(1, RECOMPUTE, True, id="recompute-packed", marks=slow),
        pytest.param(2, {"linear_cp_mode": "headwise"}, False, id="headwise-batch", marks=slow),
        pytest.param(2, {"linear_cp_mode": "headwise"}, True, id="headwise-packed", marks=slow),
        pytest.param(2, {"linear_cp_mode": "chunkwise"}, False, id="chunkwise-batch", marks=slow),
        pytest.param(2, {"linear_cp_mode": "chunkwise"}, True, id="chunkwise-packed"),
    ],
)
def test_a_compiled_layer_equals_the_layer(pools, cp, options, packed):
    pools(cp).run(compiled_equals_eager, cp, packed, **options)
