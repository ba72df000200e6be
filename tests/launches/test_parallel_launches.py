"""``pretrain_hybrid.py`` of a Megatron-LM clone goes on from one checkpoint in every arrangement.

One process trains five steps and saves the second. From there each arrangement takes the steps that
the one process took, and so does the stack with Megatron's own layer. The optimizer's state comes
from the checkpoint. fp32; the log has seven digits, and three steps multiply rounding by less than
ten.
"""

import pytest

from tests.launches.launching import held_out_losses, in_a_clone, launched, losses

pytestmark = in_a_clone

SPEC = "--spec megatron_gdn.specs hybrid_stack_spec"
UPSTREAM = "--spec tests.launches.upstream_layers hybrid_stack"
FLAGS = f"""
    {SPEC} --hidden-size 64 --ffn-hidden-size 96 --num-attention-heads 4 --kv-channels 16
    --linear-num-key-heads 2 --linear-key-head-dim 16 --linear-num-value-heads 4
    --linear-value-head-dim 16 --linear-conv-kernel-dim 4 --position-embedding-type rope
    --normalization RMSNorm --swiglu --disable-bias-linear
    --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0
    --seq-length 64 --max-position-embeddings 64 --vocab-size 256 --tokenizer-type NullTokenizer
    --mock-data --micro-batch-size 1 --global-batch-size 4 --train-iters 5 --lr 3e-3
    --lr-warmup-iters 1 --eval-iters 1 --eval-interval 3 --log-interval 1 --num-workers 0
    --no-persist-layer-norm --use-distributed-optimizer --dist-ckpt-optim-fully-reshardable
    --save-interval 2 --no-load-rng
"""
MAMBA = "--mamba-num-heads 8 --mamba-head-dim 16 --mamba-num-groups 2 --mamba-state-dim 16"
MODELS = {
    "dense": "--hybrid-layer-pattern G-*-",
    "heads": "--hybrid-layer-pattern G-*-/*-",
    "mamba": f"--hybrid-layer-pattern GM*- {MAMBA}",
}
ARRANGEMENTS = {
    "upstream": ("dense", 1, UPSTREAM),
    "data": ("dense", 2, ""),
    "tensor": ("dense", 2, "--tensor-model-parallel-size 2 --sequence-parallel"),
    "context": ("dense", 2, "--context-parallel-size 2"),
    "pipeline": (
        "dense", 2, "--pipeline-model-parallel-size 2 --hybrid-layer-pattern G-|*-",
    ),
    "virtual pipeline": (
        "dense", 2, "--pipeline-model-parallel-size 2 --hybrid-layer-pattern G|-|*|-",
    ),
    "asynchronous save": ("dense", 1, "--async-save"),
    "heads, upstream": ("heads", 1, UPSTREAM),
    "heads, tensor": ("heads", 2, "--tensor-model-parallel-size 2 --sequence-parallel"),
    "mamba, tensor": ("mamba", 2, "--tensor-model-parallel-size 2 --sequence-parallel"),
}  # fmt: skip


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Per model the folder with its second step, and the log of the later ones."""
    made = {}

    def of(model: str) -> tuple[str, list[float], list[float]]:
        if model not in made:
            folder = str(tmp_path_factory.mktemp(model))
            done = launched(
                "pretrain_hybrid.py", 1, *FLAGS.split(), *MODELS[model].split(), f"--save={folder}"
            )
            steps, held_out = losses(done), held_out_losses(done)
            assert len(steps) == 5 and steps[-1] < steps[0] and held_out
            # The second step that is logged after loading is averaged with the first.
            third, fourth, fifth = steps[2:]
            made[model] = folder, [third, (third + fourth) / 2, fifth], held_out
        return made[model]

    return of


@pytest.mark.parametrize("name", ARRANGEMENTS)
def test_every_arrangement_takes_the_steps_of_one_process(saved, tmp_path, name):
    model, processes, flags = ARRANGEMENTS[name]
    folder, steps, held_out = saved(model)
    done = launched(
        "pretrain_hybrid.py", processes, *FLAGS.split(), *MODELS[model].split(), *flags.split(),
        f"--load={folder}", "--ckpt-step=2", f"--save={tmp_path}",
    )  # fmt: skip
    assert losses(done) == pytest.approx(steps, rel=1e-5)
    assert held_out_losses(done) == pytest.approx(held_out, rel=1e-5)
