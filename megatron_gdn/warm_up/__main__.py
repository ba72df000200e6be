"""``python -m megatron_gdn.warm_up``: from the command line to compiled kernels.

This process and its forks use no GPU, but to tune fla's kernels: all are hidden before torch is
imported.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING

from ..command_line import Parser, refuse

if TYPE_CHECKING:
    from .tasks import Task


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 0: all is compiled. 1: some kernels failed. 2: an error, printed on stderr."""
    argv = sys.argv[1:] if argv is None else argv
    arguments = parse(argv)
    if arguments.for_a_run:
        _end_with_the_run()
    environment = dict(os.environ)
    tunes_alone = arguments.kernels == ["fla"] and not arguments.dry_run
    try:
        if tunes_alone:
            from .calls import models_of
            from .layers import tune_fla

            tune_fla(models_of(arguments), arguments)
            return 0
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        os.environ["MEGATRON_GDN_COMPILE_AHEAD"] = "0"  # layers that are built here start nothing
        status = _compile_all(arguments)
    except (ValueError, ImportError, OSError) as error:
        return refuse(error)
    except KeyboardInterrupt:
        print("stopped; what was compiled stays", file=sys.stderr)
        return 130
    if "fla" in arguments.kernels and not arguments.dry_run:  # in a process that sees the GPUs
        command = [sys.executable, "-m", "megatron_gdn.warm_up", *argv, "--kernels", "fla"]
        status = max(status, subprocess.run(command, env=environment, check=False).returncode)
    return status


def _compile_all(arguments: argparse.Namespace) -> int:
    began = time.monotonic()
    from ..compat.quiet import hide_import_notes

    hide_import_notes()
    from ..ops.kernels.builds import build_lock
    from .absent_gpu import absent_hopper
    from .calls import models_of
    from .layers import tasks_of

    models = models_of(arguments)
    with absent_hopper(arguments.multiprocessors), ExitStack() as locks:
        tasks, parts = tasks_of(models, arguments)
        if arguments.dry_run:
            return _show(tasks)
        if not arguments.for_a_run:  # such a run holds the locks already
            # A run that starts meanwhile waits for what it needs, and does not compile it too.
            for heads in sorted(parts, key=str):
                locks.enter_context(build_lock(heads.lock, f"FlashQLA for {heads}"))
        status = _compile(tasks, arguments.processes, began)
    for heads, compiled in parts.items() if status == 0 else ():
        for part in compiled:
            heads.done_file(part, arguments.multiprocessors).touch()
    return status


def _end_with_the_run() -> None:
    """End this process and its group, when the run that asked for it ends.

    The run holds the other end of standard input, and started this process as the leader of a
    process group: of all its forks, and of the compilers.
    """

    def watch() -> None:
        # Not sys.stdin: a fork closes it, and would wait for the lock of the thread that reads it.
        while os.read(0, 4096):
            pass
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


def _show(tasks: list[Task]) -> int:
    known = [task for task in tasks if task.found]
    missing = [task for task in known if task.missing]
    for task in missing:
        print(f"missing: {task.name}")
    print(f"FlashQLA: {len(known) - len(missing)} kernels are there, {len(missing)} are missing")
    if len(known) < len(tasks):
        print(f"Triton: {len(tasks) - len(known)} launches, which only compiling looks up")
    return 0


def _compile(tasks: list[Task], processes: int | None, began: float) -> int:
    from .tasks import processors, run_tasks

    missing, count = [task for task in tasks if task.missing], len(tasks)
    at_once = min(processes or processors(), len(missing))
    print(
        f"{count - len(missing)} of {count} are there; the rest is compiled or looked up in "
        f"{at_once} processes",
        flush=True,
    )
    compiled, failures = run_tasks(missing, at_once)
    took = f"after {time.monotonic() - began:.0f} s"
    for name, error in failures.items():
        print(f"not compiled: {name}:\n{error}", file=sys.stderr)
    if failures:
        print(f"{len(failures)} of {count} failed {took}: {', '.join(failures)}", flush=True)
        return 1
    done = f"{compiled} were compiled" if compiled else "all were there"
    print(f"{count} of {count} are ready {took}; {done}", flush=True)
    return 0


_DESCRIPTION = """\
Compile ahead of a run the kernels that its Gated DeltaNet layers need, for Hopper GPUs, in parallel
processes. No GPU is needed. What lies in the caches already is left alone: a second run takes
seconds.

    python -m megatron_gdn.warm_up --config config.json --tp 2 --cp 2
    python -m megatron_gdn.warm_up --heads 16:32
    python -m megatron_gdn.warm_up --heads 16:32 8:16 --operands bf16 --parts cut states
"""
_EPILOG = """\
Kernels go to TILELANG_CACHE_DIR (or ~/.tilelang/cache) and TRITON_CACHE_DIR (or ~/.triton/cache).
The run must see the same folders and have the same versions of the packages.
"""


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Exits with status 2 and a message if the arguments are not legal."""
    parser = Parser("python -m megatron_gdn.warm_up", description=_DESCRIPTION, epilog=_EPILOG)
    model = parser.add_argument_group("the model").add_mutually_exclusive_group(required=True)
    model.add_argument(
        "--config", metavar="FILE",
        help="config.json or a Hugging Face folder; or a launch script or YAML that names "
        "Megatron's linear_* arguments, and parallel sizes if it has them",
    )  # fmt: skip
    model.add_argument(
        "--heads", nargs="+", type=_heads, metavar="KEY:VALUE",
        help="heads of the whole layer, as 16:32",
    )  # fmt: skip

    number = partial(parser.add_argument, type=_at_least_1, metavar="N")
    several = partial(parser.add_argument, nargs="+")
    number("--head-dim", help="of keys and values, beside --heads (128)")
    number("--conv", help="taps of the convolution, beside --heads (4)")
    number("--tp", help="tensor parallel ranks (1)")
    number("--cp", help="context parallel ranks (1)")
    parser.add_argument(
        "--linear-cp-mode", choices=("auto", "headwise", "chunkwise"), default="auto",
        help="how context parallelism works; auto may do both (auto)",
    )  # fmt: skip
    several(
        "--operands", choices=("fp16", "bf16"), default=["fp16"],
        help="the layer's rule_operands; deterministic mode takes bf16 (fp16)",
    )  # fmt: skip
    several(
        "--kernels", choices=("flash_qla", "triton", "fla"), default=["flash_qla", "triton"],
        help="which to compile; fla's are tuned by running them, on a GPU (flash_qla triton)",
    )  # fmt: skip
    several(
        "--parts", choices=("cut", "rows", "uncut", "states", "whole", "again"),
        help="of FlashQLA: cut (long sequences), rows (a batch), uncut (short documents), states "
        "(chunkwise), whole (batch_invariant_mode), again (recompute=full). All but the last "
        "two; without context parallelism all but the last three",
    )  # fmt: skip
    number("--processes", help="side by side, at most (one per core)")
    number(
        "--multiprocessors", default=132,
        help="of the GPU; FlashQLA chooses among its kernels by them (132)",
    )  # fmt: skip
    parser.add_argument(
        "--dry-run", action="store_true", help="say what is there and what is missing"
    )
    parser.add_argument("--for-a-run", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def _at_least_1(text: str) -> int:
    if not (text.isdecimal() and int(text)):
        raise argparse.ArgumentTypeError(f"{text} is not a whole number of at least 1")
    return int(text)


def _heads(text: str) -> tuple[int, int]:
    try:
        key, value = map(_at_least_1, text.split(":"))
    except (ValueError, argparse.ArgumentTypeError) as error:
        raise argparse.ArgumentTypeError(
            f"{text} is not KEY:VALUE, two numbers of heads such as 16:32"
        ) from error
    return key, value


if __name__ == "__main__":
    sys.exit(main())
