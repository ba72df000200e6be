"""Loss curves of a small hybrid model under FP8, beside two bf16 runs from other
weights.

    python3 benchmarks/fp8_curves.py                                    # one GPU
    python3 benchmarks/fp8_curves.py --modules local --steps 4 --tokens 64 --recipes  # CPU

GDN, attention and MLP layers, through Megatron's schedule, over the Python standard
library's source. Printed is each run's mean distance from the first bf16 run over the
last tenth of the steps. Then the first recipe's run goes on from a checkpoint of its
middle, and so does an FP8 run from bf16's; these losses are printed beside those of the
uninterrupted run.
"""

from __future__ import annotations

import argparse
import copy
import os
import time
from pathlib import Path
from typing import Any

import torch
from bench_model import MICRO_BATCHES, Trainer, build
from lib.layers import DEVICE, start_megatron
from lib.measure import write_lines

RECIPES = ("tensorwise", "delayed", "blockwise")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--modules", choices=("te", "local"), default="te")
    parser.add_argument("--recipes", nargs="*", choices=RECIPES, default=list(RECIPES))
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument(
        "--seconds", type=float, default=1e9, help="start no new run after this"
    )
    parser.add_argument("--out", help="append JSON lines to this file")
    return parser.parse_args()


def text(tokens: int, steps: int) -> torch.Tensor:
    """``[steps, micro-batches, 1, tokens + 1]``: stretches of source, in an order of
    their own."""
    sources = sorted(Path(os.__file__).parent.glob("*.py"))
    stream = torch.frombuffer(
        bytearray(b"".join(p.read_bytes() for p in sources)), dtype=torch.uint8
    )
    pieces = (
        stream[: len(stream) // (tokens + 1) * (tokens + 1)]
        .view(-1, 1, tokens + 1)
        .long()
    )
    order = torch.randperm(len(pieces), generator=torch.Generator().manual_seed(1))
    return pieces[order[: steps * MICRO_BATCHES]].unflatten(0, (steps, MICRO_BATCHES))


class Run:
    """A model in training."""

    def __init__(self, recipe: str | None, seed: int, args: argparse.Namespace) -> None:
        from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

        te = args.modules == "te"
        model_parallel_cuda_manual_seed(0, te_rng_tracker=te, force_reset_rng=True)
        args.fp8_recipe = recipe
        args.seed = seed
        args.fused_rope = False
        args.buffers = False
        self.trainer = Trainer(build("ours", "none", False, args), False, args)
        for group in self.trainer.optimizer.param_groups:
            group["lr"] = 1e-3
        self.losses: list[float] = []

    def train(self, batches: torch.Tensor) -> None:
        for batch in batches:
            self.trainer.tokens = batch.to(DEVICE)
            self.losses.append(float(self.trainer.step()))

    def checkpoint(self) -> Any:
        parts = self.trainer.ddp.state_dict(), self.trainer.optimizer.state_dict()
        return copy.deepcopy(parts)

    def load(self, checkpoint: Any) -> None:
        model, optimizer = copy.deepcopy(checkpoint)
        self.trainer.ddp.load_state_dict(model, strict=False)
        self.trainer.optimizer.load_state_dict(optimizer)


def main() -> None:
    args = arguments()
    began = time.monotonic()
    half = args.steps // 2
    start_megatron()
    batches = text(args.tokens, args.steps)
    runs: dict[str, list[float]] = {}
    middles: dict[str, Any] = {}
    kinds = [("bf16", None, 5), ("bf16, other weights", None, 6)]
    for name, recipe, seed in kinds + [(recipe, recipe, 5) for recipe in args.recipes]:
        if time.monotonic() - began > args.seconds:
            print(f"{name}: skipped, out of time", flush=True)
            continue
        run = Run(recipe, seed, args)
        run.train(batches[:half])
        middles[name] = run.checkpoint()
        run.train(batches[half:])
        runs[name] = run.losses
        last = max(1, args.steps // 10)
        apart = [abs(a - b) for a, b in zip(run.losses, runs["bf16"], strict=True)][
            -last:
        ]
        print(
            f"{name}: loss {run.losses[0]:.4f} .. {run.losses[half]:.4f} .. "
            f"{run.losses[-1]:.4f}, from bf16 {sum(apart) / last:.4f}, largest "
            f"{max(apart):.4f}",
            flush=True,
        )
        write_lines(args.out, [{"run": name, "losses": run.losses}])
        del run
    for source in (args.recipes[0] if args.recipes else "bf16", "bf16"):
        if source not in middles or time.monotonic() - began > args.seconds:
            continue
        run = Run(args.recipes[0] if args.recipes else None, 7, args)
        run.load(middles[source])
        run.train(batches[half : half + 10])
        same = runs[source][half : half + 10]
        apart = max(abs(a - b) for a, b in zip(run.losses, same, strict=False))
        print(
            f"on from {source}: {run.losses[0]:.4f}, was {same[0]:.4f}; largest "
            f"{apart:.2e}"
        )


if __name__ == "__main__":
    main()
