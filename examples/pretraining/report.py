"""What a run shows and leaves behind: progress bar, TensorBoard, metrics.jsonl, loss curve.

Only rank 0 writes. One line of ``metrics.jsonl`` per step is the record; the plot is drawn from it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

METRICS = "metrics.jsonl"
LOSS_CURVE = "loss.png"


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
        from tqdm import tqdm

        output_dir.mkdir(parents=True, exist_ok=True)
        self._output_dir = output_dir
        self._history = [m for m in read_metrics(output_dir) if m["iteration"] <= first]
        self._record = (output_dir / METRICS).open("w", buffering=1)
        for metrics in self._history:
            self._record.write(json.dumps(metrics) + "\n")
        self._tensorboard = SummaryWriter(str(tensorboard_dir), purge_step=first + 1)
        self._bar = tqdm(
            initial=first, total=last, unit="step", desc="training", dynamic_ncols=True
        )

    def say(self, text: str) -> None:
        """A line above the progress bar."""
        if self._active:
            self._bar.write(text)

    def step(self, **metrics: Any) -> None:
        """Record one step: iteration, loss, lr, grad_norm, tokens, seconds."""
        if not self._active:
            return
        self._history.append(metrics)
        self._record.write(json.dumps(metrics) + "\n")
        speed = metrics["tokens"] / metrics["seconds"]
        for name in ("loss", "lr", "grad_norm"):
            self._tensorboard.add_scalar(name, metrics[name], metrics["iteration"])
        self._tensorboard.add_scalar("tokens_per_second", speed, metrics["iteration"])
        self._bar.set_postfix_str(f"loss {metrics['loss']:.3f}, {speed:,.0f} tok/s", refresh=False)
        self._bar.update()

    def close(self) -> None:
        if not self._active:
            return
        self._bar.close()
        self._record.close()
        self._tensorboard.close()
        if self._history:
            plot_loss(self._history, self._output_dir / LOSS_CURVE)


def read_metrics(output_dir: Path) -> list[dict[str, Any]]:
    """The steps recorded in a run's output folder; empty when there are none."""
    path = output_dir / METRICS
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


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
