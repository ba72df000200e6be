"""The last lines of a run: the files that it leaves, and the command that continues
it."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path

from pretraining.curve import LOSS_CURVE
from pretraining.folders import BASE, CHECKPOINTS, checkpoint_of, newest_run, steps_in


def closing_words(args, iteration: int) -> str:
    """The files that the run leaves, and the command for further steps."""
    scripts = Path(sys.executable).parent
    board = (
        _shortest(scripts / "tensorboard") if (scripts / "tensorboard").exists() else ""
    )
    return (
        f"loss curve     {args.output_dir / LOSS_CURVE}\n"
        f"TensorBoard    {board or 'tensorboard'} --logdir {args.tensorboard_dir}\n"
        f"checkpoint     {args.save / f'iter_{iteration:07d}'}\n"
        f"further steps  {command_to_resume(args)} --train-iters {2 * iteration}"
    )


def how_to_go_on(args) -> str:
    """The latest checkpoint and the command that continues from it."""
    steps = steps_in(args.save)
    if not steps:
        return f"there is no checkpoint in {args.save} yet, so the run starts afresh"
    place = checkpoint_of(args.save, steps[-1])
    return f"saved is step {steps[-1]}, {place}; go on with: {command_to_resume(args)}"


def how_to_go_back(args, bad_step: int) -> str:
    """Where to continue if the weights of step ``bad_step`` gave a number that is not
    finite.

    A checkpoint is good if the step after it was finite, so that of step ``bad_step``
    is not recommended.
    """
    lower = f"--lr {args.lr / 4:g} --min-lr {args.min_lr / 4:g}"
    start = int(args.start.name.removeprefix("iter_")) if args.start else 0
    for folder, last in ((args.save, bad_step), (args.load, start)):
        proven = (
            [s for s in steps_in(folder) if s < bad_step and s <= last]
            if folder
            else []
        )
        if proven:
            command = command_of(
                args,
                "--load",
                shlex.quote(str(folder)),
                f"--ckpt-step {proven[-1]}",
                lower,
            )
            return (
                f"the last good checkpoint is that of step {proven[-1]}, go on from it "
                f"in a new folder with a lower learning rate: {command}"
            )
    if bad_step == start:
        source = args.start or args.pretrained_checkpoint or "the start"
        return f"its weights are those of {source}, which this run has not changed yet"
    return (
        "there is no checkpoint from before: start again with a lower learning rate, "
        f"{lower}"
    )


def command_to_resume(args) -> str:
    """The command line that continues this run; its settings come from the
    checkpoint."""
    words = ["--resume"]
    if args.output_dir.absolute() != newest_run(BASE).absolute():
        words += ["--output-dir", shlex.quote(str(args.output_dir))]
    if args.save != args.output_dir / CHECKPOINTS:
        words += ["--save", shlex.quote(str(args.save))]
    return command_of(args, *words)


def command_of(args, *flags: str) -> str:
    """The command line that starts as many processes as this run has, with these
    flags."""
    script = _shortest(Path(sys.argv[0]).absolute())
    if args.world_size != int(os.environ.get("LOCAL_WORLD_SIZE") or args.world_size):
        words = ["torchrun, on every node as before,", script]
    else:
        words = [_shortest(Path(sys.executable)), script]
        if args.world_size > 1:
            words.append(f"--nproc-per-node {args.world_size}")
    return " ".join(words + list(flags))


def _shortest(path: Path) -> str:
    """``path``, relative to the working directory if it lies below."""
    here = Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)
