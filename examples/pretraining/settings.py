"""A run's settings travel with its checkpoints, as ``settings.json`` inside each.

A continued run takes a setting from the command line if it is there, else from the
checkpoint. The learning rate of each further step follows from these settings alone.
Settings that shape the model cannot change.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

FILE = "settings.json"


def to_json(args: argparse.Namespace, names: Iterable[str]) -> str:
    """These settings, one per line; paths are made absolute."""
    settings = {name: getattr(args, name) for name in names}
    if settings.get("data"):
        settings["data"] = [str(Path(path).absolute()) for path in settings["data"]]
    for name, value in settings.items():
        if isinstance(value, Path):
            settings[name] = {"path": str(value.absolute())}
    return json.dumps(settings, indent=1) + "\n"


def read(checkpoint: Path) -> dict[str, Any]:
    """The settings of a checkpoint's run; empty if it holds none."""
    path = checkpoint / FILE
    settings = json.loads(path.read_text()) if path.is_file() else {}
    return {
        name: Path(value["path"]) if isinstance(value, dict) else value
        for name, value in settings.items()
    }


def take_over(
    args: argparse.Namespace,
    saved: dict[str, Any],
    *,
    given: Iterable[str],
    shaping: Iterable[str],
    source: Path,
) -> None:
    """Fill every setting that is not ``given`` from ``saved``, in place.

    Raises:
        ValueError: settings that shape the model differ; all are named with both
            values.
    """
    given = set(given)
    different = [
        f"{flag(name)} is {_shown(saved[name])} there and "
        f"{_shown(getattr(args, name))} here"
        for name in shaping
        if name in saved
        and name in given
        and not _same(name, saved[name], getattr(args, name))
    ]
    if different:
        raise ValueError(
            f"{source} holds another model: {'; '.join(different)}. Leave out what "
            "differs (it is taken from the checkpoint), or start a run of its own "
            "without --resume and --load."
        )
    for name, value in saved.items():
        if name not in given and hasattr(args, name):
            setattr(args, name, value)


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _same(name: str, saved: Any, now: Any) -> bool:
    # where it is cut between pipeline stages is no matter
    if name == "hybrid_layer_pattern":
        return saved.replace("|", "") == now.replace("|", "")
    if isinstance(saved, Path) and now is not None:
        return saved.absolute() == Path(now).absolute()
    return saved == now


def _shown(value: Any) -> str:
    return str(value) if isinstance(value, str | Path) else json.dumps(value)
