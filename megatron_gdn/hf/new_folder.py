"""Writes a folder that appears only when it is complete."""

from __future__ import annotations

import errno
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def refuse_existing(target: str | Path) -> None:
    """Raise FileExistsError if ``target`` is a link, or exists and is not an empty
    folder."""
    target = Path(target).absolute()
    if target.is_symlink():
        raise FileExistsError(
            f"{target} is a link to {target.readlink()}; give the folder itself, or "
            "remove the link."
        )
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise FileExistsError(f"{target} exists; remove it or choose another name.")


@contextmanager
def new_folder(target: str | Path) -> Iterator[Path]:
    """Yield an empty folder, whose files are in ``target`` at the end; deleted on any
    error.

    If ``target`` does not exist, the folder becomes ``target`` by one rename. If
    ``target`` is an empty folder, such as a mount point, it stays, and the files are
    moved into it one by one. Folders and files get the permissions that the user's
    umask gives.
    """
    refuse_existing(target)
    target = Path(target).absolute()
    fills = target.is_dir()
    # A rename needs one file system: a mount point takes the new folder inside.
    home = target if fills else target.parent
    home.mkdir(parents=True, exist_ok=True)
    scratch = home / f".{target.name[:100]}.{secrets.token_hex(4)}"
    scratch.mkdir()
    try:
        yield scratch
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise
    try:
        if fills:
            _move_content(scratch, target)
        else:
            scratch.rename(target)
    except OSError as error:
        raise FileExistsError(
            f"{target} cannot be filled any more ({error.strerror}); another process "
            f"may have made it. The complete files are in {scratch}; move them."
        ) from error


def _move_content(scratch: Path, target: Path) -> None:
    """Move everything in ``scratch`` into ``target``, its parent, and remove
    ``scratch``."""
    if [path for path in target.iterdir() if path != scratch]:
        raise OSError(errno.ENOTEMPTY, "it is no longer empty")
    for path in sorted(scratch.iterdir()):
        path.rename(target / path.name)
    scratch.rmdir()
