"""``pretrain_hybrid.py`` of a Megatron-LM clone goes on from its checkpoint under both
FSDPs."""

import subprocess

import pytest

from tests.launches.launching import FLAGS, SPEC, in_a_clone, launched, losses
from tests.launches.record import branch, recorded

pytestmark = in_a_clone

SCRIPT = "pretrain_hybrid.py"
DCP = "--bf16 --use-torch-fsdp2 --ckpt-format torch_dcp"
# gloo has no sum with a factor, by which the gradients are averaged without the loss
# per token.
MEGATRONS = """--hybrid-layer-pattern GM*- --bf16 --use-megatron-fsdp --use-distributed-optimizer
    --data-parallel-sharding-strategy optim_grads --ckpt-format fsdp_dtensor
    --calculate-per-token-loss --no-load-rng
    --mamba-num-heads 8 --mamba-head-dim 16 --mamba-num-groups 2 --mamba-state-dim 16"""

# main gathers both dtypes of a bf16 model at once, which our layer refuses over gloo.
ONE_GATHER = "from which gloo returns wrong numbers"


def trained(
    layer: str, flags: str, processes: int = 2
) -> subprocess.CompletedProcess[str]:
    """Two data-parallel replicas, steps 1-6 unless ``flags`` say otherwise."""
    of_layer = [*SPEC[layer].split(), *FLAGS.split()]
    return launched(
        SCRIPT, processes, "--spec", *of_layer, *flags.split(), connections=None
    )


@pytest.mark.parametrize("flags", [DCP, MEGATRONS], ids=["torch_dcp", "fsdp_dtensor"])
def test_a_run_goes_on_from_its_file(tmp_path, flags):
    """To the last digit of the log, optimizer included."""
    with recorded(SCRIPT, 2, f"{flags} --load", "the run without a stop") as result:
        if flags is MEGATRONS and branch() == "main":
            return result.is_refused(trained("ours", flags), ONE_GATHER)
        first, second, third, fourth, fifth, sixth = losses(trained("ours", flags))
        saved = trained("ours", f"{flags} --save {tmp_path} --exit-interval 3")
        assert losses(saved) == [first, second, third]
        found = losses(trained("ours", f"{flags} --load {tmp_path}"))
        # The second step that is logged after loading is averaged with the first.
        result.equals(found, [fourth, (fourth + fifth) / 2, sixth], rel=1e-6)


def test_megatrons_own_layer_does_not_go_on_from_its_torch_dcp_file(tmp_path):
    """Once it does, `checkpoints.make_states_to_load` can go."""
    losses(trained("upstream", f"{DCP} --save {tmp_path} --exit-interval 3"))
    refused = trained("upstream", f"{DCP} --load {tmp_path}")
    assert refused.returncode != 0
    assert "unexpected keyword argument 'is_loading'" in refused.stderr


def test_a_fsdp_dtensor_file_of_another_tensor_parallel_size_is_refused(tmp_path):
    if branch() == "main":
        pytest.skip(ONE_GATHER)
    losses(trained("ours", f"{MEGATRONS} --save {tmp_path} --exit-interval 3"))
    other = f"{MEGATRONS} --load {tmp_path} --tensor-model-parallel-size 2"
    refused = trained("ours", other, processes=4)
    assert refused.returncode != 0 and "lm loss" not in refused.stdout
    assert "Load it with --tensor-model-parallel-size 1" in refused.stderr
