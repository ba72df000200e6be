"""Gated DeltaProduct beside Megatron main's own layer, whose rule runs token by
token."""

import os

import pytest

from tests.launches.launching import CLONE, PATIENCE_S
from tests.processes import ROOT, python

BEHIND = "GDP_BEHIND_MEGATRON_LM"  # set in a process whose Megatron is the clone's
LAWS = "tests/distributed/test_upstream_gdp.py"


@pytest.mark.slow
@pytest.mark.skipif(
    CLONE is None, reason="MEGATRON_LM=folder names a clone of Megatron-LM"
)
@pytest.mark.skipif(BEHIND in os.environ, reason="runs below")
def test_checkpoints_outputs_and_gradients_are_those_of_megatrons_layer():
    assert CLONE is not None
    if not os.path.exists(f"{CLONE}/megatron/core/ssm/gated_delta_product.py"):
        pytest.skip("this branch has no Gated DeltaProduct")
    environment = {
        "PYTHONPATH": f"{ROOT}:{CLONE}",
        BEHIND: "1",
        "TORCHDYNAMO_DISABLE": "1",
    }
    command = "-m", "pytest", "-q", "-x", "-m", "not nightly", LAWS
    done = python(*command, timeout=PATIENCE_S, **environment)
    assert "......" in done.stdout, done.stdout[-4000:]
