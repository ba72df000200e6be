"""Dynamo captures the projections and leaves what stands between them to run as it
is."""

import warnings

import pytest
import torch

from tests.distributed.layer_laws import (
    forward_backward,
    over_ranks,
    randomise_,
    require_same_bits,
    thd,
)
from tests.ranks import on_ranks

RECOMPUTE = {"recompute": "light"}
slow = pytest.mark.slow
nightly = pytest.mark.nightly
LENGTHS = (8, 24, 16)


@pytest.mark.parametrize(
    ("cp", "options", "packed"),
    [
        pytest.param(1, {}, False, id="one rank-batch", marks=slow),
        pytest.param(1, {}, True, id="one rank-packed", marks=slow),
        pytest.param(1, RECOMPUTE, False, id="recompute-batch", marks=nightly),
        pytest.param(1, RECOMPUTE, True, id="recompute-packed", marks=slow),
        pytest.param(
            2, {"linear_cp_mode": "headwise"}, False, id="headwise-batch", marks=nightly
        ),
        pytest.param(
            2, {"linear_cp_mode": "headwise"}, True, id="headwise-packed", marks=nightly
        ),
        pytest.param(
            2,
            {"linear_cp_mode": "chunkwise"},
            False,
            id="chunkwise-batch",
            marks=nightly,
        ),
        pytest.param(
            2, {"linear_cp_mode": "chunkwise"}, True, id="chunkwise-packed", marks=slow
        ),
    ],
)
@on_ranks(cp="cp")
def test_a_compiled_layer_equals_the_layer(cp, options, packed):
    """Output and every gradient, bit for bit, and twice, without a warning of
    Dynamo."""
    layer = over_ranks(**options)
    randomise_(layer)
    x = torch.randn(sum(LENGTHS) // cp, 1, 24)
    params = thd(LENGTHS) if packed else None
    expected = forward_backward(layer, x, params)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch._dynamo.utils.warn_once_cache.clear()
    # "eager" runs what Dynamo captured with torch's own kernels: no bit may differ.
    compiled = torch.compile(layer, backend="eager")
    try:
        with (
            torch.compiler.set_stance("default"),
            warnings.catch_warnings(record=True) as warned,
        ):
            warnings.simplefilter("always")
            for _ in range(2):
                found = forward_backward(layer, x, params, run=compiled)
                require_same_bits(found, expected)
        assert not [one for one in warned if "ops/autograd.py" in str(one.message)]
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0, (
            "nothing captured"
        )
    finally:
        torch._dynamo.reset()
