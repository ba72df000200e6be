"""Runs module-level functions on real processes joined by gloo (or, on GPUs, nccl).
gloo's are forked from a server that has imported Megatron: a fork of the session,
before its first test. A pool starts once per session. What a function returns comes
back, one value per rank, and what it raises is raised in the test. A test that is
nothing but what its
ranks do is decorated by `on_ranks`."""

import contextlib
import faulthandler
import functools
import importlib
import inspect
import math
import multiprocessing
import os
import queue
import shutil
import signal
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import forkserver, resource_tracker, util
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any
from unittest import mock

# Answers within this, or the pool is stopped. On a GPU a first call tunes kernels, for
# minutes.
TIMEOUT_S = {"gloo": 120, "nccl": 600}
# After one rank raised, the others answer within this: they may be waiting for it.
GRACE_S = 5
# What every rank imports. The server runs none of it: no thread holds a lock when it
# forks.
_IMPORTED_ONCE = [
    "pytest",
    "megatron_gdn.specs",
    "megatron_gdn.hf",
    "megatron.core.models.gpt",
    "megatron.core.models.hybrid.hybrid_model",
    "megatron.core.optimizer",
    "megatron.core.dist_checkpointing.strategies.filesystem_async",
]


def _context(backend: str):
    """CUDA does not live through a fork: ranks with a GPU start afresh."""
    if backend != "gloo":
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_IMPORTED_ONCE)
    return context


def fork_server() -> None:
    """Let the server be a fork of this process, which need not import all that
    again."""
    import torch

    if torch.cuda.device_count():
        return  # drivers may have been asked already, and do not live through a fork
    _context("gloo")
    resource_tracker.ensure_running()
    with mock.patch.object(util, "spawnv_passfds", _fork_and_execute):
        forkserver.ensure_running()


def _fork_and_execute(path: bytes, arguments: list, files: list[int]) -> int:
    """Run the ``-c`` command of these arguments in a fork, which ends when the session
    does."""
    if pid := os.fork():
        return pid
    try:
        _listener, alive, *_ = files
        for file in map(int, os.listdir("/dev/fd")):
            with contextlib.suppress(OSError):
                if file != alive and os.path.sameopenfile(file, alive):
                    os.close(file)  # the end of the pipe that the session keeps open
        exec(arguments[-1])
    finally:
        os._exit(0)


def _end_with_parent() -> None:
    """Whoever stops a hung test stops its process alone; ranks would go on to hold
    their GPUs."""
    multiprocessing.parent_process().join()
    os.abort()


def _share_one_device() -> None:
    """All gloo groups of this process listen on one device, whose thread wakes up every
    10 ms."""
    from torch.distributed import distributed_c10d as c10d

    with_own_device = c10d.ProcessGroupGloo
    options = getattr(with_own_device, "_Options", None)
    if not hasattr(options, "_devices"):
        return  # slower, and right
    device = with_own_device.create_default_device()

    class ProcessGroupGloo(with_own_device):
        def __init__(self, store, rank, size, timeout, **more) -> None:
            given = options()
            given._devices = [device]
            given._timeout = timeout
            for name, value in more.items():
                setattr(given, name, value)
            super().__init__(store, rank, size, given)

    c10d.ProcessGroupGloo = ProcessGroupGloo


def write_in_this_process() -> None:
    """Megatron's writers of checkpoints run in this process, not in one more per
    rank."""
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    if getattr(filesystem_async, "_results_queue", queue) is None:
        filesystem_async._results_queue = queue.Queue()


def _store(rank: int, size: int, pipe, timeout: timedelta):
    """Where ranks meet: rank 0 serves it at a free port; who waits for a file would
    sleep."""
    from torch.distributed import TCPStore

    if rank == 0:
        store = TCPStore("localhost", 0, size, True, timeout, wait_for_workers=False)
        pipe.send(("port", store.port))
        return store
    return TCPStore(
        "localhost", pipe.recv(), size, False, timeout, wait_for_workers=False
    )


def _serve(
    rank: int, size: int, pipe, backend: str, timeout_s: float, stacks: Path
) -> None:
    os.setpgrp()  # what a rank starts (checkpoint writers) is stopped with it
    faulthandler.register(signal.SIGUSR1, stacks.open("w"))
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank))
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    if backend == "nccl":
        threading.Thread(target=_end_with_parent, daemon=True).start()
        torch.cuda.set_device(rank)
    from megatron_gdn.compat.one_process import run_megatron_on_cpu
    from tests.bits_by_shape import hold_if_asked
    from tests.filled_memory import fill_new_memory

    hold_if_asked()
    fill_new_memory()
    run_megatron_on_cpu()
    if backend == "gloo":
        _share_one_device()
        # Megatron's small fused functions would be compiled by a C++ compiler, shape by
        # shape.
        torch.compiler.set_stance("force_eager")
        write_in_this_process()
    timeout = timedelta(seconds=timeout_s)
    store = _store(rank, size, pipe, timeout)
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=size, timeout=timeout
    )
    pipe.send(("ready", None))
    while True:
        function, args, kwargs = pipe.recv()
        try:
            pipe.send(("returned", function(*args, **kwargs)))
        except BaseException:
            pipe.send(("raised", traceback.format_exc()))


class RankError(AssertionError):
    """A function failed on some rank."""


class RankPool:
    """``size`` processes in a world of gloo or nccl; a call that takes too long kills
    them."""

    def __init__(
        self, size: int, backend: str = "gloo", timeout_s: float | None = None
    ) -> None:
        self.size = size
        self.backend = backend
        self.timeout_s = TIMEOUT_S[backend] if timeout_s is None else timeout_s
        self._processes: list[Any] = []
        self._pipes: list[Any] = []
        self._stacks: list[Path] = []

    def _start(self) -> None:
        context = _context(self.backend)
        folder = Path(tempfile.mkdtemp(prefix="ranks-"))
        for rank in range(self.size):
            ours, theirs = context.Pipe()
            self._stacks.append(folder / str(rank))
            process = context.Process(
                target=_serve,
                args=(
                    rank,
                    self.size,
                    theirs,
                    self.backend,
                    self.timeout_s,
                    self._stacks[-1],
                ),
                daemon=False,
            )
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)
        (port,) = self._answers(self._pipes[:1])
        for pipe in self._pipes[1:]:
            pipe.send(port)
        self._answers(self._pipes)

    def _answers(self, pipes: list[Any]) -> list[Any]:
        """What ranks 0, 1, ... of these pipes sent; raises what any of them raised."""
        answers = {}
        silent = {pipe: rank for rank, pipe in enumerate(pipes)}
        deadline = time.monotonic() + self.timeout_s
        raised = False
        while silent and (
            ready := wait(list(silent), max(0.0, deadline - time.monotonic()))
        ):
            for pipe in ready:
                rank = silent.pop(pipe)
                try:
                    answers[rank] = pipe.recv()
                except EOFError:
                    answers[rank] = ("raised", "the process ended")
                if answers[rank][0] == "raised" and not raised:
                    deadline = min(deadline, time.monotonic() + GRACE_S)
                    raised = True
        if raised or silent:
            failures = {
                rank: text for rank, (kind, text) in answers.items() if kind == "raised"
            }
            failures |= {rank: self._where(rank) for rank in silent.values()}
            # Ranks may have parted ways inside a collective: the next test gets a fresh
            # world.
            self.stop()
            raise RankError(
                "\n".join(f"rank {r}:\n{text}" for r, text in failures.items())
            )
        return [answers[rank][1] for rank in range(len(pipes))]

    def _where(self, rank: int) -> str:
        """Where a rank is that does not answer: the stacks of its threads."""
        os.kill(self._processes[rank].pid, signal.SIGUSR1)
        time.sleep(1)  # until they are written
        return (
            f"no answer within {self.timeout_s} s. It is "
            f"at:\n{self._stacks[rank].read_text()}"
        )

    def run(self, function: Callable, *args: Any, **kwargs: Any) -> list[Any]:
        """Call ``function(*args, **kwargs)`` on every rank and return what each
        returns."""
        if not self._processes:
            self._start()
        for pipe in self._pipes:
            pipe.send((function, args, kwargs))
        return self._answers(self._pipes)

    def stop(self) -> None:
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.join()
        if self._stacks:
            shutil.rmtree(self._stacks[0].parent)
        self._processes = []
        self._pipes = []
        self._stacks = []


def on_ranks(ranks: int | str | None = None, **state: Any) -> Callable:
    """The test runs on every rank, inside Megatron's parallel state where its sizes are
    given.

    Next to the function, below all marks. A string stands for the test's argument of
    that name.

    Args:
        ranks: how many; by default the product of the parallel state's sizes.
        state: arguments of ``tests.parallel.parallel``.
    """

    def decorate(law: Callable) -> Callable:
        def test(pools: Callable, **arguments: Any) -> None:
            sizes = {
                k: arguments[v] if isinstance(v, str) else v for k, v in state.items()
            }
            size = math.prod(sizes.values()) if ranks is None else ranks
            size = arguments[size] if isinstance(size, str) else size
            pools(size).run(_run, law.__module__, law.__name__, sizes, arguments)

        signature = inspect.signature(law)
        pools = inspect.Parameter("pools", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        parameters = [pools, *signature.parameters.values()]
        functools.update_wrapper(test, law)
        test.__signature__ = signature.replace(parameters=parameters)
        return test

    return decorate


def _run(
    module: str, name: str, state: dict[str, int], arguments: dict[str, Any]
) -> None:
    """What a rank does of a test that `on_ranks` decorates."""
    from tests.parallel import parallel

    law = getattr(importlib.import_module(module), name).__wrapped__
    with parallel(**state) if state else contextlib.nullcontext():
        law(**arguments)
