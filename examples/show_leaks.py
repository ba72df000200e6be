"""Draw which packed document reaches which in transformers' model, as it is and
patched.

    python examples/show_leaks.py leaks.png

The model is the tiny one of finetune_transformers.py, in plain torch on the CPU. Every
document is replaced in turn; a cell is the largest change of a document's logits, over
its largest logit.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import matplotlib
import torch

from megatron_gdn.compat.observe import hide_import_notes

matplotlib.use("Agg")
hide_import_notes()
import matplotlib.pyplot as plt
from finetune_transformers import tiny_model
from matplotlib.colors import LogNorm

from megatron_gdn.hf import packing_reach, patch

LENGTHS = (5, 70, 3, 1, 64, 9)


def measured(hidden: int = 64) -> dict[str, torch.Tensor]:
    """``[N, N]`` for the model as it is and patched: row i changed, column j
    compared."""
    model = tiny_model(hidden)
    found = {"transformers": packing_reach(model, LENGTHS)}
    with patch(model):
        found["patched"] = packing_reach(model, LENGTHS)
    return {name: reach.change / reach.largest for name, reach in found.items()}


def draw(found: dict[str, torch.Tensor], image: str | Path) -> None:
    figure, axes = plt.subplots(
        1, len(found), figsize=(11, 5), layout="constrained", sharey=True
    )
    colours = plt.get_cmap("Reds").copy()
    colours.set_bad("white")  # no colour for 0
    for ax, (name, change) in zip(axes, found.items(), strict=True):
        shown = torch.where(change > 0, change, torch.nan).numpy()
        ax.imshow(shown, cmap=colours, norm=LogNorm(1e-4, 1))
        for row, line in enumerate(change.tolist()):
            for column, value in enumerate(line):
                text = f"{value:.1g}" if value else "0"
                ax.text(
                    column,
                    row,
                    text,
                    ha="center",
                    va="center",
                    color="white" if value > 0.1 else "black",
                )
        ticks = [f"{number}\n({length})" for number, length in enumerate(LENGTHS)]
        ax.set_xticks(range(len(LENGTHS)), ticks)
        ax.set_yticks(range(len(LENGTHS)), ticks)
        ax.set_title(name)
        ax.set_xlabel("document whose logits change (its tokens)")
    axes[0].set_ylabel("document that is replaced (its tokens)")
    figure.colorbar(
        axes[0].images[0], ax=axes, label="largest change over largest logit"
    )
    figure.savefig(image, dpi=110)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("image", help="a .png that is written")
    found = measured()
    draw(found, parser.parse_args().image)
    for name, change in found.items():
        others = change - change.diag().diag()
        print(f"{name}: a document changes another by up to {others.max().item():.1e}")


if __name__ == "__main__":
    main()
