"""What Triton makes of the mixer's kernels for Hopper, on a machine with or without a
GPU.

    python3 benchmarks/compile_kernels.py
    python3 benchmarks/compile_kernels.py --tokens 32768 --kernels backward --loops --keep /tmp/asm
    python3 benchmarks/compile_kernels.py --tokens 8192 --kernels mamba2

For each compilation its seconds of processor time by stage, registers, stack (spills
and frames) and shared memory, and with --loops the instructions of every loop. A launch
that an earlier one's compilation serves prints nothing. Needs what the triton wheel
brings along, ptxas included.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from lib.compiling import Compilation, Problem, compile_for_hopper, loops, nvidia_tool


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--tokens", type=int, nargs="+", default=[32768, 8192, 2048, 1000]
    )
    parser.add_argument(
        "--heads", type=int, nargs=2, default=(16, 32), metavar=("KEY", "VALUE")
    )
    parser.add_argument(
        "--kernels", nargs="+", default=["forward", "backward", "norms"]
    )
    parser.add_argument(
        "--loops", action="store_true", help="instructions of every loop"
    )
    parser.add_argument(
        "--keep", type=Path, help="folder for the assembly of each stage"
    )
    args = parser.parse_args()
    with compile_for_hopper() as done:
        for kernel in args.kernels:
            for documents, batch_invariant in ((0, False), (4, False), (4, True)):
                for tokens in args.tokens:
                    before = len(done)
                    problem = Problem(tokens, tuple(args.heads), documents)
                    getattr(problem, kernel)(batch_invariant=batch_invariant)
                    layout = "packed" if documents else "dense"
                    case = (
                        f"{layout}{', one path' if batch_invariant else ''}, {tokens} "
                        "tokens"
                    )
                    for n, one in enumerate(done[before:], start=before):
                        show(one, case, args.loops)
                        if args.keep:
                            keep(one, args.keep / f"{n:02d}-{one.kernel}")
    print(f"{len(done)} compilations, {sum(one.seconds for one in done):.1f} s")


def show(one: Compilation, case: str, with_loops: bool) -> None:
    stages = " ".join(f"{name} {seconds:.2f}" for name, seconds in one.stages.items())
    print(
        f"{one.kernel}, {case}: {one.seconds:.2f} s ({stages}), {one.registers} "
        f"registers, {one.stack} bytes of stack, {one.shared} of shared memory",
        flush=True,
    )
    for counts in loops(one) if with_loops else ():
        print(
            f"    {counts.total()}:",
            *(f"{name} {n}" for name, n in sorted(counts.items())),
        )


def keep(one: Compilation, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for stage, text in one.asm.items():
        if isinstance(text, str):
            (folder / stage).write_text(text)
    (folder / "sass").write_text(nvidia_tool("nvdisasm", one.asm["cubin"], "-c"))


if __name__ == "__main__":
    main()
