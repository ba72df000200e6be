"""A layer on a prompt with several responses: packed as a tree, and separately.

    python3 benchmarks/bench_shared_prefix.py                                             one GPU
    OMP_NUM_THREADS=1 python3 benchmarks/bench_shared_prefix.py --hidden 256 --heads 2 4  a CPU

Both run forward and backward in turn. The outputs of the responses are compared in the same run.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from itertools import accumulate

import torch
from lib.layers import DEVICE, our_layer, start_megatron, thd

from megatron_gdn import tree_packed_seq_params
from megatron_gdn.ops.delta_rule.base import HeadSizes


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompt", type=int, default=2048, help="tokens")
    parser.add_argument(
        "--responses", type=int, nargs=2, default=(16, 256), metavar=("N", "TOKENS")
    )
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--heads", type=int, nargs=2, default=(16, 32), metavar=("KEY", "VALUE"))
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--repeats", type=int, default=5)
    return parser.parse_args()


def seconds(run: Callable[[], object]) -> float:
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    began = time.perf_counter()
    run()
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began


def main() -> None:
    args = arguments()
    start_megatron()
    prompt, (count, length) = args.prompt, args.responses
    layer = our_layer(args.hidden, HeadSizes(*args.heads, 128, 128), args.backend)
    x = torch.randn(prompt + count * length, 1, args.hidden, device=DEVICE).bfloat16()
    prompts, responses = x[:prompt], x[prompt:].split(length)
    apart = torch.cat([part for response in responses for part in (prompts, response)])
    ends = list(accumulate([prompt + length] * count, initial=0))
    tree = tree_packed_seq_params([prompt, *[length] * count], [-1, *[0] * count], device=DEVICE)

    def step(rows: torch.Tensor, packed) -> torch.Tensor:
        out, _ = layer(rows.detach().requires_grad_(), None, packed_seq_params=packed)
        out.backward(torch.ones_like(out))
        return out.detach()

    ways = {"as a tree": (x, tree), "separately": (apart, thd(ends))}
    as_tree, separately = (step(*way) for way in ways.values())
    copies = torch.cat([separately[end - length : end] for end in ends[1:]])
    error = (as_tree[prompt:].float() - copies.float()).abs().max() / copies.float().abs().max()
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(args.repeats):
        for name, way in ways.items():
            times[name].append(seconds(lambda way=way: step(*way)))
    median = {name: statistics.median(values) for name, values in times.items()}
    for name, (rows, _) in ways.items():
        print(f"{name}: {len(rows)} tokens, {1e3 * median[name]:.1f} ms")
    ratio = median["as a tree"] / median["separately"]
    print(f"ratio {ratio:.3f} (tokens {len(x) / len(apart):.3f}); rule {layer.backend}, {DEVICE}")
    print(f"responses differ by {error:.1e} of the largest")


if __name__ == "__main__":
    main()
