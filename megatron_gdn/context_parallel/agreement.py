"""The ranks of a context-parallel group compare their micro-batches and their machines.

If ranks were given different tokens, rows, document boundaries or layouts, they would
hang or exchange wrong rows. So one layer all-gathers and compares five integers in each
of its forwards: tokens, rows, number and hash of documents, layout. After a new layer
is built, the first layer that runs over the group becomes the comparing layer. This is
the same layer on all ranks, since ranks run their layers in the same order. On a GPU
the host waits for the gathered integers only if this rank's integers are new.

A scheme's price depends on which ranks share a machine (are joined by NVLink). The
ranks exchange the names of their hosts once per group, because not every launcher sets
``LOCAL_WORLD_SIZE``.
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
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from ..ops.autograd import uncompiled
from ..ops.documents import Documents, shortened
from ..ops.host_tables import to_device
from .layouts import SequenceLayout

CHECK_RANKS_VARIABLE = "MEGATRON_GDN_CHECK_RANKS"
_LAYOUTS = tuple(SequenceLayout)
# Micro-batches that are remembered per group; a pipeline has fewer in flight.
_MOST_REMEMBERED_MICRO_BATCHES = 256
_BOOT_ID_FILE = Path("/proc/sys/kernel/random/boot_id")

_latest_layer = 0  # the number of the layer that was built last


def number_of_new_layer() -> int:
    """A number for a new layer: 1, 2, ... Each group then chooses its comparing layer
    again."""
    global _latest_layer
    _latest_layer += 1
    return _latest_layer


@dataclass
class _Agreement:
    """The micro-batches that one group's ranks have agreed on, and the layer that
    compares them."""

    # _latest_layer when `comparing_layer` was chosen
    latest_layer_when_chosen: int = -1
    comparing_layer: int = 0
    # False if the ranks' environments switch the comparison off
    is_comparing: bool = True
    # the five integers of each micro-batch for which all ranks had equal integers
    agreed_micro_batches: set[tuple[int, ...]] = field(default_factory=set)
    # The value of the option cp_ranks_per_machine -> how many successive ranks share a
    # machine.
    ranks_per_machine: dict[int | None, int] = field(default_factory=dict)


_agreements: WeakKeyDictionary[dist.ProcessGroup, _Agreement] = WeakKeyDictionary()


def _agreement_of(group: dist.ProcessGroup) -> _Agreement:
    return _agreements.get(group) or _agreements.setdefault(group, _Agreement())


def require_agreement(
    layer: int,
    group: dist.ProcessGroup,
    tokens: int,
    rows: int,
    documents: Documents | None,
    layout: SequenceLayout,
    device: torch.device,
) -> None:
    """Raise a ValueError if the ranks of ``group`` were given different micro-batches.

    Args:
        layer: the calling layer's number, from :func:`number_of_new_layer`.
        group: several ranks.
        tokens: the length of a batch row, summed over the ranks.
        rows: the number of batch rows.
        documents: None if the micro-batch is not packed.
        layout: how the documents were cut.
        device: where the group's backend communicates.

    Nothing is compared on the meta device, while a CUDA graph is captured, or with
    ``MEGATRON_GDN_CHECK_RANKS=0`` in every rank's environment. Of fixed buffers only the
    largest number of documents is compared.
    """
    agreement = _agreements.get(group)
    if (
        agreement is not None
        and agreement.latest_layer_when_chosen == _latest_layer
        and agreement.comparing_layer != layer
    ):
        return  # another layer compares for this group
    if _cannot_compare(device):
        return
    agreement = _agreement_of(group)
    if agreement.latest_layer_when_chosen != _latest_layer:
        agreement.is_comparing = _all_ranks_compare(group, device)
        agreement.latest_layer_when_chosen = _latest_layer
        agreement.comparing_layer = layer
    if not agreement.is_comparing:
        return
    if documents is None:
        number_and_hash = (-1, 0)
    else:
        number_and_hash = documents.fingerprint  # see `_describe`
    integers = (tokens, rows) + number_and_hash + (_LAYOUTS.index(layout),)
    gathered = _gather(integers, group, device)
    # If all ranks had these integers before, the host does not wait for the GPU.
    if integers in agreement.agreed_micro_batches and device.type == "cuda":
        return
    integers_by_rank = [tuple(row) for row in gathered.tolist()]
    if integers_by_rank.count(integers) != len(integers_by_rank):
        raise ValueError(_disagreement_message(integers_by_rank, documents))
    if len(agreement.agreed_micro_batches) == _MOST_REMEMBERED_MICRO_BATCHES:
        agreement.agreed_micro_batches.clear()
    agreement.agreed_micro_batches.add(integers)


def _all_ranks_compare(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether the ranks' environments let them compare micro-batches; a collective.

    Raises a ValueError on all ranks if CHECK_RANKS_VARIABLE differs between them.
    Without this check, a rank that compares would wait forever for one that does not.
    """
    compares = os.environ.get(CHECK_RANKS_VARIABLE, "1") != "0"
    all_compare = _gather((int(compares),), group, device).flatten().tolist()
    if len(set(all_compare)) == 1:
        return compares
    ranks_with_0 = ", ".join(
        str(rank) for rank, value in enumerate(all_compare) if not value
    )
    raise ValueError(
        f"{CHECK_RANKS_VARIABLE} differs between the ranks of a context-parallel "
        f"group: it is 0 on rank(s) {ranks_with_0} and not on the others. Set it to 0 "
        "on all ranks, or unset it on all ranks."
    )


def _cannot_compare(device: torch.device) -> bool:
    """Whether the host cannot read integers of other ranks: on the meta device, and
    while a CUDA graph is captured."""
    capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    return device.type == "meta" or capturing


@uncompiled
def _gather(
    numbers: Sequence[int], group: dist.ProcessGroup, device: torch.device
) -> Tensor:
    """All-gather n ``numbers`` of each rank of ``group``: int64 ``[ranks, n]``."""
    sent = to_device(torch.tensor(numbers, dtype=torch.int64, device="cpu"), device)
    received = sent.new_empty(group.size() * len(numbers))
    try:
        dist.all_gather_into_tensor(received, sent, group=group)
    except RuntimeError as error:
        raise RuntimeError(
            f"the ranks of a context-parallel group could not exchange {len(numbers)} "
            f"numbers ({error}). Install the same version of megatron_gdn on all "
            "ranks, and look for a rank that has ended."
        ) from error
    return received.view(-1, len(numbers))


def _disagreement_message(
    by_rank: list[tuple[int, ...]], documents: Documents | None
) -> str:
    """The text of the error; ``by_rank[r]`` are rank r's five integers, as in
    :func:`_describe`."""
    ranks: dict[tuple[int, ...], list[int]] = {}
    for rank, integers in enumerate(by_rank):
        ranks.setdefault(integers, []).append(rank)
    descriptions = "; ".join(
        f"rank{'s' * (len(members) > 1)} {', '.join(map(str, members))}: "
        f"{_describe(*integers)}"
        for integers, members in ranks.items()
    )
    boundaries = ""
    if documents is not None and documents.known_on_host:
        boundaries = f" This rank was given cu_seqlens={shortened(documents.offsets)}."
    return (
        "the ranks of a context-parallel group disagree about the micro-batch. "
        f"{descriptions}.{boundaries} Every rank must hold the same number of tokens "
        "of the same rows, and be given the same global boundaries: those of the whole "
        "packed buffer, before any split (make them once and broadcast them)."
    )


def _describe(tokens: int, rows: int, count: int, fingerprint: int, layout: int) -> str:
    """One rank's five integers as text, for the error.

    ``count``: number of documents, -1 if not packed, -2 for fixed buffers;
    ``fingerprint``: the hash of their offsets, or how many documents fixed buffers
    hold; ``layout``: the layout's index in `SequenceLayout`.
    """
    if count < 0:
        packed = "not packed"
    else:
        packed = f"{count} documents (boundaries {fingerprint:014x})"
    if count == -2:
        packed = f"fixed buffers for up to {fingerprint} documents"
    cut = f"cut by an unknown layout {layout}"
    if 0 <= layout < len(_LAYOUTS):
        cut = f"cut {_LAYOUTS[layout].value!r}"
    return (
        f"{tokens} tokens over all ranks in {rows} row{'s' * (rows != 1)}, {packed}, "
        f"{cut}"
    )


def check_ranks_per_machine(ranks: object) -> None:
    """Raise a ValueError unless ``ranks``, the option cp_ranks_per_machine, is None or
    an integer of at least 1."""
    if ranks is None or (type(ranks) is int and ranks >= 1):
        return
    raise ValueError(
        f"cp_ranks_per_machine={ranks!r} must be an integer of at least 1, the number "
        "of ranks of a context-parallel group that NVLink joins (GPUs of a machine "
        "divided by tensor_model_parallel_size), or None, with which the ranks compare "
        "their hosts."
    )


def ranks_per_machine(
    group: dist.ProcessGroup, configured: int | None, device: torch.device
) -> int:
    """How many successive ranks of ``group`` share a machine, as
    :func:`largest_shared_run` counts.

    ``configured``, the option cp_ranks_per_machine, is the number of ranks on each
    machine; the last machine may have fewer. If None, the ranks compare the names of
    their hosts. All ranks must call together. The first call with each value of
    ``configured`` is a collective on ``device``. It raises a ValueError on all ranks if
    the ranks' values differ. On the meta device and while a CUDA graph is captured,
    None means that all ranks are on one machine.
    """
    known = _agreement_of(group).ranks_per_machine
    if configured in known:
        return known[configured]
    can_compare = not _cannot_compare(device)
    # also with ``configured``, to see that all ranks were given the same number
    if can_compare:
        machines = _hosts(group, configured, device)
    else:
        machines = [0] * group.size()
    if configured is not None:
        machines = [rank // configured for rank in range(group.size())]
    number = largest_shared_run(machines)
    if can_compare:  # else a later call compares the ranks
        known[configured] = number
    return number


def largest_shared_run(machines: Sequence[Hashable]) -> int:
    """The largest n for which every n successive ranks (0 to n - 1, n to 2 n - 1, ...)
    are on one machine. ``machines[r]`` names the machine of rank r."""
    return gcd(*(len(list(ranks)) for _, ranks in groupby(machines)))


@uncompiled
def _hosts(
    group: dist.ProcessGroup, configured: int | None, device: torch.device
) -> list[int]:
    """For each rank a hash of its host, equal on ranks of one host; a collective.

    Raises a ValueError on all ranks if ``configured`` differs between them.
    """
    # signed, so that the 8 bytes fit the int64 tensor of `_gather`
    host = int.from_bytes(
        blake2b(_own_host().encode(), digest_size=8).digest(), signed=True
    )
    configured_by_rank, hashes = _gather(
        (configured or 0, host), group, device
    ).T.tolist()
    if len(set(configured_by_rank)) > 1:
        raise ValueError(
            "the ranks of a context-parallel group were given different "
            "cp_ranks_per_machine: "
            f"{[number or None for number in configured_by_rank]}, by rank. Give all "
            "ranks the same number, or give no rank a number."
        )
    return hashes


def _own_host() -> str:
    """The host's name and boot id (containers on two machines may have the same
    name)."""
    if _BOOT_ID_FILE.exists():
        boot = _BOOT_ID_FILE.read_text()
    else:
        boot = ""
    return f"{socket.gethostname()} {boot}"
