"""The record of a run: progress bar, TensorBoard, metrics.jsonl, loss.png. Only rank 0
writes."""

from __future__ import annotations

import json
import sys
import threading
import time
from pathlib import Path
from typing import Any

from pretraining.curve import LOSS_CURVE, plot_loss
from pretraining.folders import METRICS, write_whole

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
        self,
        output_dir: Path,
        tensorboard_dir: Path,
        *,
        first: int,
        last: int,
        active: bool,
    ) -> None:
        self._active = active
        if not active:
            return
        from torch.utils.tensorboard import SummaryWriter

        output_dir.mkdir(parents=True, exist_ok=True)
        self._output_dir = output_dir
        self._held_out: float | None = None
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

    def held_out(self, loss: float | None) -> None:
        """Record the loss on held-out documents after the last step, for the curve."""
        self._held_out = loss

    def close(self) -> None:
        """Close the files and draw the curve; print a full disk, since the run is
        saved."""
        if not self._active:
            return
        self._progress.close()
        try:
            self._record.close()
            self._tensorboard.close()
            if self._history:
                plot_loss(self._history, self._output_dir / LOSS_CURVE, self._held_out)
        except OSError as error:
            self.say(f"{self._output_dir} cannot be written in full: {error}")


def _threads_hand_on_os_errors(args: threading.ExceptHookArgs) -> None:
    """Print no traceback for a full disk: TensorBoard's next call raises the thread's
    error."""
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
    """The bar's figures as lines: for the first step, the last, and some between."""

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
        self.say(
            f"step {self._done} of {self._last}: {figures}, "
            f"{left // 60}:{left % 60:02} left"
        )

    def close(self) -> None:
        pass


def read_metrics(output_dir: Path) -> list[dict[str, Any]]:
    """The steps recorded in a run's output folder, without a last line that was cut
    off."""
    path = output_dir / METRICS
    if not path.is_file():
        return []
    whole_lines = path.read_text().rpartition("\n")[0]
    return [json.loads(line) for line in whole_lines.splitlines()]
