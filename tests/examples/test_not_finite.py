"""A loss or gradient norm that is not finite ends a run before weights or checkpoints
have it."""

import json
import math
import re
import shlex
from argparse import Namespace
from pathlib import Path

import pytest
import torch

from tests.examples.launching import TINY, Launch, metrics, run
from tests.parallel import parallel
from tests.ranks import on_ranks

# A rate at which the weights of step 2 overflow in step 3; the first step's rate is 0.
BREAKS = ["--lr=1e30", "--save-interval=1"]


def said_last(launch: Launch) -> str:
    assert launch.end()[0] == 1, launch.printed
    assert "Traceback" not in launch.printed and "--resume" not in launch.printed
    assert "sample" not in launch.printed
    last = launch.printed.splitlines()[-1]
    assert last.startswith("pretrain_hybrid.py: error: "), launch.printed
    return last


@pytest.mark.slow
def test_the_run_stops_at_that_step_and_names_the_last_good_checkpoint(text, tmp_path):
    launch = Launch(*TINY, *BREAKS, "--data", text, cwd=tmp_path)
    last = said_last(launch)
    assert re.search(
        r"the (loss|gradient norm) of step 3 is (nan|inf), so the run stops bef", last
    )
    output = tmp_path / "runs/pretrain_hybrid"
    steps = metrics(output)
    assert [step["iteration"] for step in steps] == [1, 2]
    assert all(
        math.isfinite(step[name]) for step in steps for name in ("loss", "grad_norm")
    )
    # Step 2 made the weights that gave it.
    assert "the last good checkpoint is that of step 1" in last
    assert (output / "checkpoints/latest_checkpointed_iteration.txt").read_text() == "2"
    assert (output / "loss.png").exists()
    # The command, with a rate that is sane.
    flags = shlex.split(last)[shlex.split(last).index("--load") :]
    assert flags[flags.index("--lr") + 1] == "2.5e+29"
    run(*flags, "--lr=6e-3", "--min-lr=6e-4", cwd=tmp_path)
    again = metrics(tmp_path / "runs/pretrain_hybrid-2")
    assert [step["iteration"] for step in again] == list(range(2, 13))
    assert again[-1]["loss"] < again[0]["loss"] - 1


def what_ends_a_run_of_broken_weights() -> list[str]:
    from pretraining.arguments import parse_args
    from pretraining.corpus import Corpus
    from pretraining.held_out import held_out_loss
    from pretraining.loop import text_sample
    from pretraining.model import build_training
    from pretraining.step import NotFiniteError

    args = parse_args([*TINY, "--context-parallel-size=1"])
    args.transformer_impl = "local"
    said = []
    with parallel(1):
        training = build_training(args)
        held_out = Corpus((b"held out",))
        device = torch.device("cpu")
        assert held_out_loss(args, training, held_out, device)[0] == pytest.approx(
            5.5, abs=0.5
        )
        for parameter in training.model.parameters():
            parameter.data.fill_(math.nan)
        for end in (
            lambda: held_out_loss(args, training, held_out, device),
            lambda: text_sample(args, training),
        ):
            with pytest.raises(NotFiniteError) as fault:
                end()
            said.append(f"{fault.value.weights_step}: {fault.value}")
    return said


def test_weights_that_the_last_step_broke_are_seen_by_held_out_documents_and_by_the_sample(
    pools,
):
    (said,) = pools(1).run(what_ends_a_run_of_broken_weights)
    assert said == [
        "12: the held-out loss after step 12 is nan",
        "12: the model's logits are not finite after step 12",
    ]


@on_ranks(cp=2)
def test_what_one_rank_finds_stops_every_rank():
    from pretraining.step import NotFiniteError, require_finite

    device = torch.device("cpu")
    fine = {"loss": 1.0, "grad_norm": 2.0}
    require_finite(7, device, **fine)
    for numbers in (
        {"loss": 1.0, "grad_norm": math.nan},
        {"loss": math.inf, "grad_norm": 1.0},
    ):
        with pytest.raises(NotFiniteError, match="^the ") as fault:
            require_finite(
                7, device, **(numbers if torch.distributed.get_rank() else fine)
            )
        assert fault.value.weights_step == 6


def place(folder: Path, *steps: int) -> Path:
    for step in steps:
        (folder / f"iter_{step:07d}").mkdir(parents=True)
        (folder / f"iter_{step:07d}" / "metadata.json").write_text(json.dumps({}))
    return folder


@pytest.mark.parametrize(
    "bad, words",
    [
        (
            36,
            "good checkpoint is that of step 30, .*--load saved --ckpt-step 30 --lr "
            "0.0015 --min",
        ),
        (
            30,
            "good checkpoint is that of step 20, .*--load saved --ckpt-step 20 --lr "
            "0.0015 --min",
        ),
        (
            20,
            "good checkpoint is that of step 8, .*--load earlier --ckpt-step 8 --lr "
            "0.0015 --min",
        ),
        (
            8,
            r"weights are those of earlier/iter_0000008, which this run has not changed",
        ),
    ],
)
def test_only_a_checkpoint_that_a_finite_step_followed_is_recommended(
    bad, words, tmp_path, monkeypatch
):
    from pretraining.going_on import how_to_go_back

    monkeypatch.chdir(tmp_path)
    saved = place(Path("saved"), 20, 30)
    load = place(Path("earlier"), 8, 12)
    args = Namespace(
        save=saved,
        load=load,
        start=load / "iter_0000008",
        pretrained_checkpoint=None,
        lr=6e-3,
        min_lr=6e-4,
        world_size=1,
    )
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert re.search(words, how_to_go_back(args, bad))
