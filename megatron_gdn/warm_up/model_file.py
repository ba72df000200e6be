"""A model's sizes from a file that names them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import NamedTuple

from ..mixers.gdn.sizes import GDNDims

_SIZES = {
    "num_key_heads": "linear_num_key_heads",
    "num_value_heads": "linear_num_value_heads",
    "key_head_dim": "linear_key_head_dim",
    "value_head_dim": "linear_value_head_dim",
    "conv_kernel_dim": "linear_conv_kernel_dim",
}


class Model(NamedTuple):
    """Sizes of the layer, and the parallel sizes that the file names; None where it does not."""

    dims: GDNDims
    tp: int | None = None
    cp: int | None = None


def read_model(path: str | Path) -> Model:
    """Read the sizes from a file or a Hugging Face model folder.

    Args:
        path: ``config.json`` or a folder that has one; or any text that names Megatron's arguments,
            such as a launch script (``--linear-num-key-heads 16``) or YAML
            (``linear_num_key_heads: 16``).

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: a size is missing, or two lines give it different values.
    """
    path = Path(path)
    if path.is_dir():
        path = path / "config.json"
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} does not exist; give config.json, a Hugging Face model folder, a launch "
            f"script or a YAML file."
        )
    text = path.read_text()
    if path.suffix == ".json":
        try:
            found = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path} is not JSON: {error}.") from error
        # Vision-language models keep the sizes in a section of their own.
        text = json.dumps(found.get("text_config") or found, indent=1)
    sizes = {name: _named(text, argument, path) for name, argument in _SIZES.items()}
    missing = [_SIZES[name] for name, size in sizes.items() if size is None]
    if missing:
        raise ValueError(
            f"{path} does not name {', '.join(missing)}; add them, or give --heads and the "
            f"other sizes on the command line."
        )
    hidden = _named(text, "hidden_size", path) or 1  # no kernel depends on it
    return Model(
        GDNDims(hidden_size=hidden, **{n: size for n, size in sizes.items() if size is not None}),
        _named(text, "tensor_model_parallel_size", path),
        _named(text, "context_parallel_size", path),
    )


def _named(text: str, argument: str, path: Path) -> int | None:
    """The number after the argument's name, with - or _ between its words."""
    words = r"[-_]".join(argument.split("_"))
    found = set(re.findall(rf"(?<![\w]){words}[\"']?\s*[:=\s]\s*(\d+)\b", text))
    if len(found) > 1:
        raise ValueError(f"{path} gives {argument} as {' and as '.join(sorted(found))}; keep one.")
    return int(found.pop()) if found else None
