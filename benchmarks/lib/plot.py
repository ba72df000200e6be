"""The picture of README: bars of times and memory, from the JSON lines of the
benchmarks."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402  the backend must be chosen first
from matplotlib.figure import Figure  # noqa: E402


class Beside(NamedTuple):
    """What ours takes, and what megatron-core's takes in the same case."""

    group: str
    case: str
    ms: tuple[float, float]  # ours, theirs
    mib: tuple[float, float]


_TIMES = ("#1d5fb8", "#0d7a6b", "#a8500a")
_MEMORY = ("#c3d7f2", "#bfe3dc", "#f2d6b8")
_LINE = 0.215  # inches of a row, or of a group's name
_TITLE = "Time and memory beside megatron-core's layer: lower is better"


def draw_beside(rows: list[Beside], image: str | Path) -> Figure:
    """Draw ours as shares of megatron-core's: a bar for a row's time, one for its
    memory.

    Wide and low, so that text stands above and below it on a screen. The picture brings
    its own light ground, so that it is the same on a dark page.
    """
    groups = list(dict.fromkeys(row.group for row in rows))
    height = _LINE * (len(rows) + len(groups)) + 0.75
    figure, (names, *axes) = plt.subplots(
        1,
        3,
        figsize=(7.2, height),
        width_ratios=(1.5, 2, 2),
        layout="constrained",
        sharey=True,
    )
    top, group = 0.0, None
    for row in rows:
        shade = groups.index(row.group) % len(_TIMES)
        if row.group != group:
            group = row.group
            colour = _TIMES[shade]
            names.text(0, top, group, color=colour, weight="bold", va="center", size=9)
            top += 1.0
        names.text(0.03, top, row.case, va="center", size=9)
        _share(axes[0], top, row.ms, "ms", _TIMES[shade], "white")
        _share(axes[1], top, row.mib, "MiB", _MEMORY[shade], "#222")
        top += 1.0
    names.set_axis_off()
    for axis, label in zip(axes, ("time", "memory"), strict=True):
        axis.axvline(1, color="#444", lw=1)
        axis.set(xlim=(0, 1.25), yticks=())
        axis.set_xticks((0, 0.5, 1), ("0", "0.5", "1"), size=8)
        axis.set_title(f"{label}, megatron-core's is 1", size=9)
        axis.spines[["top", "right", "left"]].set_visible(False)
    names.set_ylim(top - 0.4, -0.6)
    figure.suptitle(_TITLE, size=10, weight="bold")
    figure.savefig(image, dpi=210, facecolor="white")
    return figure


def _share(
    axis: plt.Axes,
    at: float,
    of: tuple[float, float],
    unit: str,
    colour: str,
    ink: str,
) -> None:
    """A bar of ours over megatron-core's, both numbers in it, the share beside it."""
    share = of[0] / of[1]
    axis.barh(at, share, 0.8, color=colour)
    axis.text(max(share, 1) + 0.03, at, f"{share:.2f}", va="center", size=9)
    axis.text(0.015, at, f"{_pair(of)} {unit}", va="center", size=7.5, color=ink)


def _pair(of: tuple[float, float]) -> str:
    return " of ".join(f"{x:,.0f}" if x >= 100 else f"{x:.1f}" for x in of)
