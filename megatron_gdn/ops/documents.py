"""Document boundaries of a packed buffer, and the tables made from the boundaries.

Each table is computed from :attr:`Documents.starts` by torch operations on the host,
and copied to the device. In fixed buffers (:class:`.static_documents.StaticDocuments`)
the operations run on the device, and each table has room for the largest number of
documents.

Legend: N documents, T tokens of the buffer, n chunks, M sequences. The sequences are
the documents with tokens; in fixed buffers M = N + 1, and the last sequence is empty.
"""

from __future__ import annotations

import operator
from array import array
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from itertools import pairwise
from typing import Any, ClassVar, NamedTuple, Self, cast

import torch
from torch import Tensor

from .host_tables import cached_by_stream, to_device


class ChunkPlaces(NamedTuple):
    """The chunks of all sequences, sequence by sequence; in fixed buffers unused chunks
    without tokens follow."""

    # int32 [M + 1]: the index of every sequence's first chunk, then the chunk count
    offsets: Tensor
    # int32 [n, 2]: for each chunk its sequence, and its number in the sequence; an
    # unused chunk has (M - 1, 0)
    indices: Tensor


@dataclass(frozen=True, eq=False)
class Documents:
    """Boundaries of the N documents packed into one buffer of T tokens.

    Each tensor is made at its first use and stored here, so layers that use one object
    share it.
    """

    # N + 1 cumulative lengths on the host, from 0 to T, never decreasing
    offsets: tuple[int, ...]
    device: torch.device  # device of the tables that kernels read

    # why only the headwise scheme runs these documents; "" if every scheme does
    why_headwise: ClassVar[str] = ""
    # why batch_invariant_mode refuses these documents; "" if it takes them
    why_not_on_grid: ClassVar[str] = ""
    # whether a document may start from the last state of an earlier one, its parent
    may_have_parents: ClassVar[bool] = False
    # whether the host knows the boundaries; in fixed buffers only the device does
    known_on_host: ClassVar[bool] = True

    def __post_init__(self) -> None:
        """Raise a ValueError unless the offsets start at 0, never decrease and end
        below 2^31."""
        offsets = self.offsets
        if len(offsets) < 2:
            raise ValueError(
                f"cu_seqlens={list(offsets)} names no document; it must hold N + 1 "
                "offsets that start at 0 and end at the number of tokens."
            )
        if offsets[0] != 0:
            raise ValueError(
                f"cu_seqlens starts at {offsets[0]}, not at 0, so the first "
                f"{offsets[0]} tokens belong to no document. Offsets must start at 0."
            )
        if offsets[-1] >= 2**31:
            raise ValueError(
                f"cu_seqlens ends at {offsets[-1]}; tables of tokens have 32 bits, so "
                f"a buffer has at most {2**31 - 1} tokens. Split the micro-batch."
            )
        for index, (start, end) in enumerate(pairwise(offsets)):
            if end < start:
                raise ValueError(
                    f"cu_seqlens runs backwards at document {index}: {start} is "
                    f"followed by {end}. Offsets must never decrease."
                )

    @classmethod
    def from_cu_seqlens(
        cls,
        cu_seqlens: Tensor | Sequence[int] | Documents,
        total_tokens: int,
        *,
        device: torch.device | str | None = None,
    ) -> Documents:
        """The documents of ``cu_seqlens`` (int ``[N + 1]``), which must end at
        ``total_tokens``.

        Reading a ``cu_seqlens`` on a GPU makes the host wait for the GPU. To avoid the
        wait, pass ``Documents`` that were made before.

        Raises:
            TypeError: ``cu_seqlens`` is no tensor, sequence of integers or
                ``Documents``.
            ValueError: a tensor is not 1-D of integers; offsets decrease or do not run
                from 0 to T.
        """
        if isinstance(cu_seqlens, Documents):
            documents = cu_seqlens
        else:
            if device is None:
                if isinstance(cu_seqlens, Tensor):
                    device = cu_seqlens.device
                else:
                    device = "cpu"
            documents = _shared_documents(offsets_of(cu_seqlens), torch.device(device))
        if documents.total_tokens != total_tokens:
            raise ValueError(
                f"cu_seqlens ends at {documents.total_tokens}, which does not match "
                f"the {total_tokens} tokens of the buffer: it must cover the whole "
                "buffer, that of all ranks before it is cut. Let padding be a document, "
                "or part of the last one."
            )
        return documents

    @property
    def boundary_key(self) -> tuple[int, ...]:
        """Integers that determine the boundaries: two buffers of T tokens have equal
        integers only if their boundaries are equal."""
        return self.offsets

    @cached_property
    def fingerprint(self) -> tuple[int, int]:
        """The number of documents and a hash of :attr:`boundary_key`.

        Ranks compare these two numbers to see whether all have the same documents. The
        hash has 7 bytes, so that int64 holds it.
        """
        digest = blake2b(
            array("q", self.boundary_key).tobytes(), digest_size=7
        ).digest()
        return len(self.lengths), int.from_bytes(digest, "little")

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """The number of tokens of each document."""
        offsets = self.offsets
        return tuple(end - start for start, end in pairwise(offsets))

    @cached_property
    def filled_indices(self) -> Tensor | None:
        """The indices of the documents with tokens, int64 on the device; None if all
        have tokens."""
        index = [n for n, length in enumerate(self.lengths) if length]
        if len(index) == len(self.lengths):
            return None
        return to_device(
            torch.tensor(index, dtype=torch.int64, device="cpu"), self.device
        )

    @cached_property
    def max_filled(self) -> int:
        """The number of documents with tokens; in fixed buffers the largest possible
        number."""
        return len(self.filled_offsets) - 1

    @property
    def sequences(self) -> int:
        """M: the number of documents with tokens; in fixed buffers ``max_filled +
        1``."""
        if self.known_on_host:
            return self.max_filled
        return self.max_filled + 1

    def on_host(self) -> Documents:
        """These documents; for fixed buffers, a copy with boundaries that the host
        knows."""
        return self

    def to(self, device: torch.device) -> Documents:
        """The same documents, with tables on ``device``."""
        if device == self.device:
            return self
        return _shared_documents(self.offsets, device)

    @cached_property
    def total_tokens(self) -> int:
        return self.offsets[-1]

    @cached_property
    def stamp(self) -> Tensor:
        """:attr:`boundary_key` as int64 on the host.

        A forward saves this tensor, so that its backward can compare the boundaries.
        """
        with torch.inference_mode(False):  # autograd cannot save an inference tensor
            return torch.tensor(self.boundary_key, dtype=torch.int64, device="cpu")

    def has_stamp(self, stamp: Tensor) -> bool:
        """Whether documents with this :attr:`stamp` have the boundaries of these
        documents."""
        return stamp is self.stamp or torch.equal(stamp, self.stamp)

    def changed_message(self, stamp: Tensor) -> str:
        """The error message for a forward that ran with documents of ``stamp``, and was
        recomputed with these documents."""
        return changed_boundaries_message(
            f"{shortened(self.stamp.tolist())} after {shortened(stamp.tolist())}"
        )

    def require_unchanged(self, stamp: Tensor, saved_stamp: Tensor) -> None:
        """Raise if ``saved_stamp``, which autograd gives the backward, is not the
        forward's ``stamp``.

        Under activation checkpointing, a second forward made ``saved_stamp``. This
        forward may have run with other boundaries.
        """
        if saved_stamp is not stamp and not torch.equal(saved_stamp, stamp):
            raise RuntimeError(
                changed_boundaries_message("those of another micro-batch")
            )

    @cached_property
    def filled_offsets(self) -> tuple[int, ...]:
        """The cumulative lengths :attr:`offsets`, without the documents that have no
        tokens."""
        pairs = pairwise(self.offsets)
        return (0,) + tuple(end for start, end in pairs if end > start)

    @cached_property
    def starts(self) -> Tensor:
        """int32 ``[M + 1]``: :attr:`filled_offsets` on the host (fixed buffers: on the
        device)."""
        return torch.tensor(self.filled_offsets, dtype=torch.int32, device="cpu")

    @cached_property
    def cu_seqlens(self) -> Tensor:
        """:attr:`starts` on the device, for kernels."""
        return to_device(self.starts, self.device)

    @cached_property
    def kept_results(self) -> dict[Hashable, Any]:
        """The results of :meth:`keep` and :meth:`keep_tensors`; a key is the function
        with its arguments."""
        return {}

    def keep[*Arguments, Made](
        self, make: Callable[[Self, *Arguments], Made], *arguments: *Arguments
    ) -> Made:
        """The result of ``make(self, *arguments)``, computed at the first call and
        stored on this object.

        The package stores results in two ways. A result that is made from a `Documents`
        is stored on it, by this method or :meth:`keep_tensors`; a `Documents` belongs
        to one CUDA stream, and is freed with its micro-batch. A result that is made
        only from sizes is stored by an ``lru_cache``, or, if it has tensors, by
        :func:`.host_tables.cached_by_stream`.
        """
        key = make, arguments
        if key not in self.kept_results:
            self.kept_results[key] = make(self, *arguments)
        return self.kept_results[key]

    def keep_tensors[*Arguments, Made: tuple[Tensor, ...]](
        self,
        make: Callable[[Self, *Arguments], Made],
        *arguments: *Arguments,
        move: bool = True,
    ) -> Made:
        """The tensors ``make(self, *arguments)``, moved to the device, and stored as
        :meth:`keep` does.

        In fixed buffers shapes must not depend on the boundaries, and every change of
        boundaries runs ``make`` again. ``move=False`` leaves the tensors on the device
        of :attr:`starts`.
        """
        key = make, arguments, move
        tensors = self.kept_results.get(key)
        if tensors is None:
            with torch.inference_mode(False), torch.no_grad():
                tensors = make(self, *arguments)
                if move:
                    on_device = [to_device(x, self.device) for x in tensors]
                    # a NamedTuple is made by its _make, a plain tuple by tuple
                    make_tuple = getattr(tensors, "_make", tuple)
                    tensors = cast(Made, make_tuple(on_device))
            self.kept_results[key] = tensors
        return tensors

    def keep_documents[*Arguments](
        self,
        make: Callable[[Self, *Arguments], tuple[Tensor]],
        *arguments: *Arguments,
        max_filled: int,
        tokens: int,
    ) -> Documents:
        """Other documents, with the offsets ``make(self, *arguments)``, stored as
        :meth:`keep` does.

        For example, Gated DeltaProduct has several rows per token, so its ``make``
        counts boundaries in rows.
        The offsets run from 0 to ``tokens``. Documents without tokens are left out; at
        most ``max_filled`` remain. Only fixed buffers read ``tokens`` and
        ``max_filled``, as the sizes of their tables.
        """
        return self.keep(_documents_with_offsets, make, *arguments)

    def document_T(self) -> Tensor:
        """The index of each token's document among the documents with tokens: int64
        ``[T]``, on the device of :attr:`starts`."""
        return torch.searchsorted(self.starts[1:], _tokens_of(self), right=True)

    @cached_property
    def position_T(self) -> Tensor:
        """int32 ``[T]``: how many tokens of the same document come before each
        token."""
        return self.keep_tensors(_positions_in_documents)[0]

    def max_chunks(self, size: int) -> int:
        """An upper bound of the number of chunks of ``size`` tokens in these
        documents."""
        return sum(-(-length // size) for length in self.lengths)

    def chunks(self, size: int) -> ChunkPlaces:
        """For every chunk of ``size`` tokens, its sequence and its number in the
        sequence."""
        return self.keep_tensors(chunk_places_of, size)

    def ancestor_slices(self, start: int) -> tuple[slice, ...]:
        """The tokens of all ancestors of the document that begins at token ``start``,
        one slice per ancestor; without a tree there are none."""
        return ()

    @property
    def longest_sequence(self) -> int:
        """The most tokens of a document together with all documents that it
        continues."""
        return max(self.lengths)

    @cached_property
    def position_in_sequence_T(self) -> Tensor:
        """int32 ``[T]``: :attr:`position_T`, plus the tokens of the documents that the
        token's document continues."""
        return self.position_T


def _documents_with_offsets(
    documents: Documents, make: Callable[..., tuple[Tensor]], *arguments: object
) -> Documents:
    """Documents with the offsets ``make(documents, *arguments)``, one tensor. Documents
    without tokens are left out; an empty buffer has one empty document."""
    (offset_tensor,) = make(documents, *arguments)
    # a document without tokens repeats an offset; a dict has each offset once, in order
    offsets = tuple(dict.fromkeys(offset_tensor.tolist()))
    return Documents(offsets if len(offsets) > 1 else (0, 0), documents.device)


def _positions_in_documents(documents: Documents) -> tuple[Tensor]:
    """int32 ``[T]``: how many tokens of the same document come before each token."""
    return (_tokens_of(documents) - documents.starts[documents.document_T()],)


@cached_by_stream(32)
def _shared_documents(offsets: tuple[int, ...], device: torch.device) -> Documents:
    """The documents of ``offsets``: one object for equal offsets, so that micro-batches
    share its tables."""
    return Documents(offsets, device)


def one_document(tokens: int, device: torch.device) -> Documents:
    """Documents of one sequence that fills a buffer of ``tokens`` tokens."""
    return _shared_documents((0, tokens), device)


def documents_of_rows(
    rows: Sequence[int], device: torch.device, documents: Documents | None = None
) -> Documents:
    """The documents of a batch whose B rows of S tokens lie end to end.

    ``rows`` is (B, S). Each row is one document, or is cut as ``documents`` are.
    """
    B, S = rows
    if documents is not None and B == 1:
        return documents
    if documents is None:
        ends_in_row = (S,)
    else:
        ends_in_row = documents.offsets[1:]
    offsets = [0]
    for row in range(B):
        offsets += [row * S + end for end in ends_in_row]
    return _shared_documents(tuple(offsets), device)


def _tokens_of(documents: Documents) -> Tensor:
    """The indices of the T tokens, counted from 0, on the device of
    :attr:`Documents.starts`."""
    starts = documents.starts
    return torch.arange(documents.total_tokens, device=starts.device, dtype=torch.int32)


def chunk_places_of(documents: Documents, size: int) -> ChunkPlaces:
    """The `ChunkPlaces` of chunks of ``size`` tokens, on the device of
    ``documents.starts``."""
    return chunk_places(
        ceil_div(documents.starts.diff(), size), documents.max_chunks(size)
    )


def chunk_places(count: Tensor, chunks: int) -> ChunkPlaces:
    """The :class:`ChunkPlaces` of ``chunks`` chunks; int32 ``[M]`` ``count`` says how
    many each sequence has. More chunks than the sum of ``count`` are unused."""
    offsets = torch.cat([count.new_zeros(1), count.cumsum(0, dtype=torch.int32)])
    number = torch.arange(chunks, device=count.device, dtype=torch.int32)
    sequence = torch.searchsorted(offsets[1:], number, right=True).clamp_(
        max=len(count) - 1
    )
    place = torch.where(number < offsets[-1], number - offsets[sequence], 0)
    return ChunkPlaces(offsets, torch.stack([sequence.to(torch.int32), place], 1))


def ceil_div(count: Tensor, by: Tensor | int) -> Tensor:
    """``count / by``, rounded up."""
    return (count + (by - 1)).div(by, rounding_mode="floor")


def shortened(numbers: Sequence[int]) -> str:
    """The list ``numbers`` for an error's text; of more than 20 numbers the first ten
    and the last two."""
    words = [str(number) for number in numbers]
    if len(words) > 20:
        words[10:-2] = [f"... ({len(words) - 12} more) ..."]
    return f"[{', '.join(words)}]"


def changed_boundaries_message(found: str) -> str:
    """The error message if a recomputation found other boundaries than its forward;
    ``found`` describes the boundaries of the recomputation."""
    return (
        "the boundaries of the documents changed between a forward and its "
        f"recomputation in the backward, which found {found}. Give every micro-batch "
        "in flight a PackedSeqParams of its own with tensors of its own, and do not "
        "change these tensors before its backward is over."
    )


def require_one_row(rows: int, description: str) -> None:
    """Raise a ValueError unless a packed batch has one row.

    ``description`` says in the error which tensor has how many rows.
    """
    if rows != 1:
        raise ValueError(
            f"packed documents need a batch of 1, got {description}. Lay the rows end "
            "to end and extend cu_seqlens."
        )


def offsets_of(source: Tensor | Sequence[int]) -> tuple[int, ...]:
    """The integers of a ``cu_seqlens``; for a tensor on a GPU the host waits."""
    if isinstance(source, Tensor):
        integers = not (source.is_floating_point() or source.is_complex())
        dense = source.layout == torch.strided and not source.is_meta
        if source.dim() != 1 or not integers or source.dtype == torch.bool or not dense:
            raise ValueError(
                "cu_seqlens must be a 1-D integer tensor of cumulative lengths on the "
                f"CPU or on a GPU, got shape {tuple(source.shape)}, dtype "
                f"{source.dtype} and layout {source.layout} on {source.device}."
            )
        return tuple(source.tolist())
    try:
        return tuple(operator.index(offset) for offset in source)
    except TypeError:
        raise TypeError(
            "cu_seqlens must be a 1-D integer tensor, a sequence of integers or "
            f"Documents, got {type(source).__name__}: {source!r:.80}."
        ) from None
