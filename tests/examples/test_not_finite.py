"""A loss or gradient norm that is not finite ends a run before weights or checkpoints have it."""

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

# A rate at which the weights of step 2 overflow in step 3; the first step's rate is 0.
BREAKS = ["--lr=1e30", "--save-interval=1"]


def said_last(launch: Launch) -> str:
    assert launch.end()[0] == 1, launch.printed
    assert "Traceback" not in launch.printed and "--resume" not in launch.printed
    assert "sample" not in launch.printed
    last = launch.printed.splitlines()[-1]
    assert last.startswith("pretrain_hybrid.py: error: "), launch.printed
    return last


def test_the_run_stops_at_that_step_and_names_the_last_good_checkpoint(text, tmp_path):
    launch = Launch(*TINY, *BREAKS, "--data", text, cwd=tmp_path)
    last = said_last(launch)
    assert re.search(r"the (loss|gradient norm) of step 3 is (nan|inf), so the run stops bef", last)
    output = tmp_path / "runs/pretrain_hybrid"
    steps = metrics(output)
    assert [step["iteration"] for step in steps] == [1, 2]
    assert all(math.isfinite(step[name]) for step in steps for name in ("loss", "grad_norm"))
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


def test_a_run_whose_last_step_breaks_the_weights_writes_no_sample(text, tmp_path):
    flags = [*TINY, "--train-iters=1", "--lr=1e38"]
    last = said_last(Launch(*flags, "--data", text, cwd=tmp_path, size=1))
    assert re.search(r"the held-out loss after step 1 is (nan|inf); there is no checkpoint", last)


def test_without_held_out_documents_the_sample_shows_it(text, tmp_path):
    (tmp_path / "one.txt").write_text((text / "16.py").read_text())
    flags = [*TINY, "--train-iters=1", "--lr=1e38", "--data", tmp_path / "one.txt"]
    last = said_last(Launch(*flags, cwd=tmp_path, size=1))
    assert "the model's logits are not finite after step 1; there is no checkpoint" in last


def what_a_rank_finds() -> list[str]:
    """Rank 1 alone has a NaN."""
    from pretraining.step import NotFiniteError, require_finite

    with parallel(cp=2):
        device, rank = torch.device("cpu"), torch.distributed.get_rank()
        require_finite(7, device, loss=1.0, grad_norm=2.0)
        found = []
        for numbers in ({"loss": 1.0, "grad_norm": math.nan}, {"loss": math.inf, "grad_norm": 1.0}):
            mine = numbers if rank else {"loss": 1.0, "grad_norm": 2.0}
            try:
                require_finite(7, device, **mine)
            except NotFiniteError as fault:
                found.append(f"{fault.weights} {fault}")
        return found


def test_what_one_rank_finds_stops_every_rank(pools):
    for found in pools(2).run(what_a_rank_finds):
        assert len(found) == 2 and all(words.startswith("6 the ") for words in found)


def place(folder: Path, *steps: int) -> Path:
    for step in steps:
        (folder / f"iter_{step:07d}").mkdir(parents=True)
        (folder / f"iter_{step:07d}" / "metadata.json").write_text(json.dumps({}))
    return folder


@pytest.mark.parametrize(
    "bad, words",
    [
        (36, "good checkpoint is that of step 30, .*--load saved --ckpt-step 30 --lr 0.0015 --min"),
        (30, "good checkpoint is that of step 20, .*--load saved --ckpt-step 20 --lr 0.0015 --min"),
        (20, "good checkpoint is that of step 8, .*--load earlier --ckpt-step 8 --lr 0.0015 --min"),
        (8, r"weights are those of earlier/iter_0000008, which this run has not changed"),
    ],
)
def test_only_a_checkpoint_that_a_finite_step_followed_is_recommended(
    bad, words, tmp_path, monkeypatch
):
    from pretraining.going_on import how_to_go_back

    monkeypatch.chdir(tmp_path)
    saved, load = place(Path("saved"), 20, 30), place(Path("earlier"), 8, 12)
    args = Namespace(
        save=saved, load=load, start=load / "iter_0000008", pretrained_checkpoint=None,
        lr=6e-3, min_lr=6e-4, world_size=1,
    )  # fmt: skip
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert re.search(words, how_to_go_back(args, bad))
