"""What cannot work is refused in one line that names the flag, before anything is
made."""

import argparse
import re

import pytest

from tests.examples.launching import EXAMPLES, TINY, Launch
from tests.processes import python


@pytest.mark.parametrize("flag", ["--output-dir", "--save", "--tensorboard-dir"])
def test_a_place_that_cannot_be_written_is_named(flag, refused, tmp_path):
    (tmp_path / "file").write_text("precious")
    for place in ("file", "file/run"):
        assert re.search(
            rf"{flag} {place}: \S*file is a file; name a folder", refused(flag, place)
        )
    # Nobody makes files in there, root neither.
    said = refused(flag, "/proc/run")
    assert f"{flag} /proc/run: nothing can be written in /proc (" in said
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_the_folder_that_a_run_gets_by_itself_is_tried_too(refused, tmp_path):
    (tmp_path / "runs").write_text("precious")
    assert "--output-dir runs/pretrain_hybrid: " in refused()


@pytest.mark.parametrize(
    "flags, words",
    [
        (["--tokens", "999"], "unrecognized arguments: --tokens 999"),
        (["--train-it=5"], "unrecognized arguments: --train-it=5"),
        (["--train-iters=many"], "argument --train-iters: invalid int value: 'many'"),
        (["--transformer-impl=te"], "invalid choice: 'te'"),
        (["--lr=nan"], "--lr nan: use a number of 0 or more"),
        (["--lr=-1"], "--lr -1.0: use a number of 0 or more"),
        (["--clip-grad=inf"], "--clip-grad inf: use a number"),
        (
            ["--distributed-timeout-minutes=0"],
            "--distributed-timeout-minutes 0: use a number above 0",
        ),
        (["--sample-tokens=-1"], "--sample-tokens -1 is not a size; use 0 or more"),
        (["--nproc-per-node=0"], "--nproc-per-node 0 is not a size; use 1 or more"),
        (["--nproc-per-node=4"], "beside torchrun, which has started 2 processes"),
        (
            ["--mamba-num-heads=8"],
            "--mamba-num-heads is of M layers, and the pattern .* has none",
        ),
        (
            ["--linear-num-key-heads=2", "--hybrid-layer-pattern=M-"],
            "is of G and K layers",
        ),
        (
            ["--seq-length=66"],
            "--seq-length 66 must be a multiple of 4 with --context-parallel-size 2; "
            "use 68",
        ),
        (["--context-parallel-size=3"], "Use --nproc-per-node 3"),
        (
            ["--sequence-parallel"],
            "needs --tensor-model-parallel-size .* --no-sequence-parallel",
        ),
        (["--hybrid-layer-pattern=GQ"], "unknown symbols 'Q'; use G"),
        (
            ["--global-batch-size=12"],
            "multiple of --micro-batch-size x .* = 8 x 1; use 16",
        ),
        (["--train-iters=0"], "--train-iters 0 is not a size"),
        (["--train-iters=160", "--lr-warmup-iters=160"], "leaves no step"),
        (["--resume", "--load=x"], "give one of the two"),
        (["--ckpt-step=5"], "needs --load"),
        (["--hidden-size=130"], "not a multiple of --num-attention-heads 4"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_flags_that_cannot_work_or_mean_nothing_are_refused(flags, words, refused):
    assert re.search(words, refused(*flags))


@pytest.mark.parametrize("flag", ["--seq-length", "--micro-batch-size"])
def test_a_micro_batch_beyond_all_memory_is_refused(flag, refused):
    assert re.search(
        rf"{flag} 100000000 .*needs more than [\d,]+ GB", refused(flag, 10**8)
    )


def test_every_flag_of_the_help_says_its_default(capsys):
    from pretraining.flags import make_parser

    for action in make_parser()._actions:
        if action.dest == "help" or isinstance(action, argparse._StoreTrueAction):
            continue
        assert action.help and ("unset: " in action.help) == (action.default is None), (
            action
        )
    make_parser().print_help()
    said = capsys.readouterr().out
    assert "default: None" not in said and re.search(
        r"weight-decay.*\s.*default: 0.1", said
    )


@pytest.mark.parametrize(
    "processes, flags, size",
    [
        (1, [], 1),
        (2, [], 2),
        (3, [], 1),
        (2, ["--tensor-model-parallel-size=2"], 1),
        (8, [], 2),
    ],
)
def test_context_parallelism_takes_two_ranks_where_there_are_two(
    processes, flags, size, parse, monkeypatch
):
    monkeypatch.setenv("WORLD_SIZE", str(processes))
    assert parse(*flags).context_parallel_size == size


def test_given_weights_are_trained_at_a_rate_that_keeps_them(parse, tmp_path):
    from pretraining.loop import words_of_schedule

    (tmp_path / "metadata.json").write_text("{}")  # what Megatron's checkpoints have
    given = parse("--pretrained-checkpoint", tmp_path)
    assert (given.lr, given.min_lr, given.lr_warmup_iters) == (1e-5, 1e-5 / 10, 24)
    assert (
        "1e-05 (the default with --pretrained-checkpoint; a new"
        in words_of_schedule(given)
    )
    assert parse("--pretrained-checkpoint", tmp_path, "--lr=3e-4").lr == 3e-4
    new = parse()
    assert new.lr == 6e-3 and "default" not in words_of_schedule(new)


def test_names_of_megatrons_config_become_flags():
    from pretraining.flags import with_flags

    said = with_flags(
        "linear_num_key_heads=3, see /my/seq_length/x of hidden_size, data and lr"
    )
    assert (
        said
        == "--linear-num-key-heads=3, see /my/seq_length/x of --hidden-size, data and lr"
    )


def test_an_error_of_the_layer_is_one_line_with_the_flags_names(text, tmp_path):
    launch = Launch(*TINY, "--data", text, "--linear-num-key-heads=3", cwd=tmp_path)
    assert launch.end()[0] == 1
    last = launch.printed.splitlines()[-1]
    assert (
        last.startswith("pretrain_hybrid.py: error: ")
        and "Traceback" not in launch.printed
    )
    assert last.endswith(
        "Set --linear-num-value-heads to a multiple of --linear-num-key-heads."
    )
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_plain_python_trains_in_one_process(text, tmp_path):
    command = EXAMPLES / "pretrain_hybrid.py", *TINY, "--data", text
    done = python(*command, cwd=tmp_path, TORCHDYNAMO_DISABLE="1")
    assert " cp 1 " in done.stdout, done.stdout + done.stderr
    last = done.stdout.splitlines()[-1]
    assert last.endswith("examples/pretrain_hybrid.py --resume --train-iters 24")


@pytest.mark.slow
@pytest.mark.parametrize(
    "launcher",
    ["--nproc-per-node", pytest.param("torchrun", marks=pytest.mark.nightly)],
)
def test_the_line_that_says_what_is_wrong_stands_last(launcher, tmp_path):
    """Below it torchrun has nothing but a frame; started by the script, it has nothing
    at all."""
    script = EXAMPLES / "pretrain_hybrid.py"
    if launcher == "torchrun":
        start = [
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc_per_node=2",
            script,
        ]
    else:
        start = [script, launcher, 2]
    ends = 1 if launcher == "torchrun" else 2
    done = python(
        *start, "--hidden-size=130", cwd=tmp_path, ends=ends, TORCHDYNAMO_DISABLE="1"
    )
    said = done.stderr.rstrip().splitlines()
    assert "--hidden-size 130 is not a multiple of --num-attention-heads 4." in said[
        -1
    ] or (
        launcher == "torchrun"
        and set(said[-1]) == {"="}
        and "--hidden-size 130 is" in said[-2]
    )
    assert (len(said) == 1) == (launcher != "torchrun")


def test_a_run_of_several_processes_leaves_the_flags_to_them(monkeypatch):
    from pretraining.launch import processes_to_start

    monkeypatch.delenv("RANK", raising=False)
    for flags, number in (
        (["--nproc-per-node", "4", "--data", "x"], 4),
        (["--resume", "--nproc-per-node=2"], 2),
        (["--nproc", "2"], 1),
        (["--nproc-per-node"], 1),
        (["--nproc-per-node", "-3"], 1),
        ([], 1),
    ):
        assert processes_to_start(flags) == number
    monkeypatch.setenv("RANK", "0")
    assert processes_to_start(["--nproc-per-node=4"]) == 1


def test_the_running_mean_weighs_the_first_loss_as_the_others():
    from pretraining.curve import running_mean

    assert running_mean([3.0] * 5) == pytest.approx([3.0] * 5, rel=1e-15)
    # By its definition, at a decay of one half.
    losses = [8.0, 4.0, 2.0]
    means = [8.0, (4 + 4) / 1.5, (2 + 2 + 2) / 1.75]
    assert running_mean(losses, decay=0.5) == pytest.approx(means, rel=1e-15)
