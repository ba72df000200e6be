"""The head exchange alone, open + close, beside the bare collective that moves the same
bytes.

    torchrun --standalone --nproc_per_node=4 benchmarks/bench_exchange.py --check --out x.jsonl

raw    all_to_all_single of packed buffers: two exchanges forward, two backward, nothing
       else
plain  split + cat, all_to_all_single, index_select in plain torch
ours   the two passages of ``Headwise`` as they are; then in as many waves as --waves
       says, each run of tokens a message ("runs") or one message per peer and a second
       pass ("blocks")

Medians over the repeats, then the slowest rank. ``--check`` compares ours with plain,
bit for bit; it also runs without a GPU, on gloo, with ``--shrink 64``.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import signal
from dataclasses import dataclass

import torch
import torch.distributed as dist
from lib.measure import dims_of, environment, slowest, table, time_ms, write_lines
from torch import Tensor

from megatron_gdn import Documents, GDNDims, SequenceLayout
from megatron_gdn.context_parallel import (
    Headwise,
    Passage,
    inverse,
    rank_order_of_sequence,
)
from megatron_gdn.context_parallel.headwise import exchange

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@dataclass(frozen=True)
class Case:
    tokens: int  # of the whole sequence, over all ranks
    documents: int = 1  # of equal length; more than one is packed


CASES = {
    "131072": Case(131072),
    "32768": Case(32768),
    "thd131072-4096": Case(131072, 32),
    "thd32768-4096": Case(32768, 8),
    "thd32768-512": Case(32768, 64),
}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument(
        "--heads", type=int, nargs=2, default=(16, 32), metavar=("KEY", "VALUE")
    )
    parser.add_argument(
        "--waves", type=int, nargs="+", default=(1, 2, 4), help="beside the default"
    )
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument(
        "--shrink", type=int, default=1, help="divide every length by this"
    )
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--out", help="append JSON lines to this file")
    return parser.parse_args()


class Setting:
    """One case's tensors: what in_proj and the mixer would hand over, and gradients for
    both."""

    def __init__(self, case: Case, dims: GDNDims, shrink: int) -> None:
        self.size, self.rank, self.dims = dist.get_world_size(), dist.get_rank(), dims
        self.scheme = Headwise(dims.layout, dist.group.WORLD, SequenceLayout.ZIGZAG)
        tokens = case.tokens // shrink
        self.lengths = (tokens // case.documents,) * case.documents
        self.documents = None
        if case.documents > 1:
            offsets = torch.arange(case.documents + 1) * self.lengths[0]
            self.documents = Documents.from_cu_seqlens(offsets, tokens, device=DEVICE)
        share = tokens // self.size
        p, v = self.scheme.layout.width, dims.v_dim // self.size

        def rows(*shape: int) -> Tensor:
            return torch.randn(*shape, device=DEVICE, dtype=torch.bfloat16)

        self.proj = rows(share, 1, dims.layout.width).requires_grad_()
        self.mixed = rows(tokens, 1, v).requires_grad_()
        self.grads = rows(tokens, 1, p), rows(share, 1, dims.v_dim)
        self.messages = [rows(self.size, share, 1, width) for width in (p, v)]
        undo = rank_order_of_sequence(self.lengths, self.size)
        self.undo, self.redo = undo.to(DEVICE), inverse(undo).to(DEVICE)

    def passage(self) -> Passage:
        """As the switches of the exchange are now."""
        return self.scheme.passage(self.documents, sum(self.lengths), 1, self.proj)

    # The three things to time.

    def raw(self, backward: bool) -> None:
        for _ in range(2 if backward else 1):
            for message in self.messages:
                dist.all_to_all_single(torch.empty_like(message), message)

    def ours(self, backward: bool) -> tuple[Tensor, ...]:
        passage = self.passage()
        opened = passage.open(self.proj)
        closed = passage.close(self.mixed)
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

    def plain_open(self, rows: Tensor, sections: tuple[int, ...]) -> Tensor:
        parts = [x.unflatten(-1, (self.size, -1)) for x in rows.split(sections, dim=-1)]
        blocks = torch.cat(parts, dim=-1).movedim(2, 0).contiguous()
        received = torch.empty_like(blocks)
        dist.all_to_all_single(received, blocks)
        return received.flatten(0, 1).index_select(0, self.undo)

    def plain_close(self, rows: Tensor, sections: tuple[int, ...]) -> Tensor:
        blocks = rows.index_select(0, self.redo).unflatten(0, (self.size, -1))
        received = torch.empty_like(blocks)
        dist.all_to_all_single(received, blocks)
        shares = [section // self.size for section in sections]
        parts = received.movedim(0, 2).split(shares, dim=-1)
        return torch.cat([x.flatten(-2) for x in parts], dim=-1)


class _PlainOpen(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows: Tensor, setting: Setting) -> Tensor:
        ctx.setting = setting
        return setting.plain_open(rows, setting.dims.layout.widths)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return ctx.setting.plain_close(grad, ctx.setting.dims.layout.widths), None


class _PlainClose(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows: Tensor, setting: Setting) -> Tensor:
        ctx.setting = setting
        return setting.plain_close(rows, (setting.dims.v_dim,))

    @staticmethod
    def backward(ctx, grad: Tensor):
        return ctx.setting.plain_open(grad, (ctx.setting.dims.v_dim,)), None


AS_IS = exchange.MOST_WAVES, exchange.WAVE_BYTES, exchange.MESSAGE_BYTES


def travel(way: tuple[int, int, int]) -> None:
    exchange.MOST_WAVES, exchange.WAVE_BYTES, exchange.MESSAGE_BYTES = way


def ways(waves: list[int]) -> dict[str, tuple[int, int, int]]:
    """The ways for rows to travel, by name."""
    found = {"ours": AS_IS}
    for count in waves:
        found[f"ours, runs, {count} waves"] = (count, 1, 0)
        found[f"ours, blocks, {count} waves"] = (count, 1, 1 << 40)
    return found


def check(name: str, setting: Setting, waves: list[int]) -> None:
    for backward in (False, True):
        expected = setting.plain(backward)
        for how, way in ways(waves).items():
            travel(way)
            got = setting.ours(backward)
            for what, a, b in zip(("open", "close"), got, expected, strict=True):
                assert torch.equal(a, b), f"{name}: {what}, {backward=}, {how}"
    if setting.rank == 0:
        print(
            f"{name}: ours equals plain bit for bit, forward and backward", flush=True
        )


def main() -> None:
    args = arguments()
    # how torchrun ends a rank: says where it is
    faulthandler.register(signal.SIGTERM, chain=True)
    if DEVICE == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if DEVICE == "cuda" else "gloo")
    size = dist.get_world_size()
    first = dist.get_rank() == 0
    dims = dims_of(*args.heads)
    divides = args.heads[0] % size == 0
    rows = [["case", "what", "fwd ms", "fwd+bwd ms", "to raw"]]
    for name in args.cases:
        torch.manual_seed(dist.get_rank())
        setting = Setting(CASES[name], dims, args.shrink)
        if args.check and divides:
            check(name, setting, args.waves)
        if DEVICE != "cuda":
            continue
        candidates = {"raw": (AS_IS, setting.raw)}
        if divides:
            candidates["plain"] = (AS_IS, setting.plain)
        candidates |= {
            how: (way, setting.ours) for how, way in ways(args.waves).items()
        }
        raw = None
        for what, (way, run) in candidates.items():
            travel(way)
            forward, both = (
                slowest(time_ms(lambda b=b, run=run: run(b), repeats=args.repeats))
                for b in (False, True)
            )
            raw = both["median"] if raw is None else raw
            rows.append(
                [
                    name,
                    what,
                    f"{forward['median']:.3f}",
                    f"{both['median']:.3f}",
                    f"{both['median'] / raw:.3f}",
                ]
            )
            if first:
                print("  ".join(rows[-1]), flush=True)
                record = {
                    "case": name,
                    "cp": size,
                    "what": what,
                    "heads": list(args.heads),
                    "forward": forward,
                    "forward_backward": both,
                    "to_raw": both["median"] / raw,
                    "environment": environment(),
                }
                write_lines(args.out, [record])
        del setting, candidates
        if DEVICE == "cuda":
            torch.cuda.empty_cache()
    if first and DEVICE == "cuda":
        print(f"\ncp {size}, heads {args.heads[0]} / {args.heads[1]} of 128, bf16")
        print(table(rows))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
