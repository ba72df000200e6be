"""SIGINT and SIGTERM end a run at the next step boundary, where every rank can save.

Ranks may notice a signal in different steps, so they agree after every step. Before the
first step and after the last save nothing can be lost, so a signal ends the process at
once.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_OTHER_REASON = 1  # SIGHUP, which is not handled here


class Stop:
    """Whether this rank was asked to stop, and why.

    Attributes:
        reason: words for the last line; None if nothing has asked.
    """

    def __init__(self) -> None:
        self.reason: str | None = None
        self._code = 0
        self._at_boundary = self._failed = False
        for number in _SIGNALS:
            signal.signal(number, self._receive)

    def request(self, reason: str) -> None:
        """Ask for an end after this step, for a reason that is not a signal."""
        self.reason = reason
        self._code = self._code or _OTHER_REASON

    @contextlib.contextmanager
    def at_step_boundaries(self) -> Iterator[None]:
        """Inside, signals wait for `agreed`; outside they end the process at once.

        After an exception, a signal comes from torchrun, which ends the remaining
        ranks.
        """
        self._at_boundary = True
        try:
            yield
        except BaseException:
            self._failed = True
            raise
        finally:
            self._at_boundary = False

    def agreed(self, device) -> bool:
        """Whether any rank was asked to stop; a collective of all ranks."""
        import torch

        code = torch.tensor([self._code], device=device)
        torch.distributed.all_reduce(code, torch.distributed.ReduceOp.MAX)
        if not code.item():
            return False
        if self.reason is None:
            self._set(int(code.item()))
        return True

    def _receive(self, number: int, frame) -> None:
        if self._at_boundary:
            self._set(number)  # a second signal changes nothing: the save is under way
            return
        if os.environ.get("RANK", "0") == "0" and not self._failed:
            # Not print: the signal may have come in the middle of one.
            line = f"\nended by {signal.Signals(number).name}; no step was lost\n"
            os.write(sys.stderr.fileno(), line.encode())
        os._exit(128 + number)

    def _set(self, number: int) -> None:
        self._code = number
        in_words: dict[int, str] = {
            signal.SIGINT: "SIGINT (Ctrl-C)",
            signal.SIGTERM: "SIGTERM",
        }
        self.reason = in_words.get(number, "another rank")
