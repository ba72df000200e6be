"""Boundaries of packed documents in fixed device buffers, for CUDA graphs.

A graph replays launches with the grids, shapes and addresses of its capture. So every
table has the size of the worst case, and new boundaries overwrite the old ones on the
device. Unused entries at the end of a table are empty documents and empty chunks;
kernels skip them.

Legend: N documents at most, T tokens of the buffer, M = N + 1 sequences (the last is
always empty).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import cached_property, partial
from typing import Any, Self

import torch
from torch import Tensor

from .documents import Documents
from .host_tables import require_no_capture, to_device

_FILLED_AGAIN_MESSAGE = (
    "set_documents was called between a forward and its backward, which reads the "
    "boundaries too. Make one set of buffers (static_packed_seq_params) for every "
    "micro-batch in flight, and fill a set again only when the backward of its "
    "micro-batch is over."
)


class StaticDocuments(Documents):
    """Up to N documents packed into one buffer of T tokens, with boundaries that change
    in place.

    Kernels read a StaticDocuments as they read :class:`Documents`. On the host
    ``offsets`` and ``lengths`` raise an error. The documents of each micro-batch have T
    tokens together. Before the first :meth:`fill` the buffer holds documents of
    ``longest`` tokens; by default ``longest`` is T.
    """

    why_headwise = "the one that runs documents in fixed buffers"
    why_not_on_grid = (
        "documents in fixed buffers run without batch_invariant_mode: its chunks "
        "lie where the documents of one micro-batch begin. Switch it off, or give "
        "ordinary packed documents outside of graphs."
    )
    known_on_host = False
    # int32 [N + 1], the offsets of the last :meth:`fill`; unused entries are T
    boundaries: Tensor
    longest: int
    # the key of the call of :meth:`keep_documents` that made this object, or None
    _derivation_key: Hashable
    # each table's tensors, and the function that computes them again
    _tables: dict[Hashable, tuple[Callable[[], tuple[Tensor, ...]], tuple[Tensor, ...]]]
    # :meth:`fill` calls each function with the new lengths, if the host knows them
    _checks: dict[Hashable, Callable[[Sequence[int]], None]]
    # "fill": the stamp of the latest fill; "read": the stamp that the last forward read
    _stamps: dict[str, Tensor]

    def __init__(
        self,
        total_tokens: int,
        max_documents: int,
        device: torch.device | str = "cpu",
        longest: int | None = None,
    ) -> None:
        """Make buffers for at most ``max_documents`` documents of at most ``longest``
        tokens each (None: no limit), ``total_tokens`` together."""
        if longest is None:
            longest = total_tokens
        if min(total_tokens, max_documents, longest) < 1:
            raise ValueError(
                f"total_tokens={total_tokens}, max_documents={max_documents} and the "
                f"longest document's {longest} tokens must be at least 1."
            )
        if max_documents * longest < total_tokens:
            raise ValueError(
                f"{max_documents} documents of at most {longest} tokens cannot fill a "
                f"buffer of {total_tokens}."
            )
        boundaries = torch.arange(max_documents + 1, device="cpu") * longest
        boundaries = boundaries.clamp_(max=total_tokens).to(torch.int32)
        # not an inference tensor, so that ``fill`` can change it in any mode
        boundaries = to_device(boundaries, device)
        # ``vars``, since the class is frozen: caches use the object, by identity, as a
        # key.
        vars(self).update(
            device=boundaries.device,
            max_filled=max_documents,
            boundaries=boundaries,
            longest=longest,
            total_tokens=total_tokens,
            _derivation_key=None,
            _tables={},
            _checks={},
            _stamps={},
        )
        self.refresh(check=False)

    def fill(self, cu_seqlens: Tensor | Sequence[int]) -> None:
        """Overwrite the boundaries and all tables that were made from the boundaries.

        A graph that was captured with these documents reads the new boundaries at its
        next replay. Call ``fill`` on the stream of the replay, or let that stream wait
        for ``fill``. A backward reads the boundaries too, so every micro-batch in
        flight needs its own ``StaticDocuments``. An eager backward raises an error if
        ``fill`` ran after its forward; a replay does not.

        Args:
            cu_seqlens: int ``[m + 1]``, m <= N; offsets from 0 to T that never
                decrease. A device-side assertion checks offsets on a GPU; the host does
                not wait.

        Raises:
            ValueError: more than N documents; offsets on the host that are not valid,
                or that do not fit the sequence layout of a layer that has run with
                these documents. Nothing was overwritten then.
            TypeError: ``cu_seqlens`` is neither a tensor nor a sequence of integers.
        """
        documents = None  # offsets on a GPU are not known here
        if isinstance(cu_seqlens, Tensor) and cu_seqlens.is_cuda:
            offsets = cu_seqlens
            if offsets.dim() != 1 or offsets.is_floating_point() or len(offsets) < 2:
                raise ValueError(
                    "cu_seqlens must be a 1-D integer tensor of at least 2 cumulative "
                    f"lengths, got shape {tuple(offsets.shape)} and dtype "
                    f"{offsets.dtype}."
                )
        else:
            documents = Documents.from_cu_seqlens(
                cu_seqlens, self.total_tokens, device="cpu"
            )
            if max(documents.lengths) > self.longest:
                raise ValueError(
                    f"cu_seqlens has a document of {max(documents.lengths)} tokens, "
                    f"and these buffers were made for {self.longest} at most "
                    "(max_seqlen)."
                )
            offsets = torch.tensor(documents.offsets, dtype=torch.int32, device="cpu")
        given = len(offsets) - 1
        if given > self.max_filled:
            raise ValueError(
                f"cu_seqlens has {given} documents, and these buffers hold up to "
                f"max_documents={self.max_filled}. Make larger buffers and capture "
                "again, or pack fewer documents."
            )
        if documents is not None:
            for check in self._checks.values():
                check(documents.lengths)
        self.boundaries[: given + 1].copy_(to_device(offsets, self.device))
        self.boundaries[given + 1 :].fill_(self.total_tokens)
        # offsets that the host knows were checked above
        self.refresh(check=offsets is cu_seqlens)

    def add_check(self, key: Hashable, check: Callable[[Sequence[int]], None]) -> None:
        """Let :meth:`fill` call ``check(lengths)`` before it overwrites anything.

        ``check`` raises an error for lengths that a sequence layout cannot cut. It is
        not called if the offsets are on a GPU.
        """
        self._checks[key] = check

    def refresh(self, check: bool = True) -> None:
        """Compute all tables again, in place, and set a new :attr:`stamp`; with
        ``check``, check the boundaries on the device. A CUDA graph can capture this
        call."""
        with torch.inference_mode(False), torch.no_grad():
            self._stamps["fill"] = torch.empty(0, dtype=torch.int64, device="cpu")
            if check:
                length = self.boundaries.diff()
                fits = ((length >= 0) & (length <= self.longest)).all()
                require_on_device(
                    fits
                    & (self.boundaries[0] == 0)
                    & (self.boundaries[-1] == self.total_tokens),
                    "cu_seqlens must start at 0, never decrease, end at the buffer's "
                    "tokens, and have no document longer than max_seqlen",
                )
            for compute, tensors in self._tables.values():
                for tensor, new in zip(tensors, compute(), strict=True):
                    tensor.copy_(new)

    @property
    def stamp(self) -> Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        """An empty tensor, a new one after each :meth:`fill`: so a backward notices
        that ``fill`` ran after its forward.

        Stamps are compared by identity. A stamp is a tensor because a forward saves it
        with autograd.
        """
        return self._stamps["fill"]

    def store_or_check_stamp(self, recomputed: bool) -> None:
        """Store the stamp of the fill that a forward reads.

        Activation checkpointing runs a forward again, ``recomputed``. Such a forward
        raises if ``fill`` ran after the first forward.
        """
        if not recomputed:
            self._stamps["read"] = self.stamp
        elif self._stamps.get("read") is not self.stamp:
            raise RuntimeError(_FILLED_AGAIN_MESSAGE)

    def has_stamp(self, stamp: Tensor) -> bool:
        return stamp is self.stamp

    def changed_message(self, stamp: Tensor) -> str:
        return _FILLED_AGAIN_MESSAGE

    def require_unchanged(self, stamp: Tensor, saved_stamp: Tensor) -> None:
        if stamp is not self.stamp:
            raise RuntimeError(_FILLED_AGAIN_MESSAGE)

    def keep_tensors[*Arguments, Made: tuple[Tensor, ...]](
        self,
        make: Callable[[Self, *Arguments], Made],
        *arguments: *Arguments,
        move: bool = True,
    ) -> Made:
        """The tensors ``make(self, *arguments)``, which :meth:`refresh` overwrites.

        The first call for a table raises an error if a CUDA graph is being captured.
        Documents that :meth:`keep_documents` derived share ``_tables``;
        ``_derivation_key`` tells them apart. ``move`` is not read: the tensors are on
        the device.
        """
        key = self._derivation_key, (make, arguments)
        if key not in self._tables:
            require_no_capture("a table of packed documents")
            with torch.inference_mode(False), torch.no_grad():
                compute = partial(make, self, *arguments)
                self._tables[key] = compute, compute()
        _, tensors = self._tables[key]
        return tensors  # pyright: ignore[reportReturnType]

    def to(self, device: torch.device) -> Documents:
        return self

    def keep_documents[*Arguments](
        self,
        make: Callable[[Self, *Arguments], tuple[Tensor]],
        *arguments: *Arguments,
        max_filled: int,
        tokens: int,
    ) -> Documents:
        """At most ``max_filled`` documents of ``tokens`` tokens together, with the
        boundaries ``make(self, *arguments)``, an int32 tensor in a tuple; :meth:`fill`
        computes the boundaries again, in place."""
        return self.keep(
            _static_documents_with_offsets, max_filled, tokens, make, *arguments
        )

    def on_host(self) -> Documents:
        """The documents of the latest fill.

        The host waits for the GPU, so a call during a capture raises an error.
        """
        require_no_capture("a copy of the documents' boundaries on the host")
        return Documents(tuple(self.boundaries.tolist()), self.device)

    @property
    def offsets(self) -> tuple[int, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """An attribute of other `Documents`. Here reading it raises a
        NotImplementedError, since the host does not know the boundaries."""
        raise NotImplementedError(
            "the host needs the boundaries here, and those in fixed buffers "
            "(StaticDocuments, for CUDA graphs) are on the device alone. Use a "
            "GatedDeltaNet without batch_invariant_mode, or pass ordinary "
            "packed_seq_params and leave this layer out of the graph."
        )

    @property
    def cu_seqlens(self) -> Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        """int32 ``[M + 1]``: the boundaries of documents that are not empty; other
        entries are T.

        The values change with each :meth:`fill`. Each read returns a new view, since
        packages cache results by the identity of this tensor.
        """
        return self.keep_tensors(_without_empty)[0].view(-1)

    starts = cu_seqlens  # pyright: ignore[reportAssignmentType]

    @cached_property
    def fingerprint(self) -> tuple[int, int]:
        """(-2, N), which ranks compare. For ordinary documents the first number is
        their count, which is never -2."""
        return -2, self.max_filled

    def max_chunks(self, size: int) -> int:
        """The most chunks of ``size`` tokens that T tokens in at most ``max_filled``
        documents can have."""
        return (
            self.total_tokens + (size - 1) * min(self.max_filled, self.total_tokens)
        ) // size


def require_on_device(condition: Tensor, message: str) -> None:
    """A device-side assertion: the program fails with ``message`` if the bool tensor
    ``condition`` is False. The host does not wait."""
    torch._assert_async(condition, message)  # pyright: ignore[reportPrivateImportUsage]


def _static_documents_with_offsets(
    documents: StaticDocuments,
    max_filled: int,
    tokens: int,
    make: Any,
    *arguments: object,
) -> StaticDocuments:
    """Other fixed buffers: up to ``max_filled`` documents of ``tokens`` tokens
    together, for :meth:`StaticDocuments.keep_documents`.

    ``make(documents, *arguments)`` returns their boundaries, a 1-D int32 tensor on the
    device, in a tuple. Examples are the boundaries of a rank's pieces, and of rows if a
    token has several rows. A fill of ``documents`` computes the boundaries again.
    """
    (boundaries,) = documents.keep_tensors(make, *arguments)
    # without the constructor, which would make boundaries and tables of its own
    derived = object.__new__(StaticDocuments)
    vars(derived).update(
        device=documents.device,
        boundaries=boundaries,
        max_filled=max_filled,
        longest=tokens,
        total_tokens=tokens,
        _derivation_key=(documents._derivation_key, (make, arguments)),
        # no ``_checks``: :meth:`StaticDocuments.fill` is called for ``documents`` alone
        _tables=documents._tables,
        _stamps=documents._stamps,
    )
    return derived


def _without_empty(documents: StaticDocuments) -> tuple[Tensor]:
    """The boundaries ``[M + 1]`` with empty documents last: their ends become T."""
    start = documents.boundaries[:-1]
    end = documents.boundaries[1:]
    T = documents.total_tokens
    ends = torch.where(end > start, end, T).sort().values[: documents.max_filled]
    return (torch.cat([end.new_zeros(1), ends, end.new_full((1,), T)]),)
