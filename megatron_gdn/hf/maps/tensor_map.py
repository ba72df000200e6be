"""How one Megatron tensor relates to its Hugging Face tensors, and how ranks share it.

Everything here is a pure function of tensors: no files, no process groups, no configuration.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...compat.fp8_weights import dequantised
from ...mixers.init import take_share
from ...ops.layout import Layout


@dataclass(frozen=True, slots=True)
class HFRef:
    """A Hugging Face tensor, or one expert's slice ``tensor[expert]`` of a packed one.

    ``shape`` is that of the whole tensor in the file.
    """

    key: str
    shape: tuple[int, ...]
    expert: int | None = None

    @property
    def piece_shape(self) -> tuple[int, ...]:
        return self.shape if self.expert is None else self.shape[1:]


def concatenated(pieces: Sequence[Tensor]) -> Tensor:
    """Join along rows, in the dtype that holds every piece exactly."""
    dtype = pieces[0].dtype
    for piece in pieces[1:]:
        dtype = torch.promote_types(dtype, piece.dtype)
    return torch.cat([piece.to(dtype) for piece in pieces])


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorMap:
    """One Megatron tensor, the Hugging Face tensors it is made of, and its split over ranks.

        megatron = join(pieces) + shift        pieces = split(megatron - shift)

    Attributes:
        names: parameter names in a Megatron model; the first is canonical (Transformer Engine,
            norms fused into the next projection), the others are the names in local modules.
        sources: the Hugging Face tensors, in the order `join` takes them.
        join: Hugging Face tensors to the full Megatron tensor; None concatenates rows.
        split: the inverse of `join`; None splits rows by the sources' shapes.
        shard_dim: the dimension that tensor-parallel ranks share; None means every rank has all.
        sections: sizes along ``shard_dim`` that are shared out separately, so that a rank's rows
            are ``[section 0 of rank | section 1 of rank | ...]``; empty means one section.
        section_names: suffixes of the keys of a distributed checkpoint that stores each section
            as its own tensor; empty if it stores one tensor.
        shift: +1 or -1 where the two sides store a norm gain around different centres.
        fp32: the Megatron tensor is fp32 even if the file has another dtype.
        expert, num_experts: the tensor's expert, and how many there are; such a tensor is cut
            over the expert-tensor-parallel group.
        pad_rows: the full tensor may be padded with zero rows at its end (vocabulary).
    """

    names: tuple[str, ...]
    sources: tuple[HFRef, ...]
    join: Callable[[Sequence[Tensor]], Tensor] | None = None
    split: Callable[[Tensor], Sequence[Tensor]] | None = None
    shard_dim: int | None = None
    sections: tuple[int, ...] = ()
    section_names: tuple[str, ...] = ()
    shift: float = 0.0
    fp32: bool = False
    expert: int | None = None
    num_experts: int = 0
    pad_rows: bool = False

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def is_expert(self) -> bool:
        return self.expert is not None

    def check_dtype(self, dtype: torch.dtype, where: str, may_round: bool = False) -> None:
        """Refuse a source tensor of ``dtype``; ``where`` names it and its file.

        Raises:
            ValueError: not a floating-point dtype of at least 16 bits, or one that `fp32` rounds
                (unless ``may_round``).
        """
        legal = (torch.bfloat16, torch.float16, torch.float32)
        legal += (torch.float64,) if may_round or not self.fp32 else ()
        if dtype not in legal:
            names = ", ".join(str(one).removeprefix("torch.") for one in legal)
            raise ValueError(
                f"{where} has dtype {str(dtype).removeprefix('torch.')}; legal for {self.name}: "
                f"{names}. Convert the tensor to one of these first."
            )

    def to_megatron(self, pieces: Sequence[Tensor]) -> Tensor:
        """The full Megatron tensor. Shifted and fp32 tensors come out as fp32."""
        full = self.join(pieces) if self.join else concatenated(pieces)
        if self.fp32 or self.shift:
            # In bf16, w - 1 forgets the low bits of every w below one half.
            full = full.float()
        return full + self.shift if self.shift else full

    def to_hf(
        self,
        full: Tensor,
        dtypes: Sequence[torch.dtype],
        original: Sequence[Tensor] | None = None,
    ) -> list[Tensor]:
        """The Hugging Face tensors, each in its file's dtype.

        Args:
            full: the whole Megatron tensor, in any dtype.
            dtypes: one dtype per source.
            original: the source tensors as imported, on any device. An element of ``full`` that is
                unchanged since the import is exported as its original, bit for bit. Without
                originals a shifted gain cannot come back exactly from bf16.
        """
        unshifted = full.float() - self.shift if self.shift else full
        pieces = self.split(unshifted) if self.split else self._split_rows(unshifted)
        pieces = [piece.to(dtype) for piece, dtype in zip(pieces, dtypes, strict=True)]
        if original is None or [piece.dtype for piece in original] != list(dtypes):
            return pieces
        original = [piece.to(full.device) for piece in original]
        imported = self.to_megatron(original).to(full.dtype)
        changed = bits_of(imported) != bits_of(full)
        changed = self.split(changed) if self.split else self._split_rows(changed)
        return [
            torch.where(new, piece, old)
            for new, piece, old in zip(changed, pieces, original, strict=True)
        ]

    def _split_rows(self, full: Tensor) -> tuple[Tensor, ...]:
        if len(self.sources) == 1:
            return (full.reshape(self.sources[0].piece_shape),)
        return full.split([source.piece_shape[0] for source in self.sources])

    def shards(self, full: Tensor, ranks: int) -> list[Tensor]:
        """What each of ``ranks`` ranks holds of ``full``."""
        if self.shard_dim is None:
            return [full] * ranks
        return shard(full, ranks, self.shard_dim, self.sections, self.name)

    def unshard(self, shards: Sequence[Tensor]) -> Tensor:
        """The full tensor from the ranks' shards, dequantised if they are stored in FP8.

        Raises:
            ValueError: a tensor that every rank holds whole differs between ranks.
        """
        shards = [dequantised(shard) for shard in shards]
        if self.shard_dim is not None:
            return unshard(shards, self.shard_dim, self.sections)
        for rank, other in enumerate(shards[1:], start=1):
            if not torch.equal(bits_of(other), bits_of(shards[0])):
                raise ValueError(
                    f"{self.name} is replicated over tensor-parallel ranks, but rank {rank} "
                    f"differs from rank 0. Average it, or export the ranks' common checkpoint."
                )
        return shards[0]


def shard(
    full: Tensor, ranks: int, dim: int, sections: Sequence[int] = (), name: str = "tensor"
) -> list[Tensor]:
    """Cut each section of ``full`` along ``dim`` over ``ranks`` ranks.

    Rank ``t`` holds ``[section_0[t] | section_1[t] | ...]``, where ``section[t]`` is the t-th of
    ``ranks`` equal, contiguous pieces.

    Raises:
        ValueError: a section does not divide.
    """
    sections = list(sections) or [full.shape[dim]]
    assert sum(sections) == full.shape[dim], f"{name}: {sections} do not fill {full.shape}"
    for size in sections:
        if size % ranks:
            raise ValueError(
                f"{name}: {size} rows along dimension {dim} do not split over {ranks} ranks; "
                f"use a tensor-parallel size that divides {', '.join(map(str, sections))}."
            )
    return [take_share(full, dim, sections, rank, ranks) for rank in range(ranks)]


def unshard(shards: Sequence[Tensor], dim: int, sections: Sequence[int] = ()) -> Tensor:
    """The inverse of `shard`: ``sections`` are those of the full tensor."""
    ranks = len(shards)
    if not sections:
        return torch.cat(list(shards), dim)
    local = [size // ranks for size in sections]
    by_rank = [piece.split(local, dim) for piece in shards]
    return torch.cat([torch.cat(section, dim) for section in zip(*by_rank, strict=True)], dim)


def bits_of(tensor: Tensor) -> Tensor:
    """The floats' bits as integers, so that NaN and -0 compare by their bits too."""
    sizes = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.contiguous().view(sizes[tensor.element_size()])


def conv_map(
    prefix: str,
    hf_prefix: str,
    layout: Layout,
    taps: int,
    in_three: bool,
    name: str = "conv1d.weight",
) -> TensorMap:
    """The map of the convolution's weight, stored whole or by its sections q, k and v.

    Args:
        name: Megatron's, after ``prefix``.
    """
    if in_three:
        rows = dict(zip("qkv", layout.conv_widths, strict=True))
        sources = tuple(
            HFRef(f"{hf_prefix}{n}_conv1d.weight", (r, 1, taps)) for n, r in rows.items()
        )
    else:
        sources = (HFRef(f"{hf_prefix}conv1d.weight", (layout.conv_width, 1, taps)),)
    return TensorMap(
        names=(prefix + name,),
        sources=sources,
        shard_dim=0,
        sections=layout.conv_widths,
        section_names=layout.conv_names,
    )
