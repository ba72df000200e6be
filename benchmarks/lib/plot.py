"""Pictures of figures: bars of times and memory, from the JSON lines of the
benchmarks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402  the backend must be chosen first
from matplotlib.figure import Figure  # noqa: E402

ROW = 0.22  # inches of one bar
GAP = 0.8  # bars that would fit between two cases


class Panel(NamedTuple):
    """One value of every record: a plot of bars."""

    title: str
    value: Callable[[dict], float]
    label: str  # how its number is printed
    floors: dict[tuple[str, str], float] = {}  # of cases that have one


def draw(records: list[dict], image: str | Path) -> Figure:
    """Draw one bar for every layer that was run in a case, and none for one that was
    not."""
    timed = [r for r in records if "layer" in r]
    if not timed:
        raise SystemExit("no line of bench_layer.py among these records")
    # of two alike, the later
    latest = {(r["case"], r["core"], r["layer"]): r for r in timed}
    cases: dict[tuple[str, str], list[dict]] = {}
    for (case, core, _), record in latest.items():
        cases.setdefault((case, core), []).append(record)
    floors = {
        (r["case"], r["core"]): r["floor"]["total"][1] for r in records if "floor" in r
    }
    first = timed[0]

    def total(record: dict) -> float:
        return record["forward_backward"]["median"]

    return _draw(
        cases,
        "layer",
        [
            Panel("forward + backward, ms", total, "%.1f", floors),
            Panel("left by the forward, MiB", lambda r: r["saved"], "%.0f"),
        ],
        f"Gated DeltaNet layer, hidden {first['hidden']}, heads {first['heads']}, d "
        f"128, bf16, {first['environment']['gpu']}",
        image,
    )


def draw_models(records: list[dict], image: str | Path) -> Figure:
    """Draw one bar for the step of every whole model."""
    latest = {(r["case"], r["graphs"], r["mixer"]): r for r in records}
    cases: dict[tuple[str, str], list[dict]] = {}
    for (case, graphs, _), record in latest.items():
        how = "eager" if graphs == "none" else f"{graphs} graphs"
        cases.setdefault((case, how), []).append(record)
    first = records[0]
    return _draw(
        cases,
        "mixer",
        [
            Panel("step, ms", lambda r: r["step_ms"], "%.0f"),
            Panel("peak memory, MiB", lambda r: r["peak"], "%.0f"),
        ],
        f"Hybrid model, {first['layers']} layers, hidden {first['hidden']}, "
        f"{first['micro_batches']} x {first['tokens']} tokens, bf16, "
        f"{first['environment']['gpu']}",
        image,
    )


def _draw(
    cases: dict[tuple[str, str], list[dict]],
    name: str,
    panels: list[Panel],
    title: str,
    image: str | Path,
) -> Figure:
    """Bars lie, each in a row of its own with its figure at its foot, so no label meets
    another.

    Args:
        cases: the records of each.
        name: under which a record says whose bar it is.
    """
    bars = [r for records in cases.values() for r in records]
    colours = {
        who: f"C{i}" for i, who in enumerate(dict.fromkeys(r[name] for r in bars))
    }
    height = ROW * (len(bars) + GAP * len(cases)) + 1.3
    figure, axes = plt.subplots(
        1, len(panels), figsize=(12, height), layout="constrained", sharey=True
    )
    for axis, panel in zip(axes, panels, strict=True):
        _bars(
            axis,
            cases,
            [[colours[r[name]] for r in of] for of in cases.values()],
            panel,
        )
        axis.set_title(panel.title)
    axes[0].invert_yaxis()

    keys = [plt.Rectangle((0, 0), 1, 1, color=colour) for colour in colours.values()]
    names = list(colours)
    if any(panel.floors for panel in panels):
        keys.append(plt.Line2D([], [], color="black", ls="--", lw=1))
        names.append("floor")
    figure.legend(keys, names, loc="outside lower center", ncols=len(names))
    figure.suptitle(title, fontsize=10)
    figure.savefig(image, dpi=150)
    return figure


def _bars(
    axis: plt.Axes,
    cases: dict[tuple[str, str], list[dict]],
    colours: list[list[str]],
    panel: Panel,
) -> None:
    row = 0.0
    middles = []
    largest = max(panel.value(r) for records in cases.values() for r in records)
    for (case, records), of_bars in zip(cases.items(), colours, strict=True):
        rows = [row + i for i in range(len(records))]
        values = [panel.value(r) for r in records]
        axis.barh(rows, values, 0.9, color=of_bars)
        for at, number in zip(rows, values, strict=True):
            fits = number > 0.1 * largest  # else beside its bar
            axis.text(
                0 if fits else number,
                at,
                f" {panel.label % number}",
                color="white" if fits else "black",
                va="center",
                fontsize=8,
            )
        if case in panel.floors:
            axis.vlines(
                panel.floors[case], rows[0] - 0.5, rows[-1] + 0.5, "black", "--", lw=1
            )
        middles.append((rows[0] + rows[-1]) / 2)
        row += len(records) + GAP
    axis.set_yticks(middles, ["\n".join(case) for case in cases])
    axis.tick_params(axis="y", length=0)
    axis.set_xlim(left=0)


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
