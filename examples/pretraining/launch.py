"""torchrun, ending in a line: ``python examples/pretraining/launch.py TORCHRUN_ARGUMENTS``.

torchrun itself adds a traceback of its own to every end that is not a success, Ctrl-C included,
below the line in which the run has said what happened and how to go on.
"""

import logging
import signal
import sys

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main


def launch(arguments: list[str]) -> int:
    """Run torchrun; the exit code of the first rank that failed, or 128 + the signal's number."""
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    try:
        main(arguments)
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


if __name__ == "__main__":
    sys.exit(launch(sys.argv[1:]))
