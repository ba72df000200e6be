"""Which ranks of a context-parallel group lie on one machine, where the wire is fast.

A *machine* is what NVLink joins. Others say node; here a node is a place of a chain. Schemes need
one number: how many ranks in a row lie on one machine. All ranks must have the same number, since
their messages follow from it. So they exchange the names of their hosts, once per group. Variables
such as ``LOCAL_WORLD_SIZE`` would not do: not every launcher sets them, and they differ between
ranks where machines differ.
"""

from __future__ import annotations

import socket
from collections.abc import Hashable, Sequence
from hashlib import blake2b
from itertools import groupby
from math import gcd
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from ..ops.uncompiled import uncompiled

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")

_found: WeakKeyDictionary[Any, int] = WeakKeyDictionary()


def check_ranks_per_machine(told: Any) -> int | None:
    """``told``, if it is legal.

    Raises:
        ValueError: neither None nor an integer of at least 1.
    """
    if told is None or (type(told) is int and told >= 1):
        return told
    raise ValueError(
        f"cp_ranks_per_machine={told!r} must be an integer of at least 1, the ranks of a "
        f"context-parallel group that NVLink joins (GPUs of a machine over "
        f"tensor_model_parallel_size), or None: the layer asks the hosts."
    )


def ranks_per_machine(group: Any, told: int | None, device: torch.device) -> int:
    """How many successive ranks of ``group`` lie on one machine; a divisor of its size.

    The first call for a group exchanges host names if nothing is ``told``, so all ranks must call
    together. On the meta device and while a CUDA graph is captured nothing can be sent: the group
    then counts as one machine.

    Args:
        told: the ranks of each machine; the last machine may have fewer. More ranks than the group
            has mean one machine.
        device: where the group's backend communicates.
    """
    size = group.size()
    if told is not None:
        return stretch([rank // told for rank in range(size)])
    if group not in _found:
        capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        if device.type == "meta" or capturing:
            return size
        _found[group] = stretch(_hosts(group, device))
    return _found[group]


def stretch(machines: Sequence[Hashable]) -> int:
    """The longest stretch that cuts the ranks so that none is on two machines.

    ``machines``: of every rank. 8 ranks beside 4 are stretches of 4; ranks that alternate between
    machines are stretches of 1.
    """
    return gcd(*(len(list(ranks)) for _, ranks in groupby(machines)))


@uncompiled
def _hosts(group: Any, device: torch.device) -> list[int]:
    """A number for the host of every rank. The host waits for the answer."""
    own = torch.tensor([_number_of(_own_host())], dtype=torch.int64, device="cpu").to(device)
    all_of_group = own.new_empty(group.size())
    dist.all_gather_into_tensor(all_of_group, own, group=group)
    return all_of_group.tolist()


def _own_host() -> str:
    """The name and, where Linux tells it, the boot: containers may all have the same name."""
    boot = _BOOT_ID.read_text() if _BOOT_ID.exists() else ""
    return f"{socket.gethostname()} {boot}"


def _number_of(host: str) -> int:
    return int.from_bytes(blake2b(host.encode(), digest_size=8).digest(), signed=True)
