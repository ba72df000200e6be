"""What a rank of a run calls its layer with: sizes, parallel sizes, and batches by parts.

cut      a long sequence and long documents: FlashQLA cuts them into parts side by side
rows     a batch of whole rows
uncut    sequences too short to be cut, one and several
states   pieces of sequences, as in context parallelism by state passing
whole    ``config.batch_invariant_mode``
again    a second run of the forward in the backward (``recompute="full"``)
"""

from __future__ import annotations

import argparse
import json
import math
import re
from pathlib import Path
from typing import NamedTuple

from ..gdn.flash_qla.builds import ON_REQUEST, PARTS
from ..gdn.sizes import GDNDims

_SHORT, _LONG = 208, 9216  # tokens; the second is cut
# FlashQLA's forward has three kernels, chosen by sequences * heads: at least this share of the
# GPU's multiprocessors, at least half of that, and fewer.
_FULL = 0.7
_HIDDEN = 64  # no kernel depends on it


class Model(NamedTuple):
    """Sizes of the layer, and the parallel sizes that a file names."""

    dims: GDNDims
    tp: int | None = None
    cp: int | None = None


def models_of(arguments: argparse.Namespace) -> list[Model]:
    """From the command line, with the parallel sizes of the run."""
    if arguments.config is not None:
        for flag, size in (("head-dim", arguments.head_dim), ("conv", arguments.conv)):
            if size is not None:
                raise ValueError(f"--{flag} beside --config, which names this size; leave it out.")
        models = [read_model(arguments.config)]
    else:
        dim, taps = arguments.head_dim or 128, arguments.conv or 4
        models = [
            Model(
                GDNDims(
                    hidden_size=_HIDDEN, num_key_heads=key_heads, num_value_heads=value_heads,
                    key_head_dim=dim, value_head_dim=dim, conv_kernel_dim=taps,
                )
            )
            for key_heads, value_heads in arguments.heads
        ]  # fmt: skip
    sizes = arguments.tp, arguments.cp
    return [Model(dims, sizes[0] or tp or 1, sizes[1] or cp or 1) for dims, tp, cp in models]


_SIZES = ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim", "conv_kernel_dim")


def read_model(path: str | Path) -> Model:
    """Read the sizes from ``config.json``, a folder that has one, or any text that names Megatron's
    arguments, such as a launch script (``--linear-num-key-heads 16``) or YAML
    (``linear_num_key_heads: 16``)."""
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

    def named(argument: str) -> int | None:
        """The number after the argument's name, with - or _ between its words."""
        words = r"[-_]".join(argument.split("_"))
        found = set(re.findall(rf"(?<![\w]){words}[\"']?\s*[:=\s]\s*(\d+)\b", text))
        if len(found) > 1:
            said = " and as ".join(sorted(found))
            raise ValueError(f"{path} gives {argument} as {said}; keep one.")
        return int(found.pop()) if found else None

    sizes = {name: named(f"linear_{name}") for name in _SIZES}
    if missing := [f"linear_{name}" for name, size in sizes.items() if size is None]:
        raise ValueError(
            f"{path} does not name {', '.join(missing)}; add them, or give --heads and the "
            f"other sizes on the command line."
        )
    known = {name: size for name, size in sizes.items() if size is not None}
    of_run = (named(f"{kind}_parallel_size") for kind in ("tensor_model", "context"))
    return Model(GDNDims(hidden_size=_HIDDEN, **known), *of_run)


class Call(NamedTuple):
    """One forward and backward of a layer on one rank."""

    part: str
    tp: int
    cp: int
    mode: str  # linear_cp_mode
    sequences: int  # of the rank, beside each other
    least: int  # tokens of a row
    rows: int = 1
    packed: bool = False

    @property
    def layout(self) -> str:
        """Zigzag gives a rank two pieces of each sequence."""
        return "contiguous" if self.sequences == 1 else "zigzag"

    @property
    def documents(self) -> int:
        pieces = 2 if self.part == "states" else 1
        return max(1, self.sequences // pieces)

    @property
    def tokens(self) -> int:
        """Whole documents, each of which all ranks share."""
        unit = 16 * self.cp * self.documents
        return -(-self.least * (self.cp if self.part == "states" else 1) // unit) * unit

    @property
    def offsets(self) -> list[int] | None:
        if not self.packed:
            return None
        return [*range(0, self.tokens + 1, self.tokens // self.documents)]


def calls_of(model: Model, mode: str, parts: list[str] | None, multiprocessors: int) -> list[Call]:
    """What a rank of a run with these parallel sizes may call; ``mode`` is ``linear_cp_mode``.

    "auto" picks per micro-batch, so it has the calls of both modes. Without context parallelism
    the states of a part enter as they do on two ranks.
    """
    dims, tp, cp = model.dims, model.tp or 1, model.cp or 1
    local, ranks = dims.shard(tp), 1
    if cp > 1 and mode != "chunkwise":
        try:
            local.share_heads(cp)
            ranks = cp
        except ValueError:  # "auto" then passes states
            if mode == "headwise":
                raise
    asked = ("states",) if cp > 1 and mode != "headwise" else ()
    found: list[Call] = []
    for part in parts or [part for part in PARTS if part not in ON_REQUEST or part in asked]:
        where = (max(cp, 2), "chunkwise") if part == "states" else (ranks, "headwise")
        heads = local.num_value_heads // (1 if part == "states" else ranks)
        full = math.ceil(_FULL * multiprocessors)
        counts = sorted({1, math.ceil(full / 2 / heads), math.ceil(full / heads)})
        shapes: list[tuple] = []
        if part in ("cut", "again"):
            shapes += [(1, _LONG), (3, _LONG, 1, True)]
        if part in ("rows", "again"):
            shapes += [(count, _SHORT, max(2, count)) for count in counts]
        if part in ("uncut", "states", "again"):
            shapes += [(count, _SHORT, 1, True) for count in counts]
        if part == "whole":
            shapes += [(count, _LONG, 1, True) for count in counts]
        found += [Call(part, tp, *where, *shape) for shape in shapes]
    return found
