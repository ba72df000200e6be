"""Gated DeltaNet-2, one layer on one rank: its recurrence written out, its first values."""

import pytest
import torch

from tests.distributed.mixer_laws import equals_written_out
from tests.gdn2.mixers import gdn2_config, whole_mixer, written_out

pytestmark = pytest.mark.usefixtures("one_rank")


@pytest.mark.parametrize("lengths", [None, (70, 0, 1, 66)], ids=["batch", "packed"])
@pytest.mark.parametrize(
    "options",
    [{}, {"conv_bias": True, "use_qk_l2norm": False}, {"recompute": "light"},
     {"recompute": "full"}],
    ids=["default", "options", "light", "full"],
)  # fmt: skip
def test_output_and_every_gradient_are_those_of_the_recurrence(options, lengths):
    mixer = whole_mixer(gdn2_config(params_dtype=torch.float64), **options)
    equals_written_out(mixer, written_out, lengths, tokens=40)
