"""Five steps, a checkpoint, five steps: the bits of ten steps in one go."""

import pytest

from tests.precision import exact_resume_laws as laws
from tests.precision.training import FLOAT16


@pytest.mark.parametrize("packed", [False, True], ids=["batch", "packed"])
@pytest.mark.parametrize("kind", [FLOAT16, "fully_reshardable"])
def test_a_resumed_run_has_the_bits_of_one_never_interrupted(pools, tmp_path, kind, packed):
    whole = pools(4).run(laws.train, kind, 2, 2, packed, None, {})
    resumed = pools(4).run(laws.train, kind, 2, 2, packed, str(tmp_path), {})
    for rank, ((losses, bits), (losses_again, bits_again)) in enumerate(
        zip(whole, resumed, strict=True)
    ):
        assert losses_again == losses and len(set(losses)) == laws.STEPS
        assert bits_again == bits, rank
        assert sum("exp_avg_sq" in name for name in bits) > 10
