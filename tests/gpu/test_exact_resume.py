"""On one and two GPUs in bf16: a resumed run has the bits of one never interrupted."""

import os

import pytest
import torch

from tests.precision import exact_resume_laws as laws
from tests.precision.training import FLOAT16
from tests.ranks import RankPool

pytestmark = pytest.mark.gpu

# 16 key and 32 value heads of 128 on every rank: kernels that are likely compiled already.
HEADS = {
    "hidden_size": 256,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "use_cpu_initialization": False,
}
LENGTHS = (320, 960, 640)


@pytest.fixture(scope="module")
def gpus():
    """``gpus(n)``: a nccl world of n ranks, with the workspace that cuBLAS needs to repeat."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    made = {}

    def pool(size):
        if torch.cuda.device_count() < size:
            pytest.skip(f"needs {size} GPUs")
        if size not in made:
            for other in made.values():
                other.stop()
            made[size] = RankPool(size, backend="nccl")
        return made[size]

    yield pool
    for one in made.values():
        one.stop()


@pytest.mark.parametrize("packed", [False, True], ids=["batch", "packed"])
@pytest.mark.parametrize(
    ("kind", "tp", "cp"),
    [(FLOAT16, 1, 1), ("fully_reshardable", 1, 1), (FLOAT16, 2, 1), (FLOAT16, 1, 2)],
    ids=["float16", "distributed", "tp2", "cp2"],
)
def test_a_resumed_run_has_the_bits_of_one_never_interrupted(gpus, tmp_path, kind, tp, cp, packed):
    ranks = tp * cp
    sizes = {**HEADS, "linear_num_key_heads": 16 * ranks, "linear_num_value_heads": 32 * ranks}
    pool = gpus(ranks)
    whole = pool.run(laws.train, kind, tp, cp, packed, None, LENGTHS, **sizes)
    resumed = pool.run(laws.train, kind, tp, cp, packed, str(tmp_path), LENGTHS, **sizes)
    print(f"delta rule: {whole[0]['backend']}")
    laws.assert_same_run(whole, resumed)
