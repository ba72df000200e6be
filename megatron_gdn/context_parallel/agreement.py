"""Do all ranks of a context-parallel group have the same micro-batch?

Every rank derives its messages from the tokens, rows, document boundaries and layout that it was
given. Ranks that were given different ones would hang or exchange wrong rows, so the ranks compare
them in an all-gather of five integers.

One layer compares, in each of its forwards: the first that runs over the group after the latest
layer was built. This choice does not depend on what a rank was given, or a rank could wait alone.
The host waits for the answer on the CPU every time, on a GPU only if the contents are new.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from ..ops.autograd import uncompiled
from ..ops.documents import Documents
from ..ops.host_tables import stream_of_tables, to_device
from .layouts import SequenceLayout

SWITCH = "MEGATRON_GDN_CHECK_RANKS"
_LAYOUTS = tuple(SequenceLayout)
_REMEMBERED = 256  # contents per group: more than the micro-batches that a pipeline has in flight

_latest_built = 0


def number_of_new_layer() -> int:
    """A number for a layer that is being built; groups then choose the comparing layer anew."""
    global _latest_built
    _latest_built += 1
    return _latest_built


@dataclass
class _Known:
    chosen_after: int = -1  # the latest layer that was built before `layer` was chosen
    layer: int = 0  # the layer that compares
    # The contents that the ranks agreed on, each with its tensors on the device, by stream.
    agreed: OrderedDict[tuple[int, ...], dict[int, Tensor]] = field(default_factory=OrderedDict)

    def is_new(self, contents: tuple[int, ...]) -> bool:
        if contents in self.agreed:
            self.agreed.move_to_end(contents)
        return contents not in self.agreed


_groups: WeakKeyDictionary[Any, _Known] = WeakKeyDictionary()


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
    if group is None or group.size() == 1 or device.type == "meta":
        return
    known = _groups.get(group) or _groups.setdefault(group, _Known())
    if known.chosen_after != _latest_built:
        known.chosen_after, known.layer = _latest_built, layer
    if known.layer != layer or os.environ.get(SWITCH, "1") == "0":
        return
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return
    packed = (-1, 0) if documents is None else documents.contents
    mine = (tokens, rows, *packed, _LAYOUTS.index(layout))
    gathered = _gather(mine, known.agreed.get(mine), group, device)
    if not known.is_new(mine) and device.type == "cuda":
        return
    given = [tuple(theirs) for theirs in gathered.tolist()]
    if given.count(mine) != len(given):
        raise ValueError(_complaint(given, documents))
    known.agreed.setdefault(mine, {})
    if len(known.agreed) > _REMEMBERED:
        known.agreed.popitem(last=False)


@uncompiled
def _gather(
    mine: tuple[int, ...], kept: dict[int, Tensor] | None, group: Any, device: torch.device
) -> Tensor:
    """The contents of all ranks, int64 ``[ranks, 5]``; ``kept``: tensors of ``mine`` by stream."""
    stream = stream_of_tables()
    kept = {} if kept is None else kept
    if stream not in kept:
        kept[stream] = to_device(torch.tensor(mine, dtype=torch.int64, device="cpu"), device)
    own = kept[stream]
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
