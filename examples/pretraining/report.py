"""What a run shows and leaves behind: progress bar, TensorBoard, metrics.jsonl, loss curve.

Only rank 0 writes. One line of ``metrics.jsonl`` per step is the record; the plot is drawn from it.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
import threading
import time
from pathlib import Path
from typing import Any

from pretraining.folders import BASE, CHECKPOINTS, METRICS, newest_run, steps_in, write_whole

LOSS_CURVE = "loss.png"
# Without a terminal there is no bar but a line now and then.
_LINE_EVERY_S = 15


class Report:
    """Rank 0's view of a run; on other ranks every method does nothing.

    Args:
        output_dir: where ``metrics.jsonl`` and ``loss.png`` go.
        tensorboard_dir: TensorBoard event files.
        first: steps already done, kept from the record of the run that is resumed.
        last: step the run ends at.
        active: whether this is rank 0.
    """

    def __init__(
        self, output_dir: Path, tensorboard_dir: Path, *, first: int, last: int, active: bool
    ) -> None:
        self._active = active
        if not active:
            return
        from torch.utils.tensorboard import SummaryWriter

        output_dir.mkdir(parents=True, exist_ok=True)
        self._output_dir = output_dir
        self._history = [m for m in read_metrics(output_dir) if m["iteration"] <= first]
        lines = "".join(json.dumps(metrics) + "\n" for metrics in self._history)
        write_whole(output_dir / METRICS, lines)
        self._record = (output_dir / METRICS).open("a", buffering=1)
        threading.excepthook = _threads_hand_on_os_errors
        self._tensorboard = SummaryWriter(str(tensorboard_dir), purge_step=first + 1)
        self._progress = (_Bar if sys.stderr.isatty() else _Lines)(first, last)

    def say(self, text: str) -> None:
        """A line of its own, above the progress bar."""
        if self._active:
            self._progress.say(text)

    def step(self, **metrics: Any) -> None:
        """Record one step: iteration, loss, lr, grad_norm, tokens, seconds.

        Raises:
            OSError: the record or the events cannot be written.
        """
        if not self._active:
            return
        speed = metrics["tokens"] / metrics["seconds"]
        self._progress.step(f"loss {metrics['loss']:.3f}, {speed:,.0f} tok/s")
        self._history.append(metrics)
        self._record.write(json.dumps(metrics) + "\n")
        for name in ("loss", "lr", "grad_norm"):
            self._tensorboard.add_scalar(name, metrics[name], metrics["iteration"])
        self._tensorboard.add_scalar("tokens_per_second", speed, metrics["iteration"])

    def close(self) -> None:
        """Close the files and draw the curve; a full disk is said, for the checkpoint is there."""
        if not self._active:
            return
        self._progress.close()
        try:
            self._record.close()
            self._tensorboard.close()
            if self._history:
                plot_loss(self._history, self._output_dir / LOSS_CURVE)
        except OSError as error:
            self.say(f"{self._output_dir} cannot be written in full: {error}")


def _threads_hand_on_os_errors(args: threading.ExceptHookArgs) -> None:
    """No traceback for a full disk: TensorBoard's thread hands the error to the next call."""
    if not issubclass(args.exc_type, OSError):
        threading.__excepthook__(args)


class _Bar:
    """A bar with loss, speed and time left, on a terminal."""

    def __init__(self, first: int, last: int) -> None:
        from tqdm import tqdm

        self._bar = tqdm(
            initial=first, total=last, unit="step", desc="training", dynamic_ncols=True
        )

    def say(self, text: str) -> None:
        self._bar.write(text)

    def step(self, figures: str) -> None:
        self._bar.set_postfix_str(figures, refresh=False)
        self._bar.update()

    def close(self) -> None:
        self._bar.close()


class _Lines:
    """The same as lines: for the first step, the last, and some between."""

    def __init__(self, first: int, last: int) -> None:
        self._first = self._done = first
        self._last = last
        self._started = time.monotonic()
        self._said = -float("inf")

    def say(self, text: str) -> None:
        print(text, flush=True)

    def step(self, figures: str) -> None:
        self._done += 1
        now = time.monotonic()
        if now - self._said < _LINE_EVERY_S and self._done < self._last:
            return
        self._said = now
        each = (now - self._started) / (self._done - self._first)
        left = round(each * (self._last - self._done))
        self.say(f"step {self._done} of {self._last}: {figures}, {left // 60}:{left % 60:02} left")

    def close(self) -> None:
        pass


def closing_words(args, iteration: int) -> str:
    """What the run leaves behind, and how to go on with it."""
    scripts = Path(sys.executable).parent
    board = _shortest(scripts / "tensorboard") if (scripts / "tensorboard").exists() else ""
    return (
        f"loss curve     {args.output_dir / LOSS_CURVE}\n"
        f"TensorBoard    {board or 'tensorboard'} --logdir {args.tensorboard_dir}\n"
        f"checkpoint     {args.save / f'iter_{iteration:07d}'}\n"
        f"further steps  {command_to_resume(args)} --train-iters {2 * iteration}"
    )


def how_to_go_on(args) -> str:
    """The checkpoint that is left and the command that continues from it."""
    steps = steps_in(args.save)
    if not steps:
        return f"there is no checkpoint in {args.save} yet, so the run starts afresh"
    place = args.save / f"iter_{steps[-1]:07d}"
    return f"saved is step {steps[-1]}, {place}; go on with: {command_to_resume(args)}"


def command_to_resume(args) -> str:
    """The command line that continues this run; its settings come from the checkpoint."""
    script = _shortest(Path(sys.argv[0]).absolute())
    scripts = Path(sys.executable).parent
    local, world = (os.environ.get(name) for name in ("LOCAL_WORLD_SIZE", "WORLD_SIZE"))
    if local and local != world:
        words = ["torchrun, on every node as before,"]
    elif local:
        launcher = scripts / "torchrun"
        words = [_shortest(launcher) if launcher.exists() else "torchrun"]
        words.append(f"--nproc_per_node={local}")
    else:
        words = [_shortest(Path(sys.executable))]
    words += [script, "--resume"]
    if args.output_dir.absolute() != newest_run(BASE).absolute():
        words += ["--output-dir", shlex.quote(str(args.output_dir))]
    if args.save != args.output_dir / CHECKPOINTS:
        words += ["--save", shlex.quote(str(args.save))]
    return " ".join(words)


def _shortest(path: Path) -> str:
    """Relative to the working directory where it lies below."""
    here = Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)


def read_metrics(output_dir: Path) -> list[dict[str, Any]]:
    """The steps recorded in a run's output folder; a last line that was cut off does not count."""
    path = output_dir / METRICS
    if not path.is_file():
        return []
    whole_lines = path.read_text().rpartition("\n")[0]
    return [json.loads(line) for line in whole_lines.splitlines()]


def plot_loss(history: list[dict[str, Any]], path: Path) -> None:
    """Draw loss over tokens seen: every step, and a running mean (a step sees few documents)."""
    from itertools import accumulate

    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4))
    tokens = [count / 1e6 for count in accumulate(m["tokens"] for m in history)]
    losses = [m["loss"] for m in history]
    smooth = list(accumulate(losses, lambda mean, loss: 0.9 * mean + 0.1 * loss))
    axes.plot(tokens, losses, linewidth=0.8, alpha=0.4, label="step")
    axes.plot(tokens, smooth, linewidth=1.6, color="C0", label="running mean")
    axes.legend(frameon=False)
    axes.set_xlabel("tokens seen (millions)")
    axes.set_ylabel("loss (nats per byte)")
    axes.set_title("Gated DeltaNet hybrid, training loss")
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120, bbox_inches="tight")
    plt.close(figure)
