"""What is taken from the checkpoint when a run goes on, and what from the command
line."""

import json
import math
import re
import shutil
from pathlib import Path

import pytest

from tests.examples.interruptions import assert_one_line
from tests.examples.launching import TINY, Launch, metrics, run

RUN = Path("runs/pretrain_hybrid")


@pytest.fixture(scope="module")
def original(text, tmp_path_factory) -> Path:
    """A working directory with a run of twelve steps, its schedule at its end."""
    cwd = tmp_path_factory.mktemp("trained")
    run(*TINY, "--data", text, "--save-interval=8", cwd=cwd)
    return cwd


@pytest.fixture
def trained(original, tmp_path) -> Path:
    shutil.copytree(original / "runs", tmp_path / "runs")
    return tmp_path


@pytest.fixture
def refused(refused, trained):
    """In the folder of that run."""
    return refused


@pytest.mark.slow
def test_a_run_is_extended_by_train_iters_alone(trained):
    before = metrics(trained / RUN)
    printed = run("--resume", "--train-iters=20", cwd=trained)
    assert "steps 13..20" in printed
    after = metrics(trained / RUN)
    assert after[:12] == before and [m["iteration"] for m in after] == list(
        range(1, 21)
    )

    # the cosine of 20 steps
    def lr(done: int, warmup: int = 1, last: int = 20) -> float:
        share = (done - warmup) / (last - warmup)
        return 6e-4 + 0.5 * (1 + math.cos(math.pi * share)) * (6e-3 - 6e-4)

    for step in after[12:]:
        assert math.isclose(step["lr"], lr(step["iteration"] - 1), rel_tol=1e-12)


@pytest.mark.slow
def test_another_number_of_tensor_ranks_goes_on_with_the_same_losses(text, tmp_path):
    """The softmax counts no padding of the vocabulary; flags of two ranks can be taken
    back."""
    two_ranks = [
        "--tensor-model-parallel-size=2",
        "--sequence-parallel",
        "--deterministic",
    ]
    run(*TINY, "--data", text, "--save-interval=8", *two_ranks, cwd=tmp_path)
    folder = ["--load", RUN / "checkpoints", "--ckpt-step=8"]
    one_rank = [
        "--tensor-model-parallel-size=1",
        "--no-sequence-parallel",
        "--no-deterministic",
    ]
    run(*folder, *one_rank, cwd=tmp_path, size=1)
    two = metrics(tmp_path / RUN)
    one = metrics(tmp_path / "runs/pretrain_hybrid-2")
    for before, after in zip(two[8:], one, strict=True):
        # fp32 sums over a model of 32 channels in another order, up to four steps of
        # Adam further
        assert math.isclose(after["loss"], before["loss"], rel_tol=1e-5), (
            before,
            after,
        )


@pytest.mark.slow
def test_the_learning_rate_of_the_command_line_is_taken(trained):
    folder = ["--load", RUN / "checkpoints", "--ckpt-step=12", "--train-iters=14"]
    run(*folder, "--lr=0.05", "--min-lr=0.05", cwd=trained)
    assert [m["lr"] for m in metrics(trained / "runs/pretrain_hybrid-2")] == [
        0.05,
        0.05,
    ]


@pytest.mark.slow
def test_a_second_run_gets_a_folder_of_its_own_and_leaves_the_first_as_it_is(
    trained, parse
):
    assert parse().output_dir == Path("runs/pretrain_hybrid-2")
    # of a run that did not come to its first step
    Path("runs/pretrain_hybrid-2").mkdir()
    assert parse().output_dir == Path("runs/pretrain_hybrid-2")


def test_a_folder_that_holds_a_run_is_not_written_over(refused):
    assert "holds a run already: go on with it by --resume" in refused(
        f"--output-dir={RUN}"
    )
    assert "holds checkpoints already" in refused(f"--save={RUN / 'checkpoints'}")


@pytest.mark.parametrize(
    "flags, named",
    [
        (["--hybrid-layer-pattern=G-"], ["G-*- there and G- here"]),
        (
            ["--hidden-size=64", "--linear-key-head-dim=16", "--seq-length=64"],
            [
                "--hidden-size is 32 there and 64 here",
                "--linear-key-head-dim is 8 there and 16",
            ],
        ),
    ],
    ids=["pattern", "sizes"],
)
def test_another_model_than_the_checkpoints_is_refused_with_both_values(
    flags, named, refused
):
    said = refused("--resume", *flags)
    assert all(words in said for words in named) and "seq" not in said


def test_half_a_model_is_refused_even_when_the_checkpoint_holds_no_settings(trained):
    """Checkpoints of other programs: the names of the tensors say it."""
    settings = trained / RUN / "checkpoints/iter_0000012/settings.json"
    data = json.loads(settings.read_text())["data"][0]
    settings.unlink()
    flags = [
        *TINY,
        "--hybrid-layer-pattern=G-",
        "--data",
        data,
        "--load",
        RUN / "checkpoints",
    ]
    launch = Launch(*flags, cwd=trained)
    assert launch.end()[0] == 1
    assert_one_line(
        launch.printed, r"is of another model: it holds .*decoder.layers.* in all"
    )


def test_pipeline_cuts_are_no_other_model(trained, parse, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    flags = [
        "--resume",
        "--hybrid-layer-pattern=G-|*-",
        "--pipeline-model-parallel-size=2",
    ]
    assert parse(*flags).hybrid_layer_pattern == "G-|*-"


def test_going_back_is_refused_where_it_would_overwrite(refused):
    assert "use --load runs/pretrain_hybrid/checkpoints" in refused(
        "--resume", "--ckpt-step=8"
    )
    assert "lies before step 12" in refused("--resume", "--train-iters=10")


@pytest.mark.parametrize(
    "content, words",
    [
        (
            None,
            "There is no .*latest_checkpointed_iteration.txt. .* the steps 8, 12; "
            "name one",
        ),
        (
            "",
            "is empty: its writing was cut off.* the steps 8, 12; name one with "
            "--ckpt-step",
        ),
        ("release", "holds 'release', which is not a step's number.* steps 8, 12"),
        ("7", "no complete checkpoint of step 7; complete are the steps 8, 12"),
    ],
)
def test_a_latest_file_that_names_no_checkpoint_is_explained(
    content, words, refused, trained
):
    latest = trained / RUN / "checkpoints/latest_checkpointed_iteration.txt"
    latest.unlink()
    if content is not None:
        latest.write_text(content)
    assert re.search(words, refused("--resume"))


def test_a_folder_without_checkpoint_is_named(refused, tmp_path):
    assert f"{tmp_path} holds no finished checkpoint" in refused(f"--load={tmp_path}")


def test_a_record_whose_last_line_was_cut_off_is_read_without_it(tmp_path):
    from pretraining.report import read_metrics

    (tmp_path / "metrics.jsonl").write_text('{"iteration": 1}\n{"iteration": 2, "lo')
    assert read_metrics(tmp_path) == [{"iteration": 1}]
