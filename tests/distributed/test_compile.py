"""Dynamo captures the projections and leaves what stands between them to run as it is."""

import pytest

from tests.distributed.compile_laws import compiled_equals_eager

RECOMPUTE = {"recompute_qkv": True, "recompute_norm_out": True}


@pytest.mark.parametrize("packed", [False, True], ids=["batch", "packed"])
@pytest.mark.parametrize(
    ("cp", "options"),
    [
        (1, {}),
        pytest.param(1, RECOMPUTE, marks=pytest.mark.slow),
        pytest.param(2, {"linear_cp_mode": "headwise"}, marks=pytest.mark.slow),
        (2, {"linear_cp_mode": "chunkwise"}),
    ],
    ids=["one rank", "recompute", "headwise", "chunkwise"],
)
def test_a_compiled_layer_equals_the_layer(pools, cp, options, packed):
    pools(cp).run(compiled_equals_eager, cp, packed, **options)
