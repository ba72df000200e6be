"""What a run needs, as tasks that compile it."""

from __future__ import annotations

import argparse
from typing import NamedTuple

from ..mixers.gdn.sizes import GDNDims
from ..ops.gdn.sizes import HeadSizes
from .arguments import PARTS
from .model_file import Model, read_model
from .shares import Share, shares_of
from .tasks import Task


class Needs(NamedTuple):
    """The layer of one rank.

    Attributes:
        shares: the heads of a rank, one entry for each way in which the run may split them.
        sizes: the head dims; its numbers of heads are not used.
        taps: of the convolution.
    """

    shares: list[Share]
    sizes: HeadSizes
    taps: int


def needs_of(arguments: argparse.Namespace) -> Needs:
    """From the command line.

    Raises:
        FileNotFoundError, ValueError: says what was given and what fits.
    """
    if arguments.config is not None:
        given = [flag for flag in ("head_dim", "conv") if getattr(arguments, flag) is not None]
        if given:
            flags = " and ".join(f"--{flag.replace('_', '-')}" for flag in given)
            raise ValueError(f"{flags} beside --config, which names these sizes; leave it out.")
        models = [read_model(arguments.config)]
    else:
        models = [Model(_dims(arguments, *heads)) for heads in arguments.heads]
    shares: dict[Share, None] = {}
    for dims, tp, cp in models:
        tp, cp = arguments.tp or tp or 1, arguments.cp or cp or 1
        shares |= dict.fromkeys(shares_of(dims, tp, cp, arguments.linear_cp_mode))
    dims = models[0].dims
    sizes = HeadSizes(1, 1, dims.key_head_dim, dims.value_head_dim)
    return Needs(list(shares), sizes, dims.conv_kernel_dim)


def _dims(arguments: argparse.Namespace, key_heads: int, value_heads: int) -> GDNDims:
    dim = arguments.head_dim or 128
    return GDNDims(
        hidden_size=1,  # no kernel depends on it
        num_key_heads=key_heads,
        num_value_heads=value_heads,
        key_head_dim=dim,
        value_head_dim=dim,
        conv_kernel_dim=arguments.conv or 4,
    )


def tasks_of(needs: Needs, arguments: argparse.Namespace) -> list[Task]:
    """One task per kernel of FlashQLA, and per launch of the Triton kernels.

    Raises:
        ImportError: a package that compiles is missing.
        ValueError: FlashQLA does not take these heads.
    """
    import torch

    from ..ops.gdn.flash_qla.builds import Heads
    from .hopper import MULTIPROCESSORS

    torch.set_num_threads(1)  # a fork of this process would lack its threads
    tasks: list[Task] = []
    for operands in arguments.operands:
        dtype = torch.float16 if operands == "fp16" else torch.bfloat16
        for key, value, states in needs.shares:
            if "flash_qla" in arguments.kernels:
                from .flash_qla import flash_qla_tasks, require_heads

                require_heads(needs.sizes._replace(key_heads=key, value_heads=value))
                parts = arguments.parts or [p for p in PARTS if p != "states" or states]
                heads, most = Heads(key, value, dtype), arguments.multiprocessors
                tasks += flash_qla_tasks(heads, tuple(parts), most or MULTIPROCESSORS)
            if "triton" in arguments.kernels:
                from .mixer_kernels import mixer_tasks

                local = needs.sizes._replace(key_heads=key, value_heads=value)
                tasks += mixer_tasks(local, needs.taps, dtype)
    return tasks
