"""Says which rank the others wait for, after one rank has failed.

A rank that ends, or hangs, shows in the other ranks as a broken connection or as a
collective that takes too long; neither names a rank. So the first rank that fails asks
all ranks, through torch's store, where they are. A thread of each rank answers, so a
rank answers too whose main thread waits in a collective. A rank that does not answer
has ended, or is stopped as a whole.

A collective of NCCL raises nothing: the main thread waits for its GPU until NCCL's
watchdog ends the process. There a second thread asks shortly before, and prints the
answer.
"""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
from torch.distributed import distributed_c10d

from pretraining.failures import say

_ASKED = "pretrain_hybrid/roll_call"
_EVERY_S = 1.0  # how often a rank looks whether another one has asked
_PATIENCE_S = 6.0  # by then every rank that runs has answered
# A thread's answer takes 2 * _EVERY_S + _PATIENCE_S, and more on a busy machine.
_WAITED_FOR_S = 2 * (2 * _EVERY_S + _PATIENCE_S)
_FAILED = "failed"


class RollCall:
    """The answers of this rank, and its question to the others."""

    def __init__(self) -> None:
        self._store: Any = None
        self._rank = 0
        self._size = 1
        self._failed = False
        self._words: str | None = None  # the answer since the latest step
        self._speaks = False  # the lowest rank that answers prints the words
        self._question = 1  # the number of the next one
        self._answered = threading.Condition()
        self._has_ended = threading.Event()
        self._last_step = time.monotonic()

    def start(self, limit_s: float) -> None:
        """Answer from now on; after ``init_process_group``, with its timeout."""
        self._store = distributed_c10d._get_default_store()
        self._rank = torch.distributed.get_rank()
        self._size = torch.distributed.get_world_size()
        if self._size == 1:
            return
        threading.Thread(target=self._answer, daemon=True).start()
        if not _collectives_raise():
            patience_s = max(limit_s / 2, limit_s - _WAITED_FOR_S)
            threading.Thread(
                target=self._watch, args=(patience_s,), daemon=True
            ).start()

    def note_step(self) -> None:
        """This rank has ended a step, or a save."""
        self._last_step = time.monotonic()
        self._words = None

    def end(self) -> None:
        """Answer no more: this rank leaves, and rank 0, which may keep the store, may
        leave first."""
        self._has_ended.set()

    def ask(self) -> str | None:
        """This rank has failed: which ranks have not, in words; None if all have.

        If another rank has asked since the latest step, its answer stands: it may have
        ended by now, and would not answer.
        """
        if self._size == 1 or self._store is None:
            return None
        self._failed = True
        return self._words or self._ask()

    def _ask(self) -> str | None:
        number = self._question
        try:
            self._store.set(f"{_ASKED}/{number}", str(self._rank))
        except RuntimeError:
            return self._words or self._lost_store()
        with self._answered:
            self._answered.wait_for(lambda: self._question > number, _WAITED_FOR_S)
        if self._rank == 0:
            time.sleep(2 * _EVERY_S)  # it may keep the store, which the others ask
        return self._words

    def _answer(self) -> None:
        has_store = True
        while has_store:
            asked = f"{_ASKED}/{self._question}"
            try:
                while not self._store.check([asked]):
                    if self._has_ended.wait(_EVERY_S):
                        return
                time.sleep(_EVERY_S)  # for this rank's own error, if it has one
                place = _FAILED if self._failed else _place_of_main_thread()
                self._store.set(f"{asked}/{self._rank}", place)
                self._words = self._read_answers(asked)
            except RuntimeError:
                self._words = self._lost_store()
                self._speaks = True
                has_store = False
            with self._answered:
                self._question += 1
                self._answered.notify_all()

    def _watch(self, patience_s: float) -> None:
        """Print which ranks the others wait for, once for every step that takes
        longer."""
        while True:
            time.sleep(_EVERY_S)
            begun = self._last_step
            if time.monotonic() - begun < patience_s:
                continue
            words = self._ask()
            if words and self._speaks:
                say(f"no step for {patience_s:.0f} s: {words}")
            while self._last_step == begun:
                time.sleep(_EVERY_S)

    def _read_answers(self, asked: str) -> str | None:
        keys = {rank: f"{asked}/{rank}" for rank in range(self._size)}
        deadline = time.monotonic() + _PATIENCE_S
        while (
            not self._store.check(list(keys.values())) and time.monotonic() < deadline
        ):
            time.sleep(_EVERY_S / 10)
        silent = [rank for rank, key in keys.items() if not self._store.check([key])]
        self._speaks = self._rank == min(keys.keys() - silent)
        if silent:
            return _words_of_silence(silent)
        places = []
        for rank, key in keys.items():
            place = self._store.get(key).decode()
            if place != _FAILED:
                places.append(f"rank {rank} is at {place}")
        return "; ".join(places) or None

    def _lost_store(self) -> str | None:
        """A store of torchrun's outlives its ranks; any other is kept by rank 0."""
        if self._rank == 0:
            return None
        return "rank 0 does not answer: it has ended"


def _collectives_raise() -> bool:
    return torch.distributed.get_backend() != "nccl"


def _words_of_silence(ranks: list[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]} does not answer: it has ended, or it is stopped"
    numbers = ", ".join(map(str, ranks))
    return f"ranks {numbers} do not answer: they have ended, or they are stopped"


def _place_of_main_thread() -> str:
    """The innermost line of this repository that the main thread runs."""
    frame = sys._current_frames()[threading.main_thread().ident or 0]
    function = frame.f_code.co_name
    while frame.f_back is not None and _is_foreign(frame.f_code.co_filename):
        frame = frame.f_back
    code = frame.f_code
    where = f"{Path(code.co_filename).name}:{frame.f_lineno} in {code.co_name}"
    return where if function == code.co_name else f"{where} ({function})"


def _is_foreign(file: str) -> bool:
    return "site-packages" in file or file.startswith(sys.base_prefix)
