"""Bars from the JSON lines of bench_layer.py: forward+backward and saved memory per case.

python3 benchmarks/plot.py results.jsonl layer.png
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402  the backend must be chosen first
from matplotlib.figure import Figure  # noqa: E402

ROW = 0.22  # inches of one bar
GAP = 0.8  # bars that would fit between two cases


def draw(records: list[dict], image: str | Path) -> Figure:
    """Draw one bar for every layer that was run in a case, and none for one that was not.

    Bars lie, each in a row of its own with its figure at its foot, so no label meets another.
    """
    timed = [r for r in records if "layer" in r]
    if not timed:
        raise SystemExit("no line of bench_layer.py among these records")
    latest = {(r["case"], r["core"], r["layer"]): r for r in timed}  # of two alike, the later
    cases: dict[tuple[str, str], list[dict]] = {}
    for (case, core, _), record in latest.items():
        cases.setdefault((case, core), []).append(record)
    floors = {(r["case"], r["core"]): r["floor"]["total"][1] for r in records if "floor" in r}
    colours = {name: f"C{i}" for i, name in enumerate(dict.fromkeys(r["layer"] for r in timed))}

    height = ROW * (len(latest) + GAP * len(cases)) + 1.3
    figure, axes = plt.subplots(1, 2, figsize=(12, height), layout="constrained", sharey=True)
    _bars(axes[0], cases, colours, lambda r: r["forward_backward"]["median"], "%.1f", floors)
    axes[0].set_title("forward + backward, ms")
    _bars(axes[1], cases, colours, lambda r: r["saved"], "%.0f", {})
    axes[1].set_title("left by the forward, MiB")
    axes[0].invert_yaxis()

    keys = [plt.Rectangle((0, 0), 1, 1, color=colour) for colour in colours.values()]
    names = list(colours)
    if floors:
        keys.append(plt.Line2D([], [], color="black", ls="--", lw=1))
        names.append("floor")
    figure.legend(keys, names, loc="outside lower center", ncols=len(names))
    first = timed[0]
    figure.suptitle(
        f"Gated DeltaNet layer, hidden {first['hidden']}, heads {first['heads']}, d 128, bf16, "
        f"{first['environment']['gpu']}",
        fontsize=10,
    )
    figure.savefig(image, dpi=150)
    return figure


def _bars(
    axis: plt.Axes,
    cases: dict[tuple[str, str], list[dict]],
    colours: dict[str, str],
    value: Callable[[dict], float],
    label: str,
    floors: dict[tuple[str, str], float],
) -> None:
    row, middles = 0.0, []
    largest = max(value(r) for records in cases.values() for r in records)
    for case, records in cases.items():
        rows = [row + i for i in range(len(records))]
        values = [value(r) for r in records]
        axis.barh(rows, values, 0.9, color=[colours[r["layer"]] for r in records])
        for at, number in zip(rows, values, strict=True):
            fits = number > 0.1 * largest  # else beside its bar
            axis.text(
                0 if fits else number, at, f" {label % number}",
                color="white" if fits else "black", va="center", fontsize=8,
            )  # fmt: skip
        if case in floors:
            axis.vlines(floors[case], rows[0] - 0.5, rows[-1] + 0.5, "black", "--", lw=1)
        middles.append((rows[0] + rows[-1]) / 2)
        row += len(records) + GAP
    axis.set_yticks(middles, [f"{case}\n{core}" for case, core in cases])
    axis.tick_params(axis="y", length=0)
    axis.set_xlim(left=0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("lines")
    parser.add_argument("image")
    args = parser.parse_args()
    draw([json.loads(line) for line in Path(args.lines).read_text().splitlines()], args.image)


if __name__ == "__main__":
    main()
