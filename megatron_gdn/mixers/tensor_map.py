"""How one Megatron tensor is made of Hugging Face tensors, and how tensor-parallel
ranks share it."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from ..ops.layout import Layout


@dataclass(frozen=True, slots=True)
class HFRef:
    """A Hugging Face tensor, or the slice ``tensor[expert]`` of a tensor with all
    experts."""

    key: str
    shape: tuple[int, ...]  # shape of the tensor in the file, with all experts
    expert: int | None = None

    @property
    def slice_shape(self) -> tuple[int, ...]:
        """The shape of the tensor, or of the expert's slice."""
        if self.expert is None:
            return self.shape
        return self.shape[1:]


def rows_by_group(widths: Sequence[int], groups: int) -> Tensor:
    """Indices ``[sum(widths)]`` that reorder rows from section by section to group by
    group.

    Section i has ``widths[i]`` rows. Each section is cut into as many equal parts as
    there are ``groups``, and group j has the j-th part of each section.
    """
    sections = torch.arange(sum(widths), device="cpu").split(list(widths))
    return torch.cat([rows.view(groups, -1) for rows in sections], 1).flatten()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TensorMap:
    """How one Megatron tensor is made of Hugging Face tensors, and how ranks share it.

    megatron = cat(sources)[rows] + shift
    """

    # the tensor's key in a model with Transformer Engine's modules; also its key with
    # Megatron's local modules, if this key differs
    names: tuple[str, ...]
    sources: tuple[HFRef, ...]
    # Megatron's row i is row rows[i] of cat(sources), which are several; None: row i
    rows: Tensor | None = None
    # the dimension that is split over ranks; None: every rank has the whole tensor
    shard_dim: int | None = None
    # the sizes of the sections along shard_dim, each of which is split by itself; ():
    # one section
    sections: tuple[int, ...] = ()
    # of a norm's gain: +1 if only the file stores gain - 1, -1 if only Megatron does
    shift: float = 0.0
    fp32: bool = False  # whether Megatron's tensor is fp32, even if the file's is not
    # whether the expert-tensor-parallel group splits the tensor
    is_expert: bool = False
    pad_rows: bool = False  # whether zero rows may be added at the end (vocabulary)

    @property
    def name(self) -> str:
        return self.names[0]

    def check_dtype(
        self, dtype: torch.dtype, where: str, may_round: bool = False
    ) -> None:
        """Raise a ValueError unless the tensor may have ``dtype``.

        Legal are bf16, fp16 and fp32. fp64 is legal too if ``may_round`` is True or
        :attr:`fp32` is False. The error names ``where``.
        """
        legal = (torch.bfloat16, torch.float16, torch.float32)
        legal += (torch.float64,) if may_round or not self.fp32 else ()
        if dtype not in legal:
            names = ", ".join(str(one).removeprefix("torch.") for one in legal)
            raise ValueError(
                f"{where} has dtype {str(dtype).removeprefix('torch.')}; legal for "
                f"{self.name}: {names}. Convert the tensor to one of these first."
            )

    def to_megatron(self, hf_tensors: Sequence[Tensor]) -> Tensor:
        """The full Megatron tensor from ``hf_tensors``, one for each of the sources.

        It is in fp32 if ``shift`` or ``fp32`` is set, else in the dtype of
        ``hf_tensors``.
        """
        # a dtype that holds every bit of all tensors
        dtype = reduce(torch.promote_types, [x.dtype for x in hf_tensors])
        full = torch.cat([x.to(dtype) for x in hf_tensors])
        if self.rows is not None:
            full = full[self.rows.to(full.device)]
        if self.fp32:
            full = full.flatten()  # Kimi Linear's files have A_log as [1, 1, H, 1]
        # In bf16, w - 1 loses the low bits of every w below one half.
        if self.fp32 or self.shift:
            full = full.float()
        if self.shift:
            return full + self.shift
        return full

    def to_hf(
        self,
        full: Tensor,
        dtypes: Sequence[torch.dtype],
        original: Sequence[Tensor] | None = None,
    ) -> list[Tensor]:
        """The Hugging Face tensors of the Megatron tensor ``full``, tensor i in
        ``dtypes[i]``.

        ``original`` are the sources that were imported. An element of ``full`` that
        training did not change gets its original bits, which a shift in bf16 may have
        lost.
        """
        if self.shift:
            unshifted = full.float() - self.shift
        else:
            unshifted = full
        hf_tensors = [
            x.to(dtype) for x, dtype in zip(self._split(unshifted), dtypes, strict=True)
        ]
        if original is None or [x.dtype for x in original] != list(dtypes):
            return hf_tensors
        original = [x.to(full.device) for x in original]
        imported = self.to_megatron(original).to(full.dtype)
        is_changed = self._split(bits_of(imported) != bits_of(full))
        return [
            torch.where(changed, new, old)
            for changed, new, old in zip(is_changed, hf_tensors, original, strict=True)
        ]

    def to_hf_by_source(
        self,
        full: Tensor,
        dtypes: Mapping[str, torch.dtype],
        originals: Mapping[str, Tensor],
    ) -> dict[HFRef, Tensor]:
        """The tensors of :meth:`to_hf`, in a dictionary from source to tensor.

        ``originals`` are tensors that were imported, by key. A tensor has the dtype
        that ``dtypes`` gives for its key, else that of its original, else that of
        ``full``.
        """
        keys = [source.key for source in self.sources]
        imported = None
        if originals.keys() >= set(keys):
            imported = [originals[key] for key in keys]
        wanted = []
        for index, key in enumerate(keys):
            if imported is None:
                default = full.dtype
            else:
                default = imported[index].dtype
            wanted.append(dtypes.get(key, default))
        tensors = self.to_hf(full, wanted, imported)
        return dict(zip(self.sources, tensors, strict=True))

    def _split(self, full: Tensor) -> Sequence[Tensor]:
        """Cut the rows of ``full``, Megatron's tensor, into one tensor for each source.

        ``self.rows`` are the indices by which :meth:`to_megatron` reorders the joined
        rows of the sources; ``argsort`` gives the reverse order. A lone source is never
        reordered, but may have another shape, so it is reshaped.
        """
        if len(self.sources) == 1:
            return (full.reshape(self.sources[0].slice_shape),)
        if self.rows is not None:
            full = full[self.rows.argsort().to(full.device)]
        return full.split([source.slice_shape[0] for source in self.sources])

    def shards(self, full: Tensor, ranks: int) -> list[Tensor]:
        """Cut ``full`` into one share for each rank, ``ranks`` shares; a ValueError if a
        section cannot be cut into equal parts."""
        dim = self.shard_dim
        if dim is None:
            return [full] * ranks
        sections = self.sections or (full.shape[dim],)
        assert sum(sections) == full.shape[dim], (
            f"{self.name}: {sections} against {full.shape}"
        )
        for size in sections:
            if size % ranks:
                raise ValueError(
                    f"{self.name}: {size} rows along dimension {dim} do not split over "
                    f"{ranks} ranks; use a tensor-parallel size that divides "
                    f"{', '.join(map(str, sections))}."
                )
        return [take_share(full, dim, sections, rank, ranks) for rank in range(ranks)]

    def unshard(self, shards: Sequence[Tensor]) -> Tensor:
        """The full tensor from the ranks' shards, dequantised and without padding rows.

        A ValueError if every rank has the whole tensor, and their bits differ.
        """
        shards = [dequantised(shard) for shard in shards]
        dim = self.shard_dim
        if dim is None:
            for rank, other in enumerate(shards[1:], start=1):
                if not torch.equal(bits_of(other), bits_of(shards[0])):
                    raise ValueError(
                        f"{self.name} is replicated over tensor-parallel ranks, but "
                        f"rank {rank} differs from rank 0. Average it, or export the "
                        "ranks' common checkpoint."
                    )
            return shards[0]
        if self.sections:
            local_sizes = [size // len(shards) for size in self.sections]
        else:
            local_sizes = shards[0].shape[dim]
        by_rank = [shard.split(local_sizes, dim) for shard in shards]
        shares = []
        for shares_of_section in zip(*by_rank, strict=True):
            shares.extend(shares_of_section)
        full = torch.cat(shares, dim)
        if self.pad_rows:
            return full[: self.sources[0].shape[0]]
        return full


def tensor_map(
    names: str | tuple[str, ...],
    sources: Mapping[str, tuple[int, ...]],
    shard_dim: int | None = None,
    **how: Any,
) -> TensorMap:
    """A `TensorMap` whose sources are no slices of experts. ``sources`` gives the shape
    of each tensor by its key; ``how`` has further fields of the `TensorMap`."""
    if isinstance(names, str):
        names = (names,)
    refs = tuple(HFRef(key, shape) for key, shape in sources.items())
    return TensorMap(names=names, sources=refs, shard_dim=shard_dim, **how)


def take_share(
    full: Tensor, dim: int, sections: Sequence[int], rank: int, size: int
) -> Tensor:
    """The share of the tensor ``full`` that one of ``size`` ranks has.

    Dimension ``dim`` consists of sections of these sizes; the share joins the rank's
    equal part of each section.
    """
    parts = [
        section.chunk(size, dim)[rank] for section in full.split(list(sections), dim)
    ]
    return torch.cat(parts, dim)


def stored_quantised(tensor: Tensor | None) -> bool:
    """Whether Transformer Engine (2.0 and newer) stores this weight quantised; False
    for None."""
    # If Transformer Engine is not imported, no tensor can be a QuantizedTensor.
    engine: Any = sys.modules.get("transformer_engine.pytorch.tensor")
    return isinstance(tensor, getattr(engine, "QuantizedTensor", ()))


def dequantised(tensor: Tensor) -> Tensor:
    """The values of a quantised weight; any other tensor as it is."""
    if stored_quantised(tensor):
        return tensor.dequantize()
    return tensor


def bits_of(tensor: Tensor) -> Tensor:
    """The bits of floats as integers, so that NaN and -0 can be compared."""
    sizes = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.view(sizes[tensor.element_size()])


def conv_map(
    name: str, hf_prefix: str, layout: Layout, taps: int, in_three: bool
) -> TensorMap:
    """The map of the convolution's weight ``[C, 1, W]``, which Megatron calls ``name``.

    ``hf_prefix`` starts Hugging Face's keys; ``layout`` has the convolved sections;
    ``taps`` is W. ``in_three``: files have one tensor each for q, k and v, not one for
    all.
    """
    # the number of channels of each tensor, by the beginning of the tensor's name
    channels = {"": layout.conv_width}
    if in_three:
        channels = dict(zip(("q_", "k_", "v_"), layout.conv_widths, strict=True))
    sources = {
        f"{hf_prefix}{start}conv1d.weight": (count, 1, taps)
        for start, count in channels.items()
    }
    return tensor_map(name, sources, shard_dim=0, sections=layout.conv_widths)
