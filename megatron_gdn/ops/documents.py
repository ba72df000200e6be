"""Document boundaries of a packed buffer, resolved once and read by every op.

Legend: N documents, T tokens of the buffer.
"""

from __future__ import annotations

import operator
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b

import torch
from torch import Tensor

from .host_tables import to_device


@dataclass(frozen=True, eq=False)
class Documents:
    """Boundaries of the N documents packed into one buffer of T tokens.

    Tensors are made on first use and kept, so that all layers that are handed the same object share
    them and no layer has to ask the device for a length.
    """

    offsets: tuple[int, ...]  # N + 1 cumulative lengths on the host, from 0 to T, never decreasing
    device: torch.device  # where the per-token tensors live

    def __post_init__(self) -> None:
        offsets = self.offsets
        if len(offsets) < 2:
            raise ValueError(
                f"cu_seqlens={list(offsets)} names no document; it must hold N + 1 offsets that "
                f"start at 0 and end at the number of tokens."
            )
        if offsets[0] != 0:
            raise ValueError(
                f"cu_seqlens starts at {offsets[0]}, not at 0, so the first {offsets[0]} tokens "
                f"belong to no document. Offsets must start at 0."
            )
        for index, (start, end) in enumerate(zip(offsets, offsets[1:], strict=False)):
            if end < start:
                raise ValueError(
                    f"cu_seqlens runs backwards at document {index}: {start} is followed by "
                    f"{end}. Offsets must never decrease."
                )

    @classmethod
    def from_cu_seqlens(
        cls,
        cu_seqlens: Tensor | Sequence[int] | Documents,
        total_tokens: int,
        *,
        device: torch.device | str | None = None,
        cu_seqlens_cpu: Tensor | Sequence[int] | None = None,
    ) -> Documents:
        """Resolve ``cu_seqlens`` (int ``[N + 1]``) against a buffer of ``total_tokens``.

        Reading a ``cu_seqlens`` that lives on a GPU waits for the GPU; pass ``cu_seqlens_cpu``
        (the same offsets on the host) or an already resolved ``Documents`` to avoid that.

        Raises:
            TypeError: something else than a tensor, a sequence of integers or ``Documents``.
            ValueError: another tensor; offsets that do not start at 0, decrease, or end elsewhere.
        """
        if isinstance(cu_seqlens, Documents):
            documents = cu_seqlens
        else:
            source = cu_seqlens if cu_seqlens_cpu is None else cu_seqlens_cpu
            if device is None:
                device = cu_seqlens.device if isinstance(cu_seqlens, Tensor) else "cpu"
            documents = cls(_offsets_of(source), torch.device(device))
        if documents.total_tokens != total_tokens:
            raise ValueError(
                f"cu_seqlens ends at {documents.total_tokens}, which does not match the "
                f"{total_tokens} tokens of the buffer. Offsets must cover all of it: make padding "
                f"at its end a document of its own, or add it to the last one."
            )
        return documents

    @property
    def numbers(self) -> tuple[int, ...]:
        """All that tells these documents from others in as large a buffer."""
        return self.offsets

    @cached_property
    def contents(self) -> tuple[int, int]:
        """Two integers that ranks compare: how many documents, and a hash of :attr:`numbers`."""
        digest = blake2b(array("q", self.numbers).tobytes(), digest_size=7).digest()
        return len(self.lengths), int.from_bytes(digest, "little")

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        offsets = self.offsets
        return tuple(end - start for start, end in zip(offsets, offsets[1:], strict=False))

    @property
    def sequences(self) -> int:
        """How many documents, with empty ones."""
        return len(self.lengths)

    @staticmethod
    def lengths_of(documents: Documents | None, tokens: int) -> tuple[int, ...]:
        """The lengths of packed documents; if None, of one sequence of ``tokens``."""
        return (tokens,) if documents is None else documents.lengths

    @property
    def total_tokens(self) -> int:
        return self.offsets[-1]

    @cached_property
    def stamp(self) -> Tensor:
        """int64 on the host: :attr:`numbers`, which a forward saves for its backward."""
        with torch.inference_mode(False):  # else no autograd function could save it
            return torch.tensor(self.numbers, device="cpu")

    def require_unchanged(self, stamp: Tensor, saved: Tensor) -> None:
        """Called by a backward: refuse boundaries that its forward did not have.

        Args:
            stamp: :attr:`stamp` at the time of its forward.
            saved: the stamp that autograd returns. If the forward was recomputed, it is the stamp
                of the recomputation.

        Raises:
            RuntimeError: the two stamps differ.
        """
        if saved is not stamp and not torch.equal(saved, stamp):
            raise RuntimeError(changed_before_recomputation("those of another micro-batch"))

    @cached_property
    def filled_offsets(self) -> tuple[int, ...]:
        """The offsets without empty documents."""
        pairs = zip(self.offsets, self.offsets[1:], strict=False)
        return (0, *(end for start, end in pairs if end > start))

    @cached_property
    def cu_seqlens_cpu(self) -> Tensor:
        """int32 ``[M + 1]`` on the host: the offsets without empty documents (M of N remain)."""
        return torch.tensor(self.filled_offsets, dtype=torch.int32, device="cpu")

    @cached_property
    def cu_seqlens(self) -> Tensor:
        """:attr:`cu_seqlens_cpu` on the device, for kernels."""
        return to_device(self.cu_seqlens_cpu, self.device)

    @cached_property
    def position_T(self) -> Tensor:
        """int32 ``[T]``: how many tokens of the same document come before each token."""
        length_N = torch.tensor(self.lengths, device="cpu")
        start_T = (length_N.cumsum(0) - length_N).repeat_interleave(length_N)
        position_T = torch.arange(self.total_tokens, device="cpu") - start_T
        return to_device(position_T.to(torch.int32), self.device)

    @property
    def longest_sequence(self) -> int:
        """Tokens of the longest document, with all that it continues."""
        return max(self.lengths)

    @property
    def position_in_sequence_T(self) -> Tensor:
        """int32 ``[T]``: the same, and the tokens of the documents that this one continues."""
        return self.position_T


def changed_before_recomputation(found: str) -> str:
    """The message about a recomputed forward with other boundaries than the first."""
    return (
        f"the boundaries of the documents changed between a forward and its recomputation in the "
        f"backward, which found {found}. Give every micro-batch in flight a PackedSeqParams of its "
        f"own with tensors of its own, and leave them as they are until its backward is over."
    )


def require_one_row(rows: int, given: str) -> None:
    """Refuse packed documents in a batch of several rows, by a message that names ``given``."""
    if rows != 1:
        raise ValueError(
            f"packed documents need a batch of 1, got {given}. Lay the rows end to end and extend "
            f"cu_seqlens."
        )


def _offsets_of(source: Tensor | Sequence[int]) -> tuple[int, ...]:
    """The values of ``cu_seqlens``. Reading a tensor on a GPU waits for the GPU."""
    if isinstance(source, Tensor):
        integers = not (source.is_floating_point() or source.is_complex())
        if source.dim() != 1 or not integers or source.dtype == torch.bool:
            raise ValueError(
                f"cu_seqlens must be a 1-D integer tensor of cumulative lengths, got "
                f"shape {tuple(source.shape)} and dtype {source.dtype}."
            )
        if source.is_meta:
            raise ValueError(
                "cu_seqlens is on the meta device and holds no offsets; give it on the CPU or on "
                "the device where the layer runs."
            )
        return tuple(source.tolist())
    try:
        return tuple(operator.index(offset) for offset in source)
    except TypeError:
        raise TypeError(
            f"cu_seqlens must be a 1-D integer tensor, a sequence of integers or Documents, got "
            f"{type(source).__name__}: {source!r:.80}."
        ) from None
