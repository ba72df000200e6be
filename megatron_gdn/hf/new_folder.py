"""`new_folder` writes a folder that appears only when it is complete."""

from __future__ import annotations

import errno
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def refuse_existing(target: str | Path) -> None:
    """Raise a FileExistsError if ``target`` exists, unless it is an empty folder. A link
    is refused too, since a folder cannot be renamed to it."""
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
    """Yield the path of an empty scratch folder; at the end of the context its files
    are in ``target``.

    On an error inside the context the scratch folder is deleted. If ``target`` does not
    exist, the scratch folder is renamed to ``target``. If ``target`` is an empty folder,
    such as a mount point, ``target`` stays, and the files are moved into it one by one.
    Folders and files get the permissions that the user's umask gives.

    Raises:
        FileExistsError: ``target`` exists, now or at the end.
    """
    refuse_existing(target)
    target = Path(target).absolute()
    target_exists = target.is_dir()
    # A rename needs one file system. A target that exists may be a mount point, so the
    # scratch folder is made inside of it.
    if target_exists:
        parent = target
    else:
        parent = target.parent
    parent.mkdir(parents=True, exist_ok=True)
    scratch = parent / f".{target.name[:100]}.{secrets.token_hex(4)}"
    scratch.mkdir()
    try:
        yield scratch
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise
    try:
        if target_exists:
            _move_content(scratch, target)
        else:
            scratch.rename(target)
    except OSError as error:
        raise FileExistsError(
            f"{target} cannot be filled any more ({error.strerror}); another process "
            f"may have made it. The complete files are in {scratch}; move them."
        ) from error


def _move_content(scratch: Path, target: Path) -> None:
    """Move everything in ``scratch`` up into its parent folder ``target``, and remove
    ``scratch``; raise an OSError if ``target`` has other content."""
    if [path for path in target.iterdir() if path != scratch]:
        raise OSError(errno.ENOTEMPTY, "it is no longer empty")
    for path in sorted(scratch.iterdir()):
        path.rename(target / path.name)
    scratch.rmdir()
