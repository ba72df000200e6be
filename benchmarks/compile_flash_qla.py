"""Fills FlashQLA's compile cache, so that what comes after does not wait for it.

    python3 benchmarks/compile_flash_qla.py 16:32 16:16 8:16
    python3 benchmarks/compile_flash_qla.py 16:32 --operands bf16 fp16

FlashQLA compiles for one to two minutes per number of key and value heads, on one core. Here every
one has a process of its own. Heads are those of one rank: of 16:32, four ranks hold 4:8 each by
tensor parallelism or by exchange of heads, and all 16:32 each by state passing.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time

import torch
from bench_states import rule_inputs, runs

from megatron_gdn.ops.documents import Documents
from megatron_gdn.ops.fused import HeadSizes, resolve_core

SHORT, LONG = 200, 9000  # the second is cut into parts, by kernels of their own


def heads_of(text: str) -> tuple[int, int]:
    key, _, value = text.partition(":")
    return int(key), int(value)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("heads", nargs="+", type=heads_of, metavar="KEY:VALUE")
    parser.add_argument("--operands", nargs="+", choices=("bf16", "fp16"), default=["bf16"])
    parser.add_argument("--here", action="store_true", help="in this process, one after the other")
    return parser.parse_args()


def compile_here(heads: tuple[int, int], operands: str) -> None:
    """Every call of the core, over a batch, one sequence and several, with states and without."""
    sizes = HeadSizes(*heads, 128, 128)
    core = resolve_core(
        "flash_qla", device="cuda", dtype=torch.bfloat16, sizes=sizes, operands=operands
    ).core
    for tokens in (SHORT, LONG):
        inputs, d_o = rule_inputs(tokens, heads, "usual")
        operand = core.operand_dtype or torch.bfloat16
        inputs = inputs._replace(**{n: getattr(inputs, n).to(operand) for n in "qkv"})
        for batch, offsets in ((2, None), (1, None), (1, [0, tokens]), (1, [0, 99, tokens])):
            documents = None
            if offsets is not None:
                documents = Documents.from_cu_seqlens(offsets, tokens, device="cuda")
            rows = type(inputs)(*(x.expand(batch, *x.shape[1:]).contiguous() for x in inputs))
            d_rows = d_o.expand(batch, *d_o.shape[1:]).contiguous()
            for call in runs(core, rows, d_rows, documents).values():
                call()
    torch.cuda.synchronize()


def main() -> None:
    args = arguments()
    cases = [(heads, operands) for heads in args.heads for operands in args.operands]
    if args.here:
        for case in cases:
            compile_here(*case)
        return
    began, running = time.monotonic(), {}
    for (key, value), operands in cases:
        command = [sys.executable, __file__, f"{key}:{value}", "--operands", operands, "--here"]
        running[f"{key}:{value} {operands}"] = subprocess.Popen(command)
    failed = [case for case, process in running.items() if process.wait()]
    print(f"{len(running) - len(failed)} head counts in {time.monotonic() - began:.0f} s")
    if failed:
        raise SystemExit(f"not compiled: {', '.join(failed)}")


if __name__ == "__main__":
    main()
