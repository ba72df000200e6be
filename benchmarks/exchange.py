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

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from lib.cases import Case
from lib.model import DEVICE
from lib.session import Session
from parallel import bare_exchange, dims_of, start_ranks, times_of
from torch import Tensor

from megatron_gdn import Documents, GDNDims, SequenceLayout
from megatron_gdn.context_parallel import Headwise, inverse, rank_order_of_sequence


class Plain(torch.autograd.Function):
    """``there(x)``; the gradient is ``back`` of the output's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, there: Callable, back: Callable) -> Tensor:
        ctx.back = back
        return there(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.back(grad), None, None


def received_of(blocks: Tensor) -> Tensor:
    received = torch.empty_like(blocks)
    dist.all_to_all_single(received, blocks)
    return received


def to_heads(x: Tensor, ranks: int, sections: tuple[int, ...], order: Tensor) -> Tensor:
    """This rank's tokens of all heads become all tokens, in ``order``, of its heads.

    Args:
        sections: widths of the whole row; key heads must divide among the ranks.
    """
    parts = [each.unflatten(-1, (ranks, -1)) for each in x.split(sections, dim=-1)]
    blocks = torch.cat(parts, dim=-1).movedim(2, 0).contiguous()
    return received_of(blocks).flatten(0, 1).index_select(0, order)


def to_tokens(
    x: Tensor, ranks: int, sections: tuple[int, ...], order: Tensor
) -> Tensor:
    """The way back of `to_heads`; ``order`` is the inverse."""
    blocks = x.index_select(0, order).unflatten(0, (ranks, -1))
    shares = [section // ranks for section in sections]
    parts = received_of(blocks).movedim(0, 2).split(shares, dim=-1)
    return torch.cat([each.flatten(-2) for each in parts], dim=-1)


class Exchange:
    """One case's tensors: what in_proj and the mixer would hand over, and gradients for
    both."""

    def __init__(self, case: Case, dims: GDNDims) -> None:
        ranks = dist.get_world_size()
        self.scheme = Headwise(dims.layout, dist.group.WORLD, SequenceLayout.ZIGZAG)
        self.tokens = case.tokens
        self.documents = None
        if case.offsets is not None:
            self.documents = Documents.from_cu_seqlens(
                case.offsets, case.tokens, device=DEVICE
            )
        share = case.tokens // ranks
        self.proj = rows(share, dims.layout.width).requires_grad_()
        self.mixed = rows(case.tokens, dims.v_dim // ranks).requires_grad_()
        opened = rows(case.tokens, self.scheme.layout.width)
        self.grads = opened, rows(share, dims.v_dim)
        undo = rank_order_of_sequence(case.lengths or (case.tokens,), ranks).to(DEVICE)
        redo = inverse(undo)

        def ways(*sections: int) -> tuple[Callable, Callable]:
            heads = partial(to_heads, ranks=ranks, sections=sections, order=undo)
            return heads, partial(to_tokens, ranks=ranks, sections=sections, order=redo)

        self.ways_of_row = ways(*dims.layout.widths)
        self.ways_of_output = ways(dims.v_dim)[::-1]

    def ours(self, backward: bool) -> tuple[Tensor, ...]:
        passage = self.scheme.passage(self.documents, self.tokens, 1, self.proj)
        opened = passage.to_stages(self.proj)
        closed = passage.from_stages(self.mixed)
        return self.results(opened, closed, backward)

    def plain(self, backward: bool) -> tuple[Tensor, ...]:
        opened = Plain.apply(self.proj, *self.ways_of_row)
        closed = Plain.apply(self.mixed, *self.ways_of_output)
        return self.results(opened, closed, backward)

    def results(
        self, opened: Tensor, closed: Tensor, backward: bool
    ) -> tuple[Tensor, ...]:
        if not backward:
            return opened, closed
        inputs = self.proj, self.mixed
        return torch.autograd.grad((opened, closed), inputs, self.grads)


def rows(tokens: int, width: int) -> Tensor:
    return torch.randn(tokens, 1, width, device=DEVICE, dtype=torch.bfloat16)


def exchanges(session: Session) -> None:
    rank, cp = start_ranks()
    session.writes = rank == 0
    session.row["cp"] = cp
    sizes = session.sizes()
    dims = dims_of(sizes)
    for case in session.cases(multiple=2 * cp):
        torch.manual_seed(rank)
        of = Exchange(case, dims)
        runs = {"raw": bare_exchange(dims, cp, case.tokens), "ours": of.ours}
        if sizes.heads[0] % cp == 0:
            runs["plain"] = of.plain
            for backward in (False, True):
                found = zip(of.ours(backward), of.plain(backward), strict=True)
                for got, expected in found:
                    assert torch.equal(got, expected), f"{case.name}: {backward=}"
            session.say(f"{case.name}: ours equals plain bit for bit")
        if DEVICE == "cpu":
            continue
        for what, run in runs.items():
            times = times_of(session, partial(run, False), partial(run, True))
            session.emit({"case": case.name, "layer": what, **times})
        del of, runs
        torch.cuda.empty_cache()
    dist.destroy_process_group()
