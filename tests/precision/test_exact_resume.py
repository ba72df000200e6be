"""Five steps, a checkpoint, five steps: the bits of ten steps in one go."""

import pytest

from tests.precision import exact_resume_laws as laws
from tests.precision.training import FLOAT16


@pytest.mark.parametrize("packed", [False, True], ids=["batch", "packed"])
@pytest.mark.parametrize("kind", [FLOAT16, "fully_reshardable"])
def test_a_resumed_run_has_the_bits_of_one_never_interrupted(pools, tmp_path, kind, packed):
    whole = pools(4).run(laws.train, kind, 2, 2, packed, None)
    resumed = pools(4).run(laws.train, kind, 2, 2, packed, str(tmp_path))
    laws.assert_same_run(whole, resumed)
