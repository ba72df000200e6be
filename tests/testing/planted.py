"""Computations with a fault planted in them, and one without; run in processes of their own."""

import os

import torch
from torch import nn

from benchmarks.lib.repeats import check_repeats, forward_backward, poison_free_memory
from megatron_gdn.gdn.rule import resolve_rule
from megatron_gdn.ops import Documents
from megatron_gdn.ops.delta_rule.base import HeadSizes
from megatron_gdn.ops.parts import GatedNorm
from tests.gdn_mixer import gated_delta_mixer

# Heads in multiples of 32: on the CPU torch computes exp, rsqrt and the like in vectors, and the
# last few elements of a tensor otherwise, to other bits. This way every token fills whole vectors.
SIZES = HeadSizes(32, 32, 8, 8)


class Mixer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Parameter(torch.randn(SIZES.layout.conv_width, 1, 4) * 0.3)
        self.A_log = nn.Parameter(torch.rand(32))
        self.dt_bias = nn.Parameter(torch.ones(32))
        self.gamma = nn.Parameter(torch.rand(8) + 0.5)
        self.rule = resolve_rule(
            device="cpu", dtype=torch.float32, sizes=SIZES, deterministic=True
        ).rule

    def forward(self, proj, offsets=None):
        documents = None
        if offsets is not None:
            documents = Documents.from_cu_seqlens(offsets, len(proj), device="cpu")
        return gated_delta_mixer(
            proj, self.conv, None, self.A_log, self.dt_bias, SIZES,
            rule=self.rule, norm=GatedNorm(self.gamma), documents=documents,
        )  # fmt: skip


def rows(tokens: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(tokens, 1, SIZES.layout.width, generator=torch.Generator().manual_seed(seed))


class ShuffledSum(torch.autograd.Function):
    """``x.sum(0)``; the backward of the weight adds tokens in whatever order."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx, d):
        x, weight = ctx.saved_tensors
        terms = (d * x)[torch.randperm(len(x))]
        total = torch.zeros_like(weight)
        for term in terms:
            total = total + term
        return d * weight, total


class WithShuffledSum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.1, 3, 8))

    def forward(self, x):
        return ShuffledSum.apply(x, self.weight)


def reads_what_it_never_wrote():
    buffer = torch.empty(4096)
    buffer[::2] = 1.0
    return {"sum": torch.ones(8), "buffer": buffer}


def check_unwritten():
    return check_repeats(reads_what_it_never_wrote, 20)


def shares_after_poison() -> list[tuple[float, float]]:
    """Of each round: NaN, and finite numbers but zero, in the block of eight that has most."""
    seen = []
    for round in range(4):
        assert poison_free_memory("cpu", round) > 1 << 20
        blocks = [torch.empty(1 << 14) for _ in range(8)]  # malloc may give one that is older
        nan = max(x.isnan().float().mean().item() for x in blocks)
        numbers = max((x.isfinite() & (x != 0)).float().mean().item() for x in blocks)
        seen.append((nan, numbers))
    return seen


def check_mixer(index: int, repeats: int):
    return check_repeats(forward_backward(Mixer(), rows(130)), repeats)


def check_process_number(index: int):
    number = torch.tensor([float(os.getpid())])
    return check_repeats(lambda: {"constant": torch.ones(3), "pid": number}, 2)


def malloc_hands_out_garbage(index: int) -> bool:
    return bool((torch.empty(1 << 15, dtype=torch.uint8) != 0).any())


def fail(index: int) -> None:
    raise ValueError(f"no luck in {index}")
