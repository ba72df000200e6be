"""The pretraining run: two processes, gloo; by torchrun, as a user launches it, it is
the same."""

import re
from pathlib import Path

import pytest

from pretraining.corpus import Corpus
from pretraining.held_out import hold_out
from tests.examples.launching import ROOT, TINY, metrics, run
from tests.processes import torchrun


@pytest.fixture(scope="module")
def packed_run(text, tmp_path_factory) -> tuple[Path, str]:
    output_dir = tmp_path_factory.mktemp("packed")
    flags = [*TINY, "--data", text, "--output-dir", output_dir, "--save-interval=6"]
    return output_dir, run(*flags, cwd=tmp_path_factory.mktemp("cwd"))


@pytest.mark.slow
def test_torchrun_launches_the_same_run(packed_run, text, tmp_path):
    flags = [
        *TINY,
        "--data",
        text,
        "--output-dir",
        tmp_path / "out",
        "--save-interval=6",
    ]
    script = ROOT / "examples/pretrain_hybrid.py"
    variables = {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}
    printed = torchrun(2, script, *flags, cwd=None, **variables)
    assert metrics(tmp_path / "out") == metrics(packed_run[0])
    assert (
        f"--resume --output-dir {tmp_path}/out --train-iters 24"
        in printed.splitlines()[-1]
    )


def test_packed_documents_with_two_context_parallel_ranks_are_learned(packed_run):
    losses = [step["loss"] for step in metrics(packed_run[0])]
    assert len(losses) == 12
    # An untrained model knows nothing: log(264) = 5.58 nats for each of the padded
    # vocabulary.
    assert 5.4 < losses[0] < 5.8
    assert losses[-1] < losses[0] - 1.0


def test_a_run_leaves_plot_events_and_checkpoints_behind(packed_run):
    output_dir, printed = packed_run
    assert (output_dir / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert list((output_dir / "tensorboard").glob("events.out.tfevents.*"))
    for step in (6, 12):
        assert (output_dir / "checkpoints" / f"iter_{step:07d}" / ".metadata").is_file()
    latest = output_dir / "checkpoints" / "latest_checkpointed_iteration.txt"
    assert latest.read_text() == "12"
    assert (
        "cp 2" in printed
        and "30 documents" in printed
        and "--- sample ---\ndef " in printed
    )


def test_the_last_lines_name_what_the_run_leaves_behind(packed_run):
    output_dir, printed = packed_run
    for place in ("loss.png", "checkpoints/iter_0000012"):
        assert (
            f"{output_dir}/{place}"
            in printed.splitlines()[-4:][place != "loss.png" and 2]
        )
    assert f"--logdir {output_dir}/tensorboard" in printed
    assert (
        f"--resume --output-dir {output_dir} --train-iters 24"
        in printed.splitlines()[-1]
    )


def test_without_a_terminal_lines_take_the_place_of_the_progress_bar(packed_run):
    said = [line for line in packed_run[1].splitlines() if line.startswith("step ")]
    assert said[0].startswith("step 1 of 12: loss 5.") and said[-1].startswith(
        "step 12 of 12: "
    )
    assert "\r" not in packed_run[1]


def test_a_run_ends_with_the_loss_on_documents_that_it_never_saw(packed_run):
    output_dir, printed = packed_run
    said = re.search(
        r"held-out loss ([0-9.]+) nats per byte, over ([0-9,]+) bytes of 1", printed
    )
    # Files of one kind: what is learned of some holds for another, and not to the
    # digit.
    learned = metrics(output_dir)[-1]["loss"]
    assert 0 < abs(float(said[1]) - learned) < 1.0 and int(said[2].replace(",", "")) > 0


def test_held_out_documents_depend_on_their_content_alone():
    texts = [b"", *(f"document {n}".encode() for n in range(59)), b"document 7"]
    kept, held = hold_out(Corpus(tuple(texts), ("skipped",)))
    assert (
        len(held.documents) >= 3
        and b"" in kept.documents
        and kept.skipped == ("skipped",)
    )
    assert sorted(kept.documents + held.documents) == sorted(texts)
    assert not set(kept.documents) & set(held.documents)
    again = hold_out(Corpus(tuple(reversed(texts))))
    assert again[1].documents == held.documents[::-1]
    assert hold_out(Corpus((b"a", b"b")))[1].documents == ()


@pytest.mark.slow
def test_a_run_continued_in_a_new_folder_has_the_losses_of_the_uninterrupted_one_bit_for_bit(
    packed_run, tmp_path
):
    output_dir, _ = packed_run
    run("--load", output_dir / "checkpoints", "--ckpt-step=6", cwd=tmp_path)
    assert metrics(tmp_path / "runs/pretrain_hybrid") == metrics(output_dir)[6:]


@pytest.mark.slow
def test_dense_rows_in_bf16_are_learned_and_resumed_bit_for_bit(text, tmp_path):
    # bf16 brings in the distributed optimizer, and with it A_log and dt_bias in fp32
    # beside the rest: the states of both kinds have to find their parameters again.
    flags = [*TINY, "--data", text, "--no-packing", "--bf16", "--sample-tokens=0"]
    run(*flags, "--save-interval=6", cwd=tmp_path)
    whole = metrics(tmp_path / "runs/pretrain_hybrid")
    assert whole[-1]["loss"] < whole[0]["loss"] - 1.0
    run("--load", "runs/pretrain_hybrid/checkpoints", "--ckpt-step=6", cwd=tmp_path)
    assert metrics(tmp_path / "runs/pretrain_hybrid-2") == whole[6:]


@pytest.mark.slow
def test_a_model_of_all_mixers_is_learned(text, tmp_path):
    sizes = ["--mamba-num-heads=4", "--mamba-head-dim=8", "--mamba-state-dim=8"]
    run(*TINY, "--hybrid-layer-pattern=M-K-G-*-", *sizes, "--data", text, cwd=tmp_path)
    steps = metrics(tmp_path / "runs/pretrain_hybrid")
    assert steps[-1]["loss"] < steps[0]["loss"] - 1.0
