"""``python -m megatron_gdn.warm_up``: reads the options and compiles the kernels of a
run.

This process and its forks use no GPU: the process hides all GPUs before it imports
torch.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

from ..command_line import (
    MOST_RANKS,
    Parser,
    parse_heads,
    parse_whole_number,
    print_error,
)


def main(argv: Sequence[str] | None = None) -> int:
    """Compile the kernels. Returns the exit status: 0, or 1 if a kernel failed, 2 for
    an error, 130 after Ctrl-C."""
    arguments = parse(argv)
    if arguments.for_a_run:
        _exit_when_run_exits()
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    try:
        return _compile(arguments)
    except (ValueError, ImportError, OSError) as error:
        return print_error(error)
    except KeyboardInterrupt:
        print("stopped; kernels compiled so far are kept", file=sys.stderr)
        return 130


def _exit_when_run_exits() -> None:
    """Kill this process group at the end of its standard input.

    The run that started the group closes this input; if the run is killed, the system
    closes it.
    """

    def kill_group_at_end_of_input() -> None:
        """Wait for the end of standard input; then kill this process, its forks and
        compilers."""
        # os.read takes no lock, but a read of sys.stdin would. A fork closes sys.stdin,
        # and would wait for this lock.
        while os.read(0, 4096):
            pass
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=kill_group_at_end_of_input, daemon=True).start()


def _compile(arguments: argparse.Namespace) -> int:
    """Compile the kernels that are missing in the caches; return the exit status 0 or
    1."""
    began = time.monotonic()
    from ..compat.observe import hide_import_notes

    hide_import_notes()
    from ..ops.kernels.builds import build_lock
    from .absent_gpu import simulated_hopper
    from .layers import sizes_from_options, tasks_of
    from .tasks import run_tasks

    sizes = sizes_from_options(arguments)
    with simulated_hopper(arguments.multiprocessors), ExitStack() as locks:
        tasks, compiled_heads = tasks_of(sizes, arguments)
        # With --for-a-run, the run that started this command holds the locks.
        if not arguments.for_a_run:
            # A run that starts now waits for the locks and does not compile the same
            # kernels.
            for each in sorted(compiled_heads, key=str):
                locks.enter_context(build_lock(each.lock, f"FlashQLA for {each}"))
        count = len(tasks)
        print(
            f"{count} kernels are looked up, and compiled where they are missing",
            flush=True,
        )
        compiled, failures = run_tasks(tasks, arguments.processes)
    took = f"after {time.monotonic() - began:.0f} s"
    for name, error in failures.items():
        print(f"not compiled: {name}:\n{error}", file=sys.stderr)
    if failures:
        print(
            f"{len(failures)} of {count} failed {took}: {', '.join(failures)}",
            flush=True,
        )
        return 1
    if compiled:
        done = f"{compiled} were compiled"
    else:
        done = "all were there"
    print(f"{count} of {count} are ready {took}; {done}", flush=True)
    return 0


_MOST_PROCESSES = 2**12
_MOST_MULTIPROCESSORS = 2**10

_DESCRIPTION = """\
Compile, before a run, the kernels of its Gated DeltaNet layers for Hopper GPUs, in parallel
processes. No GPU is needed. Kernels in the caches are not compiled again.

    python -m megatron_gdn.warm_up --config config.json --tp 2 --cp 2
    python -m megatron_gdn.warm_up --heads 16:32
    python -m megatron_gdn.warm_up --heads 16:32 --operands bf16 --uses cut states
"""
_EPILOG = """\
Kernels go to TILELANG_CACHE_DIR (or ~/.tilelang/cache) and TRITON_CACHE_DIR (or ~/.triton/cache).
The run must use the same folders and the same versions of the packages.
"""


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the options; exit with status 2 and a message if an option is not legal."""
    parser = Parser(
        "python -m megatron_gdn.warm_up", description=_DESCRIPTION, epilog=_EPILOG
    )
    model = parser.add_argument_group("the model").add_mutually_exclusive_group(
        required=True
    )
    model.add_argument(
        "--config",
        metavar="FILE",
        help="config.json or a Hugging Face folder; or a launch script or YAML that names "
        "Megatron's linear_* arguments, and parallel sizes if it has them",
    )
    model.add_argument(
        "--heads",
        type=parse_heads,
        metavar="KEY:VALUE",
        help="of the whole layer, as 16:32",
    )

    def add_number(name: str, most: int, **settings: Any) -> None:
        """Add the option ``name``, a whole number from 1 to ``most``; ``settings``: more
        arguments of ``add_argument``."""
        parse_number = partial(parse_whole_number, most=most)
        parser.add_argument(name, type=parse_number, metavar="N", **settings)

    add_list = partial(parser.add_argument, nargs="+")  # an option with several values
    add_number("--tp", MOST_RANKS, help="tensor parallel ranks (1)")
    add_number("--cp", MOST_RANKS, help="context parallel ranks (1)")
    parser.add_argument(
        "--linear-cp-mode",
        choices=("auto", "headwise", "chunkwise"),
        default="auto",
        help="the scheme of context parallelism; auto may use both (auto)",
    )
    parser.add_argument(
        "--operands",
        choices=("fp16", "bf16"),
        default="fp16",
        help="the layer's rule_operands; deterministic mode needs bf16 (fp16)",
    )
    add_list(
        "--kernels",
        choices=("flash_qla", "triton"),
        default=["flash_qla", "triton"],
        help="the kernels to compile (flash_qla triton)",
    )
    add_list(
        "--uses",
        "--parts",  # an earlier name
        choices=("cut", "rows", "uncut", "states", "whole", "recompute"),
        help="the uses of FlashQLA: cut (long sequences), rows (a batch), uncut (short documents), "
        "states (chunkwise), whole (batch_invariant_mode), recompute (recompute=full). "
        "The default is all but the last two; without context parallelism all but the "
        "last three",
    )
    add_number(
        "--processes", _MOST_PROCESSES, help="processes at a time (one per core)"
    )
    add_number(
        "--multiprocessors",
        _MOST_MULTIPROCESSORS,
        default=132,
        help="number in the GPU; FlashQLA chooses its kernels by this number (132)",
    )
    parser.add_argument("--for-a-run", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
