"""Seconds from the start of a process to its first steps, and what it waited for.

TILELANG_CACHE_DIR=$(mktemp -d) TRITON_CACHE_DIR=$(mktemp -d) python3 benchmarks/bench_cold_start.py
python3 benchmarks/bench_cold_start.py      # the caches as they are
"""

from __future__ import annotations

import time

BEGAN = time.monotonic()

import argparse  # noqa: E402
import json  # noqa: E402
import logging  # noqa: E402
import os  # noqa: E402

import torch  # noqa: E402
import triton  # noqa: E402
from lib.layers import Case, our_layer, start_megatron, thd  # noqa: E402

from megatron_gdn.ops.delta_rule.base import HeadSizes  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--heads", type=int, nargs=2, default=(16, 32), metavar=("KEY", "VALUE")
    )
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--documents", type=int, default=0)
    parser.add_argument("--deterministic", action="store_true")
    args = parser.parse_args()
    logging.basicConfig(format="%(relativeCreated)d ms %(name)s: %(message)s")
    seconds, compiled = {}, []  # the second: Triton kernels that this process compiled

    def listen(**event) -> None:
        if not event["cache_hit"]:
            compiled.append(event["metadata"]["name"])

    triton.knobs.compilation.listener = listen

    def took(what: str, since: float) -> float:
        torch.cuda.synchronize()
        seconds[what] = round(time.monotonic() - since, 2)
        return time.monotonic()

    at = took("imports", BEGAN)
    start_megatron()
    sizes = HeadSizes(*args.heads, 128, 128)
    layer = our_layer(args.hidden, sizes, "flash_qla", deterministic=args.deterministic)
    x = torch.randn(
        args.tokens,
        1,
        args.hidden,
        dtype=torch.bfloat16,
        device="cuda",
        requires_grad=True,
    )
    packed = thd(Case("", 1, args.tokens, args.documents).offsets())
    at = took("layer", at)
    for step in ("first", "second", "third"):
        out, _ = layer(x, None, packed_seq_params=packed)
        at = took(f"{step} forward", at)
        out.backward(torch.ones_like(out))
        at = took(f"{step} backward", at)
    took("all", BEGAN)
    cores = len(os.sched_getaffinity(0))
    print(
        json.dumps(
            {"cores": cores, **vars(args), "seconds": seconds, "triton": compiled}
        )
    )


if __name__ == "__main__":
    main()
