"""Which tokens a context-parallel rank of a transformers model holds, and in which order.

DualChunkSwap (zigzag) and contiguous shares run without moving rows. With any other dense
``seq_index`` ranks exchange hidden rows, s each, to get contiguous shares.

Legend: S tokens of the whole sequence, s this rank's share, B batch, H hidden size.
"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ...context_parallel import SequenceLayout, inverse, local_indices
from ...ops.host_tables import to_device
from .sources import Sources, text_positions

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

_NATIVE = (SequenceLayout.ZIGZAG_BUFFER, SequenceLayout.CONTIGUOUS)


def place_of(
    group: ProcessGroup,
    layout: SequenceLayout,
    tokens: int,
    device: torch.device,
    seq_index: Tensor | None,
    by_document: bool,
) -> tuple[SequenceLayout, Tensor | None, tuple[RowExchange, RowExchange] | None]:
    """Where the ranks' tokens lie in the sequence, by ``seq_index`` or else by ``layout``.

    Returns:
        The layout of the rows that the mixer is given; int64 ``[cp, s]`` on the host, the positions
        of all ranks' tokens (None if every document is cut by itself); and what brings rows to that
        layout and back (None if they have it).
    """
    size = group.size()
    total = tokens * size
    if seq_index is None:
        if layout is SequenceLayout.ZIGZAG and by_document:
            return layout, None, None
        native = layout if layout in _NATIVE else SequenceLayout.ZIGZAG_BUFFER
        return native, positions_of((total,), size, native), None
    positions = gather_on_host(_row_of(seq_index, tokens).to(device), group)
    if not torch.equal(positions.flatten().sort().values, torch.arange(total, device="cpu")):
        missing = sorted(set(range(total)) - set(positions.flatten().tolist()))
        raise ValueError(
            f"seq_index must name every position 0 .. {total - 1} of the sequence on exactly one "
            f"of the {size} context-parallel ranks (dense global token positions); "
            f"{len(missing)} are missing, the first {missing[:4]}."
        )
    for native, cuts in zip(_NATIVE, (2 * size, size), strict=True):
        if total % cuts == 0 and torch.equal(positions, positions_of((total,), size, native)):
            return native, positions, None
    return SequenceLayout.CONTIGUOUS, positions, row_exchange(positions, group, device)


def positions_of(lengths: tuple[int, ...], size: int, layout: SequenceLayout) -> Tensor:
    """int64 ``[cp, s]`` on the host: the sequence positions of every rank's tokens."""
    return torch.stack([local_indices(lengths, size, rank, layout) for rank in range(size)])


def in_order(
    sources: Sources,
    shape: torch.Size,
    device: torch.device,
    group: ProcessGroup,
    layout: SequenceLayout,
    positions: Tensor | None,
) -> Sources:
    """All ranks' sources on the host, in sequence order; offsets cover all ranks already."""
    mask, ids, offsets, given, _ = sources
    rows, tokens = shape
    of_text = text_positions(given)
    if given is not None and of_text is None:
        raise ValueError(
            f"position_ids of shape {tuple(given.shape)} with context parallelism: a "
            f"vision-language model computes such positions from the tokens that it sees, here "
            f"only a share. Compute them from the whole sequence and give this rank's columns as "
            f"[4, {rows}, {tokens}], text positions first."
        )
    if offsets is not None:
        of_text = None
    elif of_text is not None and of_text.shape[0] == 1:
        of_text = of_text.expand(rows, -1)
    tables = {"attention_mask": mask, "_packed_seq_ids": ids, "position_ids": of_text}
    for name, x_Bs in tables.items():
        if x_Bs is None:
            continue
        if x_Bs.shape != shape:
            raise ValueError(
                f"{name} has shape {tuple(x_Bs.shape)}; with context parallelism it must be this "
                f"rank's: [{rows}, {tokens}]."
            )
        if positions is None:
            raise ValueError(
                f"cp_layout={layout.value!r} cuts every document by itself, so a rank's {name} "
                f"cannot be put in order without the documents: give cu_seq_lens_q of the whole "
                f"buffer, or cut the buffer as 'zigzag_buffer' or 'contiguous'."
            )
        all_cBs = gather_on_host(x_Bs.long().to(device), group)
        tables[name] = all_cBs.transpose(0, 1).flatten(1)[:, inverse(positions.flatten())]
    mask, ids, of_text = tables.values()
    if of_text is not None:
        _require_starts(of_text, layout)
    return Sources(mask, ids, offsets, of_text)


def require_agreement(
    sources: Sources, shape: torch.Size, seq_index: Tensor | None, group: ProcessGroup, device
) -> None:
    """Refuse on every rank if ``shape``, kinds of sources or offsets differ between ranks.

    They differ if a data loader gives every process its own batches: ranks that should share one
    sequence then hold tokens of different ones. One collective of ten numbers.
    """
    kinds = [0 if x is None else x.dim() for x in (*sources, seq_index)]
    kinds[2] = int(sources.cu_seqlens is not None)  # a wrong shape has its own error
    offsets = b"" if sources.cu_seqlens is None else sources.cu_seqlens.numpy().tobytes()
    told = [shape[0], shape[1], *kinds, len(offsets), zlib.crc32(offsets)]
    all_cT = gather_on_host(torch.tensor(told, device="cpu").to(device), group)
    differs = (all_cT != all_cT[0]).any(0)
    if not differs.any():
        return
    if differs[:2].any():
        sizes = ", ".join(f"{rows} rows of {tokens}" for rows, tokens in all_cT[:, :2].tolist())
        what = f"have {sizes} tokens"
    elif differs[2:8].any():
        what = (
            "were given different kinds of sources (masks, ids, offsets, positions, indices, "
            "seq_index)"
        )
    else:
        what = "were given cu_seq_lens_q that differ"
    raise ValueError(
        f"the {group.size()} context-parallel ranks {what}: they must have shares of one batch. "
        f"Give all of them the same batches (megatron_gdn.hf.ContextParallelTrainerMixin does in "
        f"transformers' Trainer) and cut each by context_parallel_share."
    )


def group_of(mesh: DeviceMesh | None) -> ProcessGroup | None:
    """The process group of a one-dimensional device mesh; None for none or for one rank."""
    if mesh is None or mesh.size() == 1:
        return None
    if mesh.ndim != 1:
        raise ValueError(
            f"cp_mesh has the dimensions {mesh.mesh_dim_names or mesh.ndim}; context parallelism "
            f"runs over one. Pass that one: mesh['cp']."
        )
    return mesh.get_group()


def gather_on_host(own: Tensor, group: ProcessGroup) -> Tensor:
    """``[cp, ...]`` on the CPU: every rank's tensor, of one shape and dtype."""
    own = own.contiguous()
    given = [torch.empty_like(own) for _ in range(group.size())]
    dist.all_gather(given, own, group=group)
    return torch.stack(given).cpu()


def _row_of(seq_index: Tensor, tokens: int) -> Tensor:
    if seq_index.dim() not in (1, 2) or seq_index.shape[-1] != tokens:
        raise ValueError(
            f"seq_index has shape {tuple(seq_index.shape)}; it must be [{tokens}] or "
            f"[rows, {tokens}], the sequence positions of this rank's {tokens} tokens."
        )
    if seq_index.dim() == 2:
        if bool((seq_index != seq_index[:1]).any()):
            raise ValueError(
                "the rows of seq_index differ; all rows of a batch must be cut alike for context "
                "parallelism. Pass one row."
            )
        seq_index = seq_index[0]
    return seq_index.detach().long()


def _require_starts(position_BS: Tensor, layout: SequenceLayout) -> None:
    starts = position_BS[:, 1:] != position_BS[:, :-1] + 1
    wrong = (starts & (position_BS[:, 1:] != 0)).nonzero()
    if len(wrong):
        row, before = wrong[0].tolist()
        last, this = position_BS[row, before : before + 2].tolist()
        raise ValueError(
            f"in sequence order position_ids go from {last} to {this} at token {before + 1} of row "
            f"{row}: they neither go on nor start again at 0. Either they are not this rank's "
            f"share of the sequence's positions, or the tokens were not cut as "
            f"{layout.value!r}; give seq_index, or the cp_layout they were cut by."
        )


class RowExchange(NamedTuple):
    """One way of a permutation of rows over ranks, as :class:`TakeRows` takes it."""

    group: ProcessGroup
    sent: Tensor  # int64 [s]: the local rows in the order in which they are sent
    placed: Tensor  # int64 [s]: for each row of the result its index among those received
    sends: list[int]  # rows for each rank
    receives: list[int]

    def of(self, x_BsH: Tensor) -> Tensor:
        rows = x_BsH.transpose(0, 1).index_select(0, self.sent)
        out = torch.empty_like(rows)
        dist.all_to_all_single(out, rows, self.receives, self.sends, group=self.group)
        return out.index_select(0, self.placed).transpose(0, 1).contiguous()


def row_exchange(
    positions: Tensor, group: ProcessGroup, device: torch.device
) -> tuple[RowExchange, RowExchange]:
    """To contiguous shares and back, for positions int64 ``[cp, s]`` on the host.

    A row goes to the rank ``position // s``, which puts it at ``position % s``.
    """
    (size, tokens), rank = positions.shape, group.rank()
    sent, owner = positions[rank].argsort(), positions // tokens
    sends = owner[rank].bincount(minlength=size).tolist()
    receives = (owner == rank).sum(-1).tolist()
    # Every rank sends its rows in the order of their positions, so they arrive sorted by rank.
    arriving = torch.cat([mine[mine // tokens == rank].sort().values for mine in positions])
    placed = arriving.argsort()
    tables = (to_device(x, device) for x in (sent, placed, inverse(placed), inverse(sent)))
    sent, placed, back_sent, back_placed = tables
    there = RowExchange(group, sent, placed, sends, receives)
    return there, RowExchange(group, back_sent, back_placed, receives, sends)
