"""What all ranks of a context-parallel group must agree about: the micro-batch, and the machines.

Every rank derives its messages from the tokens, rows, document boundaries and layout that it was
given. Ranks that were given different ones would hang or exchange wrong rows, so the ranks compare
them in an all-gather of five integers.

One layer compares, in each of its forwards: the first that runs over the group after the latest
layer was built. This choice does not depend on what a rank was given, or a rank could wait alone.
The host waits for the answer on the CPU every time, on a GPU only if the contents are new.

NVLink joins the ranks of one machine, which decides the price of a scheme. Not every launcher sets
``LOCAL_WORLD_SIZE``, and it differs between machines of different sizes. So the ranks exchange the
names of their hosts, once per group.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import groupby
from math import gcd
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from ..ops.autograd import uncompiled
from ..ops.documents import Documents
from ..ops.host_tables import to_device
from .layouts import SequenceLayout

SWITCH = "MEGATRON_GDN_CHECK_RANKS"
_LAYOUTS = tuple(SequenceLayout)
_REMEMBERED = 256  # contents per group: more than the micro-batches that a pipeline has in flight
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")

_latest_built = 0


def number_of_new_layer() -> int:
    """A number for a layer that is being built; groups then choose the comparing layer anew."""
    global _latest_built
    _latest_built += 1
    return _latest_built


@dataclass
class _Known:
    """What a group's ranks have agreed on."""

    chosen_after: int = -1  # the latest layer that was built before `layer` was chosen
    layer: int = 0  # the layer that compares
    agreed: set[tuple[int, ...]] = field(default_factory=set)  # contents of micro-batches
    # Successive ranks on one machine, by the option cp_ranks_per_machine.
    per_machine: dict[int | None, int] = field(default_factory=dict)


_groups: WeakKeyDictionary[Any, _Known] = WeakKeyDictionary()


def _known(group: Any) -> _Known:
    return _groups.get(group) or _groups.setdefault(group, _Known())


def require_agreement(
    layer: int,
    group: Any,
    tokens: int,
    rows: int,
    documents: Documents | None,
    layout: SequenceLayout,
    device: torch.device,
) -> None:
    """Refuse, with a ValueError, a micro-batch that the ranks of ``group`` were given differently.

    Nothing is compared on one rank, on the meta device, while a CUDA graph is captured, or with
    ``MEGATRON_GDN_CHECK_RANKS=0`` in every rank's environment. Of documents in fixed buffers only
    the number that fits is compared. ``layer`` is a :func:`number_of_new_layer`, ``tokens`` are
    those of all ranks, ``device`` is where the group's backend communicates.
    """
    if group is None or group.size() == 1 or _silent(device):
        return
    known = _known(group)
    if known.chosen_after != _latest_built:
        known.chosen_after, known.layer = _latest_built, layer
    if known.layer != layer or os.environ.get(SWITCH, "1") == "0":
        return
    packed = (-1, 0) if documents is None else documents.contents
    mine = (tokens, rows, *packed, _LAYOUTS.index(layout))
    gathered = _gather(mine, group, device)
    if mine in known.agreed and device.type == "cuda":
        return
    given = [tuple(theirs) for theirs in gathered.tolist()]
    if given.count(mine) != len(given):
        raise ValueError(_complaint(given, documents))
    if len(known.agreed) == _REMEMBERED:
        known.agreed.clear()
    known.agreed.add(mine)


def _silent(device: torch.device) -> bool:
    """Whether nothing may be sent: rows have no values, or a CUDA graph is captured."""
    capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    return device.type == "meta" or capturing


@uncompiled
def _gather(mine: Sequence[int], group: Any, device: torch.device) -> Tensor:
    """The numbers of all ranks, int64 ``[ranks, n]``."""
    own = to_device(torch.tensor(mine, dtype=torch.int64, device="cpu"), device)
    given = own.new_empty(group.size() * len(mine))
    dist.all_gather_into_tensor(given, own, group=group)
    return given.view(-1, len(mine))


def _complaint(given: list[tuple[int, ...]], documents: Documents | None) -> str:
    ranks: dict[tuple[int, ...], list[int]] = {}
    for rank, theirs in enumerate(given):
        ranks.setdefault(theirs, []).append(rank)
    said = "; ".join(
        f"rank{'s' * (len(who) > 1)} {', '.join(map(str, who))}: {_words(*what)}"
        for what, who in ranks.items()
    )
    own = ""
    if documents is not None and documents.known:
        offsets = [str(offset) for offset in documents.offsets]
        if len(offsets) > 20:
            offsets[10:-2] = [f"... {offsets[-3]}"]
        own = f" This rank was given cu_seqlens=[{', '.join(offsets)}]."
    return (
        f"the ranks of a context-parallel group disagree about the micro-batch. {said}.{own} Every "
        f"rank must hold the same number of tokens of the same rows, and be given the same global "
        f"boundaries: those of the whole packed buffer, before any split (make them once and "
        f"broadcast them)."
    )


def _words(tokens: int, rows: int, count: int, fingerprint: int, layout: int) -> str:
    packed = "not packed" if count < 0 else f"{count} documents (boundaries {fingerprint:014x})"
    if count == -2:
        packed = f"fixed buffers for up to {fingerprint} documents"
    cut = f"cut {_LAYOUTS[layout].value!r}"
    return f"{tokens} tokens over all ranks in {rows} row{'s' * (rows != 1)}, {packed}, {cut}"


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
    known = _known(group).per_machine
    if told in known:
        return known[told]
    silent = _silent(device)
    machines = [0] * group.size() if silent else _hosts(group, told, device)
    if told is not None:
        machines = [rank // told for rank in range(group.size())]
    if not silent:
        known[told] = stretch(machines)
    return stretch(machines)


def stretch(machines: Sequence[Hashable]) -> int:
    """The longest stretch of ranks that never spans two of ``machines``, given by rank."""
    return gcd(*(len(list(ranks)) for _, ranks in groupby(machines)))


@uncompiled
def _hosts(group: Any, told: int | None, device: torch.device) -> list[int]:
    """A number for the host of every rank; the caller waits for the answer."""
    host = int.from_bytes(blake2b(_own_host().encode(), digest_size=8).digest(), signed=True)
    given, hosts = _gather((told or 0, host), group, device).T.tolist()
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
