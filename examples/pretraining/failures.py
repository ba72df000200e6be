"""The one line that a run prints when it fails; a traceback goes into a file."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import NoReturn

PROGRAM = "pretrain_hybrid.py"
# torchrun ends the other ranks within a second of the first that failed.
_WAIT_S = 6


def refuse(message: str, code: int = 1) -> NoReturn:
    """End with one line, printed by rank 0, about a fault that every rank finds alike.

    A rank that still runs some seconds later has a fault of its own, and prints its
    line too.
    """
    if rank() != 0:
        time.sleep(_WAIT_S)
    _leave(f"{PROGRAM}: error: {message}", code)


def fail(error: BaseException, said: str, output_dir: Path, way_on: str) -> NoReturn:
    """End with the line ``said`` about an error of this rank; its traceback goes into a
    file."""
    if is_echo(error):
        time.sleep(_WAIT_S)
    text = "".join(traceback.format_exception(error))
    place = _write_traceback(text, output_dir)
    line = f"{PROGRAM}: rank {rank()}: {said} (traceback: {place})"
    _leave(f"{line}; {way_on}", 1)


def say(line: str) -> None:
    """Print a line of this rank, which goes on."""
    below_the_bar = "\n" if sys.stderr.isatty() else ""
    text = f"{below_the_bar}{PROGRAM}: rank {rank()}: {line}"
    print(text, file=sys.stderr, flush=True)


def rank() -> int:
    return int(os.environ.get("RANK", "0"))


def first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or ["no message"]
    return f"{type(error).__name__}: {lines[0][:300]}"


def last_line(error: BaseException) -> str:
    """The last line of an error that quotes the tracebacks of other ranks: its
    cause."""
    lines = [line for line in str(error).splitlines() if line]
    if not lines:
        return type(error).__name__
    return lines[-1][:300]


def ask_the_disk(folder: Path) -> OSError | None:
    """Why files below ``folder`` cannot grow, or None if they can.

    Megatron's writer keeps the type of an error and loses its number, so the disk is
    asked again.
    """
    files = [path for path in folder.glob("*") if path.is_file()]
    for path in files or [folder / "probe"]:
        try:
            with path.open("ab", buffering=0) as stream:
                stream.write(bytes(1 << 16))
                os.fsync(stream.fileno())
        except OSError as refusal:
            return refusal
    return None


def full_disk(error: BaseException, path: Path) -> str | None:
    """``error`` in words if its cause is a full disk (or quota, or file-size limit),
    else None."""
    number = getattr(error, "errno", None)
    if number == errno.ENOSPC:
        return f"the disk of {path} is full"
    if number in (errno.EDQUOT, errno.EFBIG):
        return f"{path} cannot grow: {os.strerror(number)}"
    return None


def is_echo(error: BaseException) -> bool:
    """Whether this error follows from another rank, which has ended or sends
    nothing."""
    signs = (
        "imed out waiting",
        "onnection closed by peer",
        "onnection reset by peer",
        "roken pipe",
        "eset connection",
    )
    return any(sign in str(error) for sign in signs)


def _write_traceback(text: str, output_dir: Path) -> Path | str:
    for folder in (output_dir, Path(tempfile.gettempdir())):
        path = folder / f"error-rank{rank()}.txt"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        except OSError:
            continue
        return path
    return "nowhere, no disk takes it"


def _leave(line: str, code: int) -> NoReturn:
    """Exit without waiting for threads and process groups, whose other ends may be
    gone."""
    sys.stdout.flush()
    below_the_bar = "\n" if sys.stderr.isatty() else ""
    print(below_the_bar + line, file=sys.stderr, flush=True)
    _tell_torchrun(line)
    # None: a wrong flag, found before torch was imported
    torch = sys.modules.get("torch")
    if torch is not None and torch.distributed.is_initialized():
        os._exit(code)
    raise SystemExit(code)


def _tell_torchrun(line: str) -> None:
    """Write the line that torchrun, started without `launch.py`, quotes in its
    traceback."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        now = str(int(time.time()))
        said = {"message": line, "extraInfo": {"py_callstack": line, "timestamp": now}}
        with contextlib.suppress(OSError):
            Path(path).write_text(json.dumps({"message": said}))
