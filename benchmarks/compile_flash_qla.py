"""Fills FlashQLA's compile cache, so that what comes after does not wait for it.

    python3 benchmarks/compile_flash_qla.py 16:32 16:16 8:16
    python3 benchmarks/compile_flash_qla.py 16:32 --operands bf16 --parts cut   # deterministic mode
    TILELANG_CACHE_DIR=kernels python3 benchmarks/compile_flash_qla.py 16:32 --processes 2

FlashQLA compiles some 25 kernels per number of key and value heads, for four minutes on one core.
Here every part of them has a process of its own. Heads are those of one rank: of 16:32, four ranks
hold 4:8 each by tensor parallelism or by exchange of heads, and all 16:32 each by state passing.
megatron-core's layer repeats key heads first: 32:32.

Without a GPU, kernels are compiled for Hopper and not run; the cache then serves a machine that has
one (as ~/.tilelang/cache, or where TILELANG_CACHE_DIR points there).

    rows     a batch of whole rows
    uncut    sequences too short to be cut, one and several
    cut      a sequence cut into parts that run side by side; all sequences in deterministic mode
    states   states in and out, as in context parallelism
"""

from __future__ import annotations

import argparse
import math
import subprocess
import sys
import time
from collections.abc import Callable

import torch
from bench_states import rule_inputs, with_states, without_states
from layers import DEVICE
from without_gpu import stand_in_for_hopper

from megatron_gdn.ops.delta_rule.resolve import OPERANDS, RuleInputs, resolve_rule
from megatron_gdn.ops.documents import Documents
from megatron_gdn.ops.head_sizes import HeadSizes
from megatron_gdn.ops.rule import Rule

SHORT, LONG = 200, 9000  # the second is cut
# FlashQLA's forward has a kernel for batches of as many sequences times heads as 0.7 of the GPU's
# multiprocessors (132), one for half of that and one for fewer.
FULL = 92


def heads_of(text: str) -> tuple[int, int]:
    key, _, value = text.partition(":")
    return int(key), int(value)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("heads", nargs="+", type=heads_of, metavar="KEY:VALUE")
    parser.add_argument("--operands", nargs="+", choices=OPERANDS, default=list(OPERANDS))
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--processes", type=int, default=64, help="at most, side by side")
    parser.add_argument("--here", action="store_true", help="in this process, one after the other")
    return parser.parse_args()


class Problem:
    """Inputs for one number of heads, and the rule that is to compile."""

    def __init__(self, heads: tuple[int, int], operands: str) -> None:
        self.heads = heads
        self.rule: Rule = resolve_rule(
            "flash_qla", device="cuda", dtype=torch.bfloat16,
            sizes=HeadSizes(*heads, 128, 128), operands=operands,
        ).rule  # fmt: skip

    def counts(self) -> list[int]:
        """Numbers of sequences that bring in every kernel of the forward."""
        heads = self.heads[1]
        return sorted({1, math.ceil(FULL / 2 / heads), math.ceil(FULL / heads)})

    def run(self, calls: Callable, documents: Documents | None, tokens: int, rows: int = 1) -> None:
        inputs, d_o = rule_inputs(tokens, self.heads, "usual")
        operand = self.rule.operand_dtype or torch.bfloat16
        inputs = inputs._replace(**{n: getattr(inputs, n).to(operand) for n in "qkv"})
        inputs = RuleInputs(*(x.expand(rows, *x.shape[1:]).contiguous() for x in inputs))
        d_o = d_o.expand(rows, *d_o.shape[1:]).contiguous()
        for call in calls(self.rule, inputs, d_o, documents).values():
            call()


def documents_of(count: int) -> Documents:
    offsets = [n * SHORT // count for n in range(count + 1)]
    return Documents.from_cu_seqlens(offsets, SHORT, device=DEVICE)


def compile_rows(problem: Problem) -> None:
    for rows in {max(2, count) for count in problem.counts()}:  # a single row counts as a sequence
        problem.run(without_states, None, SHORT, rows)


def compile_uncut(problem: Problem) -> None:
    for count in problem.counts():
        problem.run(without_states, documents_of(count), SHORT)


def compile_cut(problem: Problem) -> None:
    problem.run(without_states, None, LONG)


def compile_states(problem: Problem) -> None:
    for count in problem.counts():
        problem.run(with_states, documents_of(count), SHORT)


PARTS: dict[str, Callable[[Problem], None]] = {
    "rows": compile_rows,
    "uncut": compile_uncut,
    "cut": compile_cut,
    "states": compile_states,
}


def main() -> None:
    args = arguments()
    cases = [(h, o, part) for h in args.heads for o in args.operands for part in args.parts]
    if args.here:
        if DEVICE == "cpu":
            stand_in_for_hopper()
        for heads, operands, part in cases:
            PARTS[part](Problem(heads, operands))
        torch.cuda.synchronize()
        return
    began, waiting, running, failed = time.monotonic(), {}, {}, []
    for (key, value), operands, part in cases:
        command = [sys.executable, __file__, f"{key}:{value}"]
        command += ["--operands", operands, "--parts", part, "--here"]
        waiting[f"{key}:{value} {operands} {part}"] = command
    while running or waiting:
        while waiting and len(running) < args.processes:
            case, command = waiting.popitem()
            running[case] = subprocess.Popen(command)
        time.sleep(0.2)
        for case in [case for case, process in running.items() if process.poll() is not None]:
            code = running.pop(case).returncode
            said = "compiled" if code == 0 else f"FAILED ({code})"
            print(f"{case}: {said} after {time.monotonic() - began:.0f} s", flush=True)
            failed += [case] if code else []
    if failed:
        raise SystemExit(f"not compiled: {', '.join(failed)}")


if __name__ == "__main__":
    main()
