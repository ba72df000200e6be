"""Computations with a fault planted in them; run in processes of their own."""

import os

import torch
from torch import nn

from benchmarks.lib.repeats import check_repeats


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


def check_process_number(index: int):
    number = torch.tensor([float(os.getpid())])
    return check_repeats(lambda: {"constant": torch.ones(3), "pid": number}, 2)


def fail(index: int) -> None:
    raise ValueError(f"no luck in {index}")
