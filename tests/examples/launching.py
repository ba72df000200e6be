"""Ranks of the example, to be signalled and killed: forked from the server of
`tests/ranks.py`, or started anew where they use a GPU. As under torchrun, the store in
which they meet is kept by who starts them, and outlives them all."""

import contextlib
import json
import os
import signal
import socket
import sys
import time
from multiprocessing.connection import wait
from pathlib import Path
from typing import ClassVar

import torch
from torch.distributed import TCPStore

from tests.examples.conftest import EXAMPLES
from tests.ranks import _context

ROOT = EXAMPLES.parent
TIMEOUT_S = 240
TINY = [
    "--hybrid-layer-pattern=G-*-",
    "--hidden-size=32",
    "--linear-key-head-dim=8",
    "--linear-value-head-dim=12",
    "--seq-length=64",
    "--micro-batch-size=4",
    "--train-iters=12",
    "--sample-tokens=3",
]


class Launch:
    """``size`` ranks that run the example with these flags; ``limit`` is called on each
    before."""

    _started: ClassVar[list["Launch"]] = []

    def __init__(self, *flags: object, cwd: Path, size: int = 2, limit=None) -> None:
        self._log = cwd / f"printed-{len(list(cwd.glob('printed-*')))}.txt"
        self._store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        port = self._store.port
        context = _context("nccl" if torch.cuda.is_available() else "gloo")
        self._ranks = [
            context.Process(
                target=_rank,
                args=(rank, size, port, [str(f) for f in flags], cwd, self._log, limit),
                daemon=False,
            )
            for rank in range(size)
        ]
        for process in self._ranks:
            process.start()
        self._started.append(self)

    @property
    def printed(self) -> str:
        return self._log.read_text(errors="replace") if self._log.exists() else ""

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the process group of every rank, as torchrun does."""
        for process in self._ranks:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)

    def until(self, happened) -> "Launch":
        deadline = time.monotonic() + TIMEOUT_S
        while self.is_running and not happened():
            assert time.monotonic() < deadline, self._give_up("nothing happened")
            time.sleep(0.002)
        return self

    @property
    def is_running(self) -> bool:
        return all(process.is_alive() for process in self._ranks)

    def end(self) -> list[int]:
        """Wait for all ranks; when one fails the others are ended. Returns their exit
        codes."""
        deadline = time.monotonic() + TIMEOUT_S
        running = {process.sentinel: process for process in self._ranks}
        while running:
            for sentinel in wait(list(running), timeout=1):
                process = running.pop(sentinel)
                process.join()
                if process.exitcode:
                    self.send(signal.SIGTERM)
                    deadline = min(deadline, time.monotonic() + 30)
            if time.monotonic() > deadline:
                self._give_up("ranks did not end")
                break
        return [process.exitcode for process in self._ranks]

    @classmethod
    def kill_all(cls) -> None:
        """End what a test that failed has left running."""
        for launch in cls._started:
            if any(process.is_alive() for process in launch._ranks):
                launch.send(signal.SIGKILL)
        cls._started.clear()

    def _give_up(self, why: str) -> str:
        self.send(signal.SIGKILL)
        return f"{why}:\n{self.printed}"


def metrics(output_dir: Path) -> list[dict]:
    """What a run recorded, without the times; a line that is being written does not
    count."""
    path = output_dir / "metrics.jsonl"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    steps = [json.loads(line) for line in lines]
    return [{k: v for k, v in step.items() if k != "seconds"} for step in steps]


def run(*flags: object, cwd: Path, size: int = 2) -> str:
    launch = Launch(*flags, cwd=cwd, size=size)
    assert launch.end() == [0] * size, launch.printed
    return launch.printed


def _rank(
    rank: int, size: int, port: int, flags: list[str], cwd: Path, log: Path, limit
) -> None:
    os.setsid()
    os.chdir(cwd)
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(size),
        LOCAL_WORLD_SIZE=str(size),
        MASTER_ADDR="localhost",
        MASTER_PORT=str(port),
        TORCHELASTIC_USE_AGENT_STORE=str(True),
    )
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(out, stream)
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", closefd=False, buffering=1)  # noqa: SIM115
    sys.argv = [str(EXAMPLES / "pretrain_hybrid.py"), *flags]
    sys.path.insert(0, str(EXAMPLES))
    import torch

    from pretraining.quiet import hide_import_notes
    from pretraining.stopping import Stop

    stop = Stop()
    hide_import_notes()
    torch.compiler.set_stance("force_eager")  # as in tests/ranks.py
    if limit:
        limit()
    from pretraining.loop import main

    main(stop)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        return listener.getsockname()[1]
