"""Scripts of a clone go on from one process's second step in every arrangement,
optimizer included, and take the steps that it took, as does Megatron's own layer; three
multiply fp32's rounding by less than ten. Experts begin on two ranks: Megatron loads no
optimizer of them at
another size."""

from pathlib import Path

import pytest

from tests.launches import real_data
from tests.launches.launching import (
    CLONE,
    SMALL,
    held_out_losses,
    in_a_clone,
    launched,
    losses,
)
from tests.launches.record import branch, recorded

pytestmark = in_a_clone

HYBRID = "pretrain_hybrid.py"
GPT = "pretrain_gpt.py"
SPECS = {
    HYBRID: "--spec megatron_gdn.specs hybrid_stack_spec",
    GPT: "--spec megatron_gdn.specs gpt_block_spec",
    "gdp": "--spec megatron_gdn.specs gdp_stack_spec",
}
UPSTREAM = {
    HYBRID: "--spec tests.launches.upstream_layers hybrid_stack",
    GPT: "--spec tests.launches.upstream_layers gpt_block",
    "gdp": "--spec tests.launches.upstream_layers gdp_stack_spec",
}
SIZES = f"""{SMALL}
    --mamba-num-heads 8 --mamba-head-dim 16 --mamba-num-groups 2 --mamba-state-dim 16
    --moe-router-topk 2 --moe-token-dispatcher-type alltoall
    --micro-batch-size 1 --global-batch-size 4 --train-iters 5 --lr 3e-3
    --lr-warmup-iters 1 --eval-iters 1 --eval-interval 3 --use-distributed-optimizer
    --dist-ckpt-optim-fully-reshardable --save-interval 2 --no-load-rng
"""
DATA = {
    "": "--mock-data --tokenizer-type NullTokenizer --vocab-size 256",
    "--data-path text": """
        --data-path {folder}/text_text_document --data-cache-path {folder}/cache --split 90,10,0
        --tokenizer-type HuggingFaceTokenizer --tokenizer-model {folder}
    """,
    "--data-path chats": """
        --data-path {folder}/chats.jsonl --split 90,10,0 --tokenizer-type SFTTokenizer
        --tokenizer-model {folder} --sft-tokenizer-prompt-format default
        --no-create-attention-mask-in-dataloader --calculate-per-token-loss
    """,
}
DENSE = "--hybrid-layer-pattern G-*-"
# By model: the script, the flags that tell it from others, and the data.
MODELS = {
    "dense": (HYBRID, DENSE, ""),
    "gdn2": (HYBRID, f"{DENSE} --experimental-attention-variant gdn2", ""),
    "gdp": (HYBRID, "--hybrid-layer-pattern M-*- --gdp-num-householder 2", ""),
    "heads": (HYBRID, "--hybrid-layer-pattern G-*-/*-", ""),
    "mamba": (HYBRID, "--hybrid-layer-pattern GM*-", ""),
    "kda": (HYBRID, "--hybrid-layer-pattern K-G*", ""),
    # Sizes that Megatron's own class takes.
    "kda of Megatron": (
        HYBRID,
        "--hybrid-layer-pattern K-*- --linear-num-key-heads 4",
        "",
    ),
    "experts": (
        HYBRID,
        "--hybrid-layer-pattern GE*E --num-experts 4 --expert-model-parallel-size 2",
        "",
    ),
    "text": (HYBRID, DENSE, "--data-path text"),
    "documents": (
        HYBRID,
        f"{DENSE} --dataloader-inter-document-masking",
        "--data-path text",
    ),
    "chats": (HYBRID, f"{DENSE} --sft", "--data-path chats"),
    "gpt": (
        GPT,
        "--num-layers 4 --linear-attention-freq 2 --experimental-attention-variant "
        "gated_delta_net",
        "",
    ),
}
HAS_GDN2 = (
    CLONE is not None
    and (Path(CLONE) / "megatron/core/ssm/gated_delta_net/gdn2.py").exists()
)
HAS_GDP = (
    CLONE is not None
    and (Path(CLONE) / "megatron/core/ssm/gated_delta_product.py").exists()
)
HAS_KDA = (
    CLONE is not None
    and (Path(CLONE) / "megatron/core/ssm/gated_delta_net/kda.py").exists()
)
LAUNCHER = {"kda"}  # Megatron reads a pattern before it imports what --spec names
FIRST = {"experts": 2}  # processes that train a model first; one where it is not named
TENSOR = "--tensor-model-parallel-size 2 --sequence-parallel"
CONTEXT = "--context-parallel-size 2"
PIPELINE = "--pipeline-model-parallel-size 2"
# By model: the processes and flags; None is Megatron's own layer.
ARRANGEMENTS = {
    "dense": [
        None,
        (2, ""),
        (2, TENSOR),
        (2, CONTEXT),
        (2, f"{PIPELINE} --hybrid-layer-pattern G-|*-"),
        (2, f"{PIPELINE} --hybrid-layer-pattern G|-|*|-"),
        (1, "--async-save"),
    ],
    "gdn2": [None, (2, TENSOR), (2, CONTEXT)],
    "gdp": [None, (2, TENSOR), (2, CONTEXT)],
    "heads": [None, (2, TENSOR)],
    "mamba": [(2, TENSOR)],
    "kda": [
        (1, ""),
        (2, TENSOR),
        (2, CONTEXT),
        (2, f"{PIPELINE} --hybrid-layer-pattern K-|G*"),
    ],
    "kda of Megatron": [None, (1, ""), (2, TENSOR), (2, CONTEXT)],
    "experts": [None],
    "text": [None],
    "documents": [None, (2, CONTEXT)],
    "chats": [None, (2, CONTEXT)],
    "gpt": [None, (2, TENSOR), (2, CONTEXT), (2, PIPELINE)],
}
# By branch, model and flags: the words with which Megatron refuses a launch.
REFUSED = {("dev", "documents", CONTEXT): "must be divisible by 2 * cp_size"}
CASES = [(model, each) for model, several in ARRANGEMENTS.items() for each in several]


def name_of(value: object) -> str:
    return (
        value
        if isinstance(value, str)
        else "upstream"
        if value is None
        else " ".join(value[1:])
    )


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """What text and chats are read from, with their tokenizer."""
    folder = tmp_path_factory.mktemp("data")
    real_data.save_tokenizer(folder)
    real_data.save_text(folder)
    real_data.save_chats(folder)
    return folder


@pytest.fixture(scope="module")
def trained(data, tmp_path_factory):
    """``trained(model, processes, *flags)``: a launch of the model's script."""

    def launch(model: str, processes: int, *flags: str):
        script, of_model, read = MODELS[model]
        spec = SPECS.get(model, SPECS[script])
        words = f"{spec} {SIZES} {of_model} {DATA[read].format(folder=data)}"
        return launched(
            script, processes, *words.split(), *flags, launcher=model in LAUNCHER
        )

    return launch


@pytest.fixture(scope="module")
def saved(trained, tmp_path_factory):
    """Per model the folder with its second step; the losses of the later steps, then
    held out."""
    made = {}

    def of(model: str) -> tuple[str, list[float]]:
        if model not in made:
            folder = str(tmp_path_factory.mktemp(model))
            done = trained(model, FIRST.get(model, 1), f"--save={folder}")
            steps = losses(done)
            held_out = held_out_losses(done)
            assert len(steps) == 5 and steps[-1] < steps[0] and held_out
            # The second step that is logged after loading is averaged with the first.
            third, fourth, fifth = steps[2:]
            made[model] = folder, [third, (third + fourth) / 2, fifth, *held_out]
        return made[model]

    return of


@pytest.mark.parametrize(("model", "arrangement"), CASES, ids=name_of)
def test_every_arrangement_takes_the_steps_of_one_process(
    trained, saved, tmp_path, model, arrangement
):
    if model == "gdn2" and not HAS_GDN2:
        pytest.skip("this branch has no Gated DeltaNet-2")
    if model == "gdp" and not HAS_GDP:
        pytest.skip("this branch has no Gated DeltaProduct")
    if model == "kda of Megatron" and not HAS_KDA:
        pytest.skip("this branch has no Kimi Delta Attention")
    if model == "kda" and HAS_KDA:
        pytest.skip("the config of this branch refuses more value than key heads")
    folder, wanted = saved(model)
    script, of_model, read = MODELS[model]
    theirs = UPSTREAM.get(model, UPSTREAM[script])
    processes, flags = arrangement or (FIRST.get(model, 1), theirs)
    held_to = "Megatron's own layer" if arrangement is None else "one process"
    told_by = flags if arrangement else ""
    if "--hybrid-layer-pattern" not in told_by:
        told_by = f"{of_model} {read} {told_by}"
    refusal = REFUSED.get((branch(), model, flags))
    shown = f"megatron_gdn.launch {script}" if model in LAUNCHER else script
    with recorded(shown, processes, told_by, held_to) as result:
        done = trained(
            model,
            processes,
            *flags.split(),
            f"--load={folder}",
            "--ckpt-step=2",
            f"--save={tmp_path}",
        )
        if refusal:
            result.is_refused(done, refusal)
        else:
            # Held-out losses of context-parallel ranks are averaged by Megatron
            # whatever number of tokens each has that is not masked.
            found = losses(done) + ([] if model == "chats" else held_out_losses(done))
            rel = 1e-6 if model in ("gdn2", "gdp") else 1e-5
            result.equals(found, wanted[: len(found)], rel=rel)
