"""What a run needs: a model's sizes from its file, the heads of one rank, the tasks for them."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import NamedTuple

import torch

from ..gdn.flash_qla.builds import ON_REQUEST, PARTS, Heads
from ..gdn.sizes import GDNDims
from ..ops.delta_rule.base import HeadSizes
from .tasks import Task

_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


class Share(NamedTuple):
    """Heads that one rank runs."""

    key_heads: int
    value_heads: int
    states: bool  # the rule also takes and returns states, as chunkwise context parallelism asks

    def __str__(self) -> str:
        return f"{self.key_heads}:{self.value_heads}"


class Needs(NamedTuple):
    """The layer of one rank."""

    shares: list[Share]  # one for each way in which the run may split the heads
    sizes: HeadSizes  # the head dims; its numbers of heads are not used
    taps: int  # of the convolution
    flash_qla: dict[Heads, tuple[str, ...]]  # what FlashQLA is compiled for, each with the parts


def shares_of(dims: GDNDims, tp: int = 1, cp: int = 1, mode: str = "auto") -> list[Share]:
    """What a rank of a run with these parallel sizes may have to run.

    ``mode`` is ``linear_cp_mode``; "auto" picks per micro-batch, so both ways are listed.
    """
    local, found = dims.shard(tp), []
    if cp == 1 or mode != "chunkwise":
        try:
            part = local.share_heads(cp)
            found.append(Share(part.num_key_heads, part.num_value_heads, False))
        except ValueError:  # "auto" then passes states
            if mode == "headwise":
                raise
    if cp > 1 and mode != "headwise":
        found.append(Share(local.num_key_heads, local.num_value_heads, True))
    return found


def needs_of(arguments: argparse.Namespace) -> Needs:
    """From the command line."""
    if arguments.config is not None:
        for flag in ("head_dim", "conv"):
            if getattr(arguments, flag) is not None:
                named = flag.replace("_", "-")
                raise ValueError(f"--{named} beside --config, which names this size; leave it out.")
        models = [read_model(arguments.config)]
    else:
        dim, taps = arguments.head_dim or 128, arguments.conv or 4
        models = [
            Model(
                GDNDims(
                    hidden_size=1, num_key_heads=key_heads, num_value_heads=value_heads,
                    key_head_dim=dim, value_head_dim=dim, conv_kernel_dim=taps,
                )
            )
            for key_heads, value_heads in arguments.heads
        ]  # fmt: skip
    shares: dict[Share, None] = {}
    for dims, tp, cp in models:
        tp, cp = arguments.tp or tp or 1, arguments.cp or cp or 1
        shares |= dict.fromkeys(shares_of(dims, tp, cp, arguments.linear_cp_mode))
    dims = models[0].dims
    sizes = HeadSizes(1, 1, dims.key_head_dim, dims.value_head_dim)
    flash_qla: dict[Heads, tuple[str, ...]] = {}
    for operands in arguments.operands if "flash_qla" in arguments.kernels else ():
        for key, value, states in shares:
            asked = ("states",) if states else ()
            parts = arguments.parts or [p for p in PARTS if p not in ON_REQUEST or p in asked]
            heads = Heads(key, value, _DTYPES[operands])
            flash_qla[heads] = tuple(dict.fromkeys((*flash_qla.get(heads, ()), *parts)))
    return Needs(list(shares), sizes, dims.conv_kernel_dim, flash_qla)


def tasks_of(needs: Needs, arguments: argparse.Namespace) -> list[Task]:
    """One task per kernel of FlashQLA, and per launch of the Triton kernels."""
    torch.set_num_threads(1)  # a fork of this process would lack its threads
    tasks: list[Task] = []
    if needs.flash_qla:
        from .flash_qla import flash_qla_tasks, require_heads

        for heads, parts in needs.flash_qla.items():
            require_heads(needs.sizes._replace(value_heads=heads.value))
            tasks += flash_qla_tasks(heads, parts, arguments.multiprocessors)
    if "triton" in arguments.kernels:
        from .mixer_kernels import mixer_tasks

        for operands in dict.fromkeys(arguments.operands):
            for key, value in dict.fromkeys(share[:2] for share in needs.shares):
                local = needs.sizes._replace(key_heads=key, value_heads=value)
                tasks += mixer_tasks(local, needs.taps, _DTYPES[operands])
    return sorted(tasks, key=lambda task: not task.soon)


_SIZES = ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim", "conv_kernel_dim")


class Model(NamedTuple):
    """Sizes of the layer, and the parallel sizes that a file names."""

    dims: GDNDims
    tp: int | None = None
    cp: int | None = None


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
    sizes = {name: _named(text, f"linear_{name}", path) for name in _SIZES}
    if missing := [f"linear_{name}" for name, size in sizes.items() if size is None]:
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
