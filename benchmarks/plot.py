"""Bars from the JSON lines of bench_layer.py: forward+backward and saved memory per case.

python3 benchmarks/plot.py results.jsonl layer.png
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402  the backend must be chosen first


def draw(records: list[dict], image: str | Path) -> None:
    timed = [r for r in records if "layer" in r]
    if not timed:
        raise SystemExit("no line of bench_layer.py among these records")
    groups = list(dict.fromkeys((r["case"], r["core"]) for r in timed))
    names = list(dict.fromkeys(r["layer"] for r in timed))
    floors = {(r["case"], r["core"]): r["floor"]["total"][1] for r in records if "floor" in r}

    figure, axes = plt.subplots(1, 2, figsize=(12, 4.2), layout="constrained")
    width = 0.8 / len(names)
    for axis, value, title, label in (
        (axes[0], lambda r: r["forward_backward"]["median"], "forward + backward, ms", "%.1f"),
        (axes[1], lambda r: r["saved"], "left by the forward, MiB", "%.0f"),
    ):
        for index, name in enumerate(names):
            found = {(r["case"], r["core"]): value(r) for r in timed if r["layer"] == name}
            bars = axis.bar(
                [i + index * width for i in range(len(groups))],
                [found.get(group, 0) for group in groups],
                width, label=name,
            )  # fmt: skip
            axis.bar_label(bars, fmt=label, fontsize=7)
        axis.set_title(title)
        axis.set_xticks(
            [i + 0.4 - width / 2 for i in range(len(groups))],
            [f"{case}\n{core}" for case, core in groups],
        )
    for i, group in enumerate(groups):
        if group in floors:
            axes[0].hlines(floors[group], i - width / 2, i + 0.8 - width / 2, "black", "--", lw=1)
    axes[0].plot([], [], "k--", lw=1, label="floor")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    first = timed[0]
    figure.suptitle(
        f"Gated DeltaNet layer, hidden {first['hidden']}, heads {first['heads']}, d 128, bf16, "
        f"{first['environment']['gpu']}",
        fontsize=10,
    )
    figure.savefig(image, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("lines")
    parser.add_argument("image")
    args = parser.parse_args()
    draw([json.loads(line) for line in Path(args.lines).read_text().splitlines()], args.image)


if __name__ == "__main__":
    main()
