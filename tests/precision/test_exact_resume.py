"""Five steps, a checkpoint, five steps: the bits of ten steps in one go."""

import pytest

from tests.precision import exact_resume_laws as laws
from tests.precision.training import FLOAT16


@pytest.mark.parametrize(
    ("kind", "mode", "packed"),
    [
        pytest.param(FLOAT16, "headwise", True, marks=pytest.mark.nightly),
        pytest.param(FLOAT16, "chunkwise", False, marks=pytest.mark.nightly),
        pytest.param("fully_reshardable", "headwise", False, marks=pytest.mark.nightly),
        pytest.param("fully_reshardable", "chunkwise", True, marks=pytest.mark.slow),
    ],
    ids=lambda value: {True: "packed", False: "batch"}.get(value, value),
)
def test_a_resumed_run_has_the_bits_of_one_never_interrupted(
    pools, tmp_path, kind, mode, packed
):
    whole = pools(4).run(laws.train, kind, 2, 2, mode, packed, None)
    resumed = pools(4).run(laws.train, kind, 2, 2, mode, packed, str(tmp_path))
    laws.assert_same_run(whole, resumed)
