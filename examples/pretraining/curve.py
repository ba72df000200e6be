"""The picture of a run's loss, drawn from its record."""

from __future__ import annotations

from itertools import accumulate
from pathlib import Path
from typing import Any

LOSS_CURVE = "loss.png"


def plot_loss(
    history: list[dict[str, Any]], path: Path, held_out: float | None = None
) -> None:
    """Draw loss over tokens seen: every step, a running mean, the held-out loss at the
    end."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4))
    tokens = [count / 1e6 for count in accumulate(m["tokens"] for m in history)]
    losses = [m["loss"] for m in history]
    axes.plot(tokens, losses, linewidth=0.8, alpha=0.4, label="step")
    axes.plot(
        tokens, running_mean(losses), linewidth=1.6, color="C0", label="running mean"
    )
    if held_out is not None:
        label = f"held-out documents, at the end: {held_out:.3f}"
        axes.axhline(held_out, linewidth=1, linestyle="--", color="C1", label=label)
    axes.legend(frameon=False)
    axes.set_xlabel("tokens seen (millions)")
    axes.set_ylabel("loss (nats per byte)")
    axes.set_title("Gated DeltaNet hybrid, loss")
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120, bbox_inches="tight")
    plt.close(figure)


def running_mean(values: list[float], decay: float = 0.9) -> list[float]:
    """``sum_i decay^(t-i) x_i / sum_i decay^(t-i)``, i <= t: the first value weighs as
    the others.

    A step sees few documents, so its loss alone jumps.
    """
    means = []
    total = 0.0
    weight = 0.0
    for value in values:
        total = decay * total + value
        weight = decay * weight + 1
        means.append(total / weight)
    return means
