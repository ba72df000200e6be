"""On one and two GPUs in bf16: a resumed run has the bits of one never interrupted."""

import os

import pytest

from tests.precision import exact_resume_laws as laws
from tests.precision.training import FLOAT16

pytestmark = pytest.mark.gpu

# 16 key and 32 value heads of 128 on every rank: kernels that are likely compiled
# already.
HEADS = {
    "hidden_size": 256,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "use_cpu_initialization": False,
}
LENGTHS = (320, 960, 640)


@pytest.fixture(scope="module", autouse=True)
def repeatable_cublas():
    """The workspace that cuBLAS needs to repeat, for ranks that start from here on."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


@pytest.mark.parametrize("packed", [False, True], ids=["batch", "packed"])
@pytest.mark.parametrize(
    ("kind", "tp", "cp", "mode"),
    [
        (FLOAT16, 1, 1, "headwise"),
        ("fully_reshardable", 1, 1, "headwise"),
        (FLOAT16, 2, 1, "headwise"),
        (FLOAT16, 1, 2, "headwise"),
        (FLOAT16, 1, 2, "chunkwise"),
    ],
    ids=["float16", "distributed", "tp2", "cp2", "cp2-chunkwise"],
)
def test_a_resumed_run_has_the_bits_of_one_never_interrupted(
    gpus, tmp_path, kind, tp, cp, mode, packed
):
    ranks = tp * cp
    split = 1 if mode == "chunkwise" else ranks  # chunkwise leaves every rank all heads
    sizes = {
        **HEADS,
        "linear_num_key_heads": 16 * split,
        "linear_num_value_heads": 32 * split,
    }
    pool = gpus(ranks)
    whole = pool.run(laws.train, kind, tp, cp, mode, packed, None, LENGTHS, **sizes)
    resumed = pool.run(
        laws.train, kind, tp, cp, mode, packed, str(tmp_path), LENGTHS, **sizes
    )
    print(f"delta rule: {whole[0]['backend']}")
    laws.assert_same_run(whole, resumed)
