"""Where Megatron's ``--save`` puts a distributed checkpoint.

latest_checkpointed_iteration.txt    "release", or the number of the newest iteration
release/ or iter_0000160/            metadata.json and the files of torch.distributed.checkpoint
"""

from __future__ import annotations

from pathlib import Path

TRACKER = "latest_checkpointed_iteration.txt"
RELEASE = "release"
_FORMAT = "metadata.json"


def is_checkpoint(folder: str | Path) -> bool:
    """Whether ``folder`` has a tracker file or the ``metadata.json`` of one iteration."""
    folder = Path(folder)
    return (folder / TRACKER).is_file() or (folder / _FORMAT).is_file()


def find_checkpoint(folder: str | Path) -> Path:
    """The folder of one iteration: ``folder`` itself, or the one its tracker file names.

    Raises:
        FileNotFoundError: that folder has no ``metadata.json``.
        ValueError: the tracker file holds neither ``release`` nor a number.
    """
    folder = Path(folder)
    found = folder
    if (folder / TRACKER).is_file():
        name = (folder / TRACKER).read_text().strip()
        if name != RELEASE and not name.isdigit():
            raise ValueError(
                f"{folder / TRACKER} says {name!r}, neither {RELEASE!r} nor an iteration; name the "
                f"folder of one iteration instead."
            )
        found = folder / (name if name == RELEASE else f"iter_{int(name):07d}")
    if not (found / _FORMAT).is_file():
        raise FileNotFoundError(
            f"{found} is no distributed checkpoint: it has no {_FORMAT}. Give a folder that "
            f"Megatron's --save, or import, made (with {TRACKER} in it), or one of its iterations."
        )
    return found
