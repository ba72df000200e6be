"""``pretrain_hybrid.py --optimizer muon`` of a Megatron-LM clone, over two data-parallel ranks."""

import pytest

from tests.launches.launching import in_a_clone, losses
from tests.launches.test_switching import SPEC, rounding, trained

pytest.importorskip("emerging_optimizers", reason="Megatron's Muon needs emerging-optimizers")
pytestmark = in_a_clone


@pytest.mark.parametrize("layer", SPEC)
def test_an_optimizer_that_ranks_share_takes_the_steps_of_one_on_each(layer):
    """The shares have different sizes, and with our layer different dtypes."""
    alone, shared = (
        losses(trained(layer, 4, f"--bf16 --optimizer muon {flag}"))
        for flag in ("", "--use-distributed-optimizer")
    )
    assert len(alone) == 4 and shared == pytest.approx(alone, rel=rounding("--bf16"))
