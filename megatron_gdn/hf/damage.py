"""What a failed command says: one line that names the file, which torch and Megatron do not do."""

from __future__ import annotations

import errno
import json
from collections.abc import Sequence
from pathlib import Path

from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader

from .checkpoint_files import find_checkpoint

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_EXPECTED = (ValueError, NotImplementedError, ImportError, OSError)


def in_one_line(
    error: BaseException, sources: Sequence[str], target: str | None = None
) -> str | None:
    """The cause of ``error`` in words; None if it is neither a damaged file nor the user's fault.

    Args:
        error: what ended a command.
        sources: the folders that it read.
        target: the folder that it wrote.
    """
    for source in sources:
        try:
            damaged = _damaged(find_checkpoint(source))
        except (OSError, ValueError):  # no checkpoint, such as a Hugging Face folder
            continue
        if damaged:
            return f"{damaged}. Copy it again, or take another iteration."
    names_nothing = isinstance(error, CheckpointException)
    if isinstance(error, CheckpointException):  # errors of ranks, with their tracebacks
        error = next(found for found, _ in error.failures.values())
    elif not isinstance(error, _EXPECTED):
        return None
    said = str(error) or type(error).__name__
    if isinstance(error, OSError) and error.errno and not error.filename:
        names_nothing, said = True, error.strerror or said
        if error.errno in _FULL:
            return f"{target} cannot be written: {said}. Make room, or choose another place."
    if names_nothing:
        either = " or ".join(map(str, [*sources, *filter(None, [target])]))
        return f"{either} cannot be read or written: {said.splitlines()[0]}"
    return said


def _damaged(folder: Path) -> str | None:
    """The first file of a checkpoint that is missing, cut or zeroed, and what is wrong with it."""
    path = folder / "metadata.json"
    try:
        json.loads(path.read_bytes())
        path = folder / ".metadata"
        for place in FileSystemReader(folder).read_metadata().storage_data.values():
            path = folder / place.relative_path
            size, end = path.stat().st_size, place.offset + place.length
            if size < end:
                return f"{path} has {size} bytes of {end} or more"
            with path.open("rb") as file:  # of torch's zip archives
                file.seek(place.offset)
                first = file.read(4)
                file.seek(end - 22)
                last = file.read(22)
            if not any(first) or (first == b"PK\3\4" and not any(last)):
                return f"{path} has zeros in place of what was written"
    except FileNotFoundError:
        return f"{path} is missing"
    except Exception as error:
        return f"{path} is truncated or damaged ({error})"
    return None
