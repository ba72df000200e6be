"""The head exchange alone, open + close, beside the bare collective that moves the same
bytes.

    torchrun --nproc-per-node 4 benchmarks/run.py exchange --out results.jsonl

raw    all_to_all_single of packed buffers: two exchanges forward, two backward, nothing
       else
plain  split + cat, all_to_all_single, index_select in plain torch
ours   the two passages of ``Headwise``; they equal plain bit for bit

Medians over the repeats, then the slowest rank. Without a GPU bits are compared alone.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from lib.cases import Case
from lib.layers import DEVICE, Layer, config_of
from lib.measure import slowest, time_ms
from lib.session import Session
from parallel import start_ranks
from torch import Tensor

from megatron_gdn import Documents, GDNDims, SequenceLayout
from megatron_gdn.context_parallel import Headwise, inverse, rank_order_of_sequence


class Exchange:
    """One case's tensors: what in_proj and the mixer would hand over, and gradients for
    both."""

    def __init__(self, case: Case, dims: GDNDims) -> None:
        self.size = dist.get_world_size()
        self.dims = dims
        self.scheme = Headwise(dims.layout, dist.group.WORLD, SequenceLayout.ZIGZAG)
        self.lengths = case.lengths or (case.tokens,)
        self.documents = None
        if case.offsets is not None:
            self.documents = Documents.from_cu_seqlens(
                case.offsets, case.tokens, device=DEVICE
            )
        share = case.tokens // self.size
        p = self.scheme.layout.width
        v = dims.v_dim // self.size
        self.proj = rows(share, 1, dims.layout.width).requires_grad_()
        self.mixed = rows(case.tokens, 1, v).requires_grad_()
        self.grads = rows(case.tokens, 1, p), rows(share, 1, dims.v_dim)
        self.messages = [rows(self.size, share, 1, width) for width in (p, v)]
        undo = rank_order_of_sequence(self.lengths, self.size)
        self.undo = undo.to(DEVICE)
        self.redo = inverse(undo).to(DEVICE)

    def raw(self, backward: bool) -> None:
        for _ in range(2 if backward else 1):
            for message in self.messages:
                dist.all_to_all_single(torch.empty_like(message), message)

    def ours(self, backward: bool) -> tuple[Tensor, ...]:
        tokens = sum(self.lengths)
        passage = self.scheme.passage(self.documents, tokens, 1, self.proj)
        opened = passage.to_stages(self.proj)
        closed = passage.from_stages(self.mixed)
        return self._grads(opened, closed) if backward else (opened, closed)

    def plain(self, backward: bool) -> tuple[Tensor, ...]:
        opened = _PlainOpen.apply(self.proj, self)
        closed = _PlainClose.apply(self.mixed, self)
        return self._grads(opened, closed) if backward else (opened, closed)

    def _grads(self, opened: Tensor, closed: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(
            (opened, closed), (self.proj, self.mixed), self.grads
        )

    # Plain torch, for key heads that divide; sections: widths of the whole row.

    def plain_open(self, given: Tensor, sections: tuple[int, ...]) -> Tensor:
        parts = [
            x.unflatten(-1, (self.size, -1)) for x in given.split(sections, dim=-1)
        ]
        blocks = torch.cat(parts, dim=-1).movedim(2, 0).contiguous()
        received = torch.empty_like(blocks)
        dist.all_to_all_single(received, blocks)
        return received.flatten(0, 1).index_select(0, self.undo)

    def plain_close(self, given: Tensor, sections: tuple[int, ...]) -> Tensor:
        blocks = given.index_select(0, self.redo).unflatten(0, (self.size, -1))
        received = torch.empty_like(blocks)
        dist.all_to_all_single(received, blocks)
        shares = [section // self.size for section in sections]
        parts = received.movedim(0, 2).split(shares, dim=-1)
        return torch.cat([x.flatten(-2) for x in parts], dim=-1)


class _PlainOpen(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, given: Tensor, of: Exchange) -> Tensor:
        ctx.of = of
        return of.plain_open(given, of.dims.layout.widths)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.of.plain_close(grad, ctx.of.dims.layout.widths), None


class _PlainClose(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, given: Tensor, of: Exchange) -> Tensor:
        ctx.of = of
        return of.plain_close(given, (of.dims.v_dim,))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.of.plain_open(grad, (ctx.of.dims.v_dim,)), None


def rows(*shape: int) -> Tensor:
    return torch.randn(*shape, device=DEVICE, dtype=torch.bfloat16)


def check(case: Case, of: Exchange) -> None:
    for backward in (False, True):
        found = zip(of.ours(backward), of.plain(backward), strict=True)
        for what, (got, expected) in zip(("open", "close"), found, strict=True):
            assert torch.equal(got, expected), f"{case.name}: {what}, {backward=}"


def exchanges(session: Session) -> None:
    rank, cp = start_ranks()
    session.writes = rank == 0
    session.row["cp"] = cp
    sizes = session.sizes()
    dims = GDNDims.from_config(config_of(Layer("exchange"), sizes))
    divides = sizes.heads[0] % cp == 0
    for case in session.cases(multiple=2 * cp):
        torch.manual_seed(rank)
        of = Exchange(case, dims)
        if divides:
            check(case, of)
            session.say(f"{case.name}: ours equals plain bit for bit")
        if DEVICE == "cpu":
            continue
        runs = {"raw": of.raw, "plain": of.plain, "ours": of.ours}
        if not divides:
            del runs["plain"]
        for what, run in runs.items():
            record: dict[str, Any] = {"case": case.name, "layer": what}
            for name, backward in (("forward", False), ("forward_backward", True)):
                timed = time_ms(partial(run, backward), repeats=session.repeats)
                record[name] = slowest(timed)
            session.emit(record)
        del of, runs
        torch.cuda.empty_cache()
    dist.destroy_process_group()
