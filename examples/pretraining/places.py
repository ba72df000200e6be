"""The folders that a run writes to, and the checkpoint that it continues from."""

from __future__ import annotations

import argparse

from pretraining import folders, settings

# Flags of these, which are no settings of the run: a checkpoint does not keep them.
FLAGS = ("output_dir", "save", "tensorboard_dir", "load", "resume", "ckpt_step")


def settle(args: argparse.Namespace, given: set[str], shaping: set[str]) -> None:
    """Fill in where the run writes, and the settings of the checkpoint that it
    continues from.

    Args:
        args: the command line; gets ``start``, the checkpoint's folder, or None for a
            new run.
        given: names of the settings that stand on the command line.
        shaping: names of those that shape the model.

    Raises:
        ValueError: a run would be written over, or the checkpoint does not fit.
        FileNotFoundError: no such checkpoint.
    """
    if args.resume and args.load:
        raise ValueError("--resume means --load from --save; give one of the two.")
    if args.load and args.load == args.save:
        args.resume = True
    if args.output_dir is None:
        args.output_dir = folders.newest_run() if args.resume else folders.fresh_run()
    args.save = args.save or args.output_dir / folders.CHECKPOINTS
    args.tensorboard_dir = args.tensorboard_dir or args.output_dir / "tensorboard"
    for name in ("output_dir", "save", "tensorboard_dir"):
        folders.require_writable(getattr(args, name), settings.flag(name))
    if args.resume:
        args.load = args.save
    else:
        _refuse_to_overwrite(args)
    args.start = None
    if args.load:
        args.start = folders.find_checkpoint(args.load, args.ckpt_step)
        settings.take_over(
            args,
            settings.read(args.start),
            given=given,
            shaping=shaping,
            source=args.start,
        )
        _refuse_to_go_back(args)
    elif args.ckpt_step is not None:
        raise ValueError(
            f"--ckpt-step {args.ckpt_step} needs --load FOLDER or --resume."
        )


def _refuse_to_overwrite(args: argparse.Namespace) -> None:
    if folders.holds_a_run(args.output_dir):
        raise ValueError(
            f"--output-dir {args.output_dir} holds a run already: go on with it by "
            "--resume, or name another folder."
        )
    if folders.holds_checkpoints(args.save):
        raise ValueError(
            f"--save {args.save} holds checkpoints already: go on from them by "
            "--resume, or name another folder."
        )


def _refuse_to_go_back(args: argparse.Namespace) -> None:
    step = int(args.start.name.removeprefix("iter_"))
    steps = folders.steps_in(args.load)
    if args.resume and args.ckpt_step is not None and step < steps[-1]:
        raise ValueError(
            f"{args.load} goes on to step {steps[-1]}, which --resume --ckpt-step "
            f"{step} would overwrite. To continue from step {step} in a folder of its "
            f"own, use --load {args.load} --ckpt-step {step} instead of --resume."
        )
    if args.train_iters < step:
        raise ValueError(
            f"--train-iters {args.train_iters} lies before step {step} of "
            f"{args.start}; it counts from the start of training, so make it larger."
        )
