"""On four GPUs in bf16: a hybrid model of GDN, attention and MLP layers on Transformer Engine."""

import pytest
import torch

from tests.gpu import model_laws as laws

pytestmark = pytest.mark.gpu

LAYOUTS = [
    {"tp": 2, "cp": 2},
    {"tp": 2, "cp": 2, "sequence_parallel": True},
    {"pp": 2, "cp": 2},
    {"cp": 4},
]
BF16_EPS = 2**-9


def rms(x: torch.Tensor) -> float:
    return x.double().square().mean().sqrt().item()


@pytest.fixture(scope="module")
def one_gpu(gpus):
    """The losses and gradients of one GPU: in fp32 with the plain rule, and in bf16."""
    made = {}

    def answers(packed: bool):
        if packed not in made:
            exact = {"backend": "reference"}
            made[packed] = (
                gpus(1).run(laws.one_step, "te", torch.float32, packed, None, exact)[0],
                gpus(1).run(laws.one_step, "te", torch.bfloat16, packed)[0],
            )
        return made[packed]

    return answers


@pytest.mark.parametrize("packed", [False, True], ids=["batch", "packed"])
@pytest.mark.parametrize("mode", ["headwise", "chunkwise"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: " ".join(map(str, layout.items())))
def test_a_step_on_four_gpus_is_as_exact_as_on_one(gpus, one_gpu, layout, mode, packed):
    pytest.importorskip("transformer_engine")
    truth, one = one_gpu(packed)
    options = {"linear_cp_mode": mode}
    ranks = gpus(4).run(laws.one_step, "te", torch.bfloat16, packed, layout, options)
    error = rms(one["losses"] - truth["losses"])
    print(f"loss: mean {truth['losses'].mean():.4f}, error of one GPU {error:.2e}")
    squares = {}
    for rank in ranks:
        squares |= rank["squares"]
        if rank["losses"] is None:
            continue
        here = rms(rank["losses"] - truth["losses"][..., rank["held"]])
        print(f"  of a rank {here:.2e}")
        # Two draws of the same error over some 256 tokens or more: as in test_parallel.
        spread = 1.2 * (1 + 2 / rank["losses"].numel() ** 0.5)
        assert here <= spread * error + BF16_EPS * rms(truth["losses"]) / 8
    assert squares.keys() == truth["squares"].keys()
    for name, true in truth["squares"].items():
        # A gradient that one rank did not add, or added twice, is off by a factor.
        assert squares[name] == pytest.approx(true, rel=0.1), name
