"""Which ranks of a context-parallel group lie on one machine, that is, are joined by NVLink.

All ranks need the same answer, so they exchange the names of their hosts, once per group. Not every
launcher sets ``LOCAL_WORLD_SIZE``, and it differs between machines of different sizes.
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

from ..ops.autograd import uncompiled

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")

_agreed: WeakKeyDictionary[Any, dict[int | None, int]] = WeakKeyDictionary()


def check_ranks_per_machine(told: Any) -> int | None:
    """Return ``told`` if it is None or an integer of at least 1; else raise a ValueError."""
    if told is None or (type(told) is int and told >= 1):
        return told
    raise ValueError(
        f"cp_ranks_per_machine={told!r} must be an integer of at least 1, the ranks of a "
        f"context-parallel group that NVLink joins (GPUs of a machine over "
        f"tensor_model_parallel_size), or None: the layer asks the hosts."
    )


def ranks_per_machine(group: Any, told: int | None, device: torch.device) -> int:
    """How many successive ranks of ``group`` lie on one machine; a divisor of its size.

    ``told`` are the ranks of each machine; the last may have fewer. The first call for a group and
    a number is a collective on ``device``: all ranks must call, and different numbers are a
    ValueError on all. On the meta device and while a CUDA graph is captured the answer is ``told``,
    or one machine.
    """
    known = _agreed.setdefault(group, {})
    if told not in known:
        capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        silent = device.type == "meta" or capturing
        machines = [0] * group.size() if silent else _hosts(group, told, device)
        if told is not None:
            machines = [rank // told for rank in range(group.size())]
        if silent:
            return stretch(machines)
        known[told] = stretch(machines)
    return known[told]


def stretch(machines: Sequence[Hashable]) -> int:
    """The longest stretch of ranks that never spans two of ``machines``, given by rank."""
    return gcd(*(len(list(ranks)) for _, ranks in groupby(machines)))


@uncompiled
def _hosts(group: Any, told: int | None, device: torch.device) -> list[int]:
    """A number for the host of every rank; the caller waits for the answer."""
    host = int.from_bytes(blake2b(_own_host().encode(), digest_size=8).digest(), signed=True)
    own = torch.tensor([told or 0, host], dtype=torch.int64, device="cpu").to(device)
    all_of_group = own.new_empty(group.size() * 2)
    dist.all_gather_into_tensor(all_of_group, own, group=group)
    given, hosts = all_of_group.view(-1, 2).T.tolist()
    if len(set(given)) > 1:
        raise ValueError(
            f"the ranks of a context-parallel group were given different cp_ranks_per_machine: "
            f"{[number or None for number in given]}, by rank. Give all ranks the same number, or "
            f"none."
        )
    return hosts


def _own_host() -> str:
    """The name and the boot id: several containers may have the same name."""
    boot = _BOOT_ID.read_text() if _BOOT_ID.exists() else ""
    return f"{socket.gethostname()} {boot}"
