"""The launches of the pages run as far as megatron-core's wheel has them; the scripts run in
tests/launches."""

import math

import pytest

from tests.examples import launch_laws as laws
from tests.examples.commands import changed_lines, launches_of
from tests.examples.launching import ROOT

HYBRID = ["GatedDeltaNet"] * 3 + ["TorchSelfAttention"]


@pytest.mark.slow
@pytest.mark.parametrize("script", ["pretrain_hybrid.py", "pretrain_gpt.py"])
def test_a_launch_is_parsed_built_and_trained(pools, script):
    for mixers, loss, missing in pools(2).run(laws.launch, script, launches_of(ROOT)[script]):
        assert [name for name in mixers if name != "IdentityOp"] == HYBRID * 2
        # An untrained model knows nothing of 256 tokens.
        assert loss == pytest.approx(math.log(256), rel=0.1) and missing == 0


def test_the_lines_that_change_are_those_of_the_launches():
    hybrid, gpt = changed_lines(ROOT)
    for script, flags in (("pretrain_hybrid.py", hybrid), ("pretrain_gpt.py", gpt)):
        whole = launches_of(ROOT)[script]
        assert flags == whole[: len(flags)]
