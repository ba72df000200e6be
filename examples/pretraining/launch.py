"""Starts a script's ranks by torchrun; the script's own message is the last line.

torchrun itself would add a traceback to every end that is not a success, Ctrl-C
included.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
from collections.abc import Sequence

NPROC = "--nproc-per-node"


def processes_to_start(flags: Sequence[str]) -> int:
    """The value of `NPROC` among these flags; 1 if absent, wrong, or torchrun runs
    already."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument(NPROC, dest="number", nargs="?")
    number = parser.parse_known_args(flags)[0].number or "1"
    return int(number) if number.isdigit() and "RANK" not in os.environ else 1


def launch(processes: int, script: str, flags: Sequence[str]) -> int:
    """Run the script in that many processes of this machine.

    Returns:
        0, the exit code of the first rank that failed, or 128 + the signal's number.
    """
    # until torchrun has a handler of its own
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    print(f"starting {processes} processes ...", flush=True)
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # torchrun takes 1 too, and warns
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run

    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    try:
        run(parse_args(["--standalone", f"{NPROC}={processes}", script, *flags]))
    except SignalException as stopped:
        return 128 + stopped.sigval
    except ChildFailedError as failed:
        rank, failure = failed.get_first_failure()
        if failure.exitcode < 0:  # such a rank could not say why
            name = signal.Signals(-failure.exitcode).name
            print(f"rank {rank} was ended by {name}", file=sys.stderr)
            return 128 - failure.exitcode
        return failure.exitcode
    return 0
