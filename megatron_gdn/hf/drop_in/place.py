"""Which tokens a context-parallel rank of a transformers model holds, and in which order.

DualChunkSwap (zigzag) and contiguous shares run without moving rows. With any other dense
``seq_index`` ranks exchange hidden rows to get contiguous shares: each rank sends and receives s
rows, and never holds those of the whole sequence.

Legend: S tokens of the whole sequence, s this rank's share, B batch, H hidden size.

Exchange rows that lie in any order over ranks for contiguous shares, and back.

Legend: B batch, s tokens of one rank, H width of a row.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from ...context_parallel import SequenceLayout, local_indices
from ...ops.documents import Documents
from ...ops.host_tables import to_device
from .sources import Sources, text_positions

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh


_NATIVE = (SequenceLayout.ZIGZAG_BUFFER, SequenceLayout.CONTIGUOUS)


@dataclass(frozen=True, eq=False)
class Place:
    """What each rank of a group holds of one sequence.

    Attributes:
        layout: of the rows that the mixer is given.
        positions: int64 ``[cp, s]`` on the host, the sequence positions of every rank's tokens;
            None if the layout cuts every document by itself and documents are unknown.
        exchange: brings rows to ``layout``; None if they have it already.
    """

    group: ProcessGroup
    layout: SequenceLayout
    positions: Tensor | None
    exchange: RowExchange | None = None

    @property
    def size(self) -> int:
        return self.group.size()

    def enter(self, x_BsH: Tensor) -> Tensor:
        return x_BsH if self.exchange is None else self.exchange.there(x_BsH)

    def leave(self, y_BsH: Tensor) -> Tensor:
        return y_BsH if self.exchange is None else self.exchange.back(y_BsH)

    def own_positions(self) -> Tensor:
        """int64 ``[s]`` on the host."""
        assert self.positions is not None
        return self.positions[self.group.rank()]

    def of_documents(self, lengths: tuple[int, ...]) -> Place:
        """This place with its positions, if the layout cuts every document by itself."""
        if self.positions is not None:
            return self
        return replace(self, positions=_positions(lengths, self.size, self.layout))

    def local(self, x_BS: Tensor, cu_seqlens: Tensor | None) -> Tensor:
        """This rank's columns of a table over the sequence."""
        place = self
        if cu_seqlens is not None:
            total = x_BS.shape[1]
            lengths = Documents.from_cu_seqlens(cu_seqlens, total, device="cpu").lengths
            place = self.of_documents(lengths)
        return x_BS[:, place.own_positions()]

    def in_sequence_order(
        self, sources: Sources, rows: int, tokens: int, device: torch.device
    ) -> Sources:
        """All ranks' sources on the host, in sequence order; offsets cover all ranks already."""
        mask, ids, offsets, positions, _ = sources
        if positions is not None and text_positions(positions) is None:
            raise ValueError(
                f"position_ids of shape {tuple(positions.shape)} with context parallelism: a "
                f"vision-language model computes such positions from the tokens that it sees, "
                f"here only a share. Compute them from the whole sequence and give this rank's "
                f"columns as [4, {rows}, {tokens}], text positions first."
            )
        positions = text_positions(positions)
        if offsets is not None:
            positions = None
        if positions is not None and positions.shape[0] == 1:
            positions = positions.expand(rows, -1)
        gathered = []
        for name, x in (("attention_mask", mask), ("_packed_seq_ids", ids), ("", positions)):
            if x is None:
                gathered.append(None)
                continue
            if x.shape != (rows, tokens):
                raise ValueError(
                    f"{name or 'position_ids'} has shape {tuple(x.shape)}; with context "
                    f"parallelism it must be this rank's: [{rows}, {tokens}]."
                )
            if self.positions is None:
                raise ValueError(
                    f"cp_layout={self.layout.value!r} cuts every document by itself, so a rank's "
                    f"{name or 'position_ids'} cannot be put in order without the documents: give "
                    f"cu_seq_lens_q of the whole buffer, or cut the buffer as 'zigzag_buffer' or "
                    f"'contiguous'."
                )
            gathered.append(self._ordered(x, device))
        offsets = None if offsets is None else offsets.detach().cpu()
        found = Sources(gathered[0], gathered[1], offsets, gathered[2])
        if gathered[2] is not None:
            _require_starts(gathered[2], self.layout)
        return found

    def _ordered(self, x_Bs: Tensor, device: torch.device) -> Tensor:
        all_cBs = gather_on_host(x_Bs.long().to(device), self.group)
        rank_order = all_cBs.transpose(0, 1).flatten(1)
        ordered = torch.empty_like(rank_order)
        assert self.positions is not None
        ordered[:, self.positions.flatten()] = rank_order
        return ordered


def place_of(
    group: ProcessGroup,
    layout: SequenceLayout,
    tokens: int,
    device: torch.device,
    seq_index: Tensor | None,
    by_document: bool,
) -> Place:
    """The place of this rank's ``tokens`` tokens in the sequence.

    Args:
        layout: how sequences were cut, if there is no ``seq_index``.
        seq_index: int ``[s]``, or ``[B, s]`` with equal rows: the sequence position of every token
            of this rank. All ranks together must hold every position once.
        by_document: whether offsets give the boundaries of packed documents.

    Raises:
        ValueError: a ``seq_index`` of another shape or with unequal rows, or one that is not dense;
            a number of tokens that the layout cannot cut.
    """
    if seq_index is None:
        if layout is SequenceLayout.ZIGZAG and by_document:
            return Place(group, layout, None)
        native = layout if layout in _NATIVE else SequenceLayout.ZIGZAG_BUFFER
        positions = _positions((tokens * group.size(),), group.size(), native)
        return Place(group, native, positions)
    positions = gather_on_host(_row_of(seq_index, tokens).to(device), group)
    total = positions.numel()
    if not torch.equal(positions.flatten().sort().values, torch.arange(total, device="cpu")):
        missing = sorted(set(range(total)) - set(positions.flatten().tolist()))
        raise ValueError(
            f"seq_index must name every position 0 .. {total - 1} of the sequence on exactly one "
            f"of the {group.size()} context-parallel ranks (dense global token positions); "
            f"{len(missing)} are missing, the first {missing[:4]}."
        )
    for native in _NATIVE:
        cuts = 2 * group.size() if native is SequenceLayout.ZIGZAG_BUFFER else group.size()
        if total % cuts:
            continue
        if torch.equal(positions, _positions((total,), group.size(), native)):
            return Place(group, native, positions)
    exchange = RowExchange.of(positions, group, device)
    return Place(group, SequenceLayout.CONTIGUOUS, positions, exchange)


def require_agreement(
    sources: Sources, shape: torch.Size, seq_index: Tensor | None, group: ProcessGroup, device
) -> None:
    """Refuse on every rank if ``shape``, kinds of sources or offsets differ between ranks.

    They differ if a data loader gives every process its own batches: ranks that should share one
    sequence then hold tokens of different ones. One collective of five numbers.

    Raises:
        ValueError: on every rank, if anything differs.
    """
    kinds = [0 if x is None else x.dim() for x in (*sources, seq_index)]
    kinds[2] = int(sources.cu_seqlens is not None)  # a wrong shape has its own error
    offsets = b"" if sources.cu_seqlens is None else sources.cu_seqlens.numpy().tobytes()
    kind = sum(min(count, 7) << (3 * number) for number, count in enumerate(kinds))
    told = [shape[0], shape[1], kind, len(offsets), zlib.crc32(offsets)]
    own = torch.tensor(told, device="cpu")
    all_c5 = gather_on_host(own.to(device), group)
    if bool((all_c5 == all_c5[0]).all()):
        return
    sizes = ", ".join(f"{rows} rows of {tokens}" for rows, tokens in all_c5[:, :2].tolist())
    if bool((all_c5[:, :2] != all_c5[0, :2]).any()):
        what = f"have {sizes} tokens"
    elif bool((all_c5[:, 2] != all_c5[0, 2]).any()):
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
    """The process group of a one-dimensional device mesh; None for none or for one rank.

    Raises:
        ValueError: a mesh of several dimensions.
    """
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


def _positions(lengths: tuple[int, ...], size: int, layout: SequenceLayout) -> Tensor:
    return torch.stack([local_indices(lengths, size, rank, layout) for rank in range(size)])


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


@dataclass(frozen=True, eq=False)
class RowExchange:
    """Sends every row to the rank ``position // s``, which puts it at ``position % s``.

    Attributes:
        sent: int64 ``[s]``, the local rows in the order in which they are sent.
        placed: int64 ``[s]``, for each row of the contiguous share its index among those received.
        sends, receives: rows for and from each rank.
    """

    group: ProcessGroup
    sent: Tensor
    placed: Tensor
    sends: tuple[int, ...]
    receives: tuple[int, ...]

    @classmethod
    def of(cls, positions: Tensor, group: ProcessGroup, device: torch.device) -> RowExchange:
        """From int64 ``[cp, s]`` on the host: the positions that every rank holds."""
        (size, tokens), rank = positions.shape, group.rank()
        sent = positions[rank].argsort()
        owner = positions // tokens
        sends = owner[rank].bincount(minlength=size).tolist()
        receives = (owner == rank).sum(-1).tolist()
        # Every rank sends its rows in the order of their positions, so they arrive sorted by rank.
        arriving = torch.cat([mine[mine // tokens == rank].sort().values for mine in positions])
        placed = arriving.argsort()
        return cls(
            group, to_device(sent, device), to_device(placed, device), tuple(sends), tuple(receives)
        )

    def there(self, x_BsH: Tensor) -> Tensor:
        """To contiguous shares; the gradient takes the way back."""
        return _Exchange.apply(x_BsH, self, True)

    def back(self, y_BsH: Tensor) -> Tensor:
        """From contiguous shares."""
        return _Exchange.apply(y_BsH, self, False)

    def _move(self, x_BsH: Tensor, there: bool) -> Tensor:
        rows = x_BsH.transpose(0, 1)
        if there:
            out = self._send(rows.index_select(0, self.sent), self.sends, self.receives)
            out = out.index_select(0, self.placed)
        else:
            arrived = torch.empty_like(rows, memory_format=torch.contiguous_format)
            arrived[self.placed] = rows
            returned = self._send(arrived, self.receives, self.sends)
            out = torch.empty_like(returned)
            out[self.sent] = returned
        return out.transpose(0, 1).contiguous()

    def _send(self, rows: Tensor, sends: tuple[int, ...], receives: tuple[int, ...]) -> Tensor:
        out = rows.new_empty(rows.shape)
        dist.all_to_all_single(
            out, rows.contiguous(), list(receives), list(sends), group=self.group
        )
        return out


class _Exchange(torch.autograd.Function):
    """A permutation of rows over ranks: its adjoint is its inverse."""

    @staticmethod
    def forward(ctx, x: Tensor, exchange: RowExchange, there: bool) -> Tensor:
        ctx.exchange, ctx.there = exchange, there
        return exchange._move(x, there)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:
        return _Exchange.apply(grad, ctx.exchange, not ctx.there), None, None
