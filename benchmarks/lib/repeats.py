"""Runs a computation again and again and says which tensor differs first, when, and by
how much.

Free memory is filled with garbage between the runs, and the device is kept busy during
them.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

# 0xFFFF, 0xFFFFFFFF, ...: NaN in every float format, -1 in every integer
_NAN_BYTE = 0xFF
# torch's allocator keeps requests up to here in a pool of their own
_SMALL_POOL = 1 << 20
_AS_INTEGER = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Difference:
    """Two tensors of one name whose bits are not equal.

    Attributes:
        name: which one.
        where: what was compared with what ("repeat 17", "process 1", ...).
        elements, of: how many elements differ, of how many.
        largest: the largest difference of two elements; NaN if one of them is NaN.
        relative: ``largest`` divided by the largest element of the first tensor.
    """

    name: str
    where: str
    elements: int
    of: int
    largest: float
    relative: float

    def __str__(self) -> str:
        return (
            f"{self.name} differs in {self.where}: {self.elements} of {self.of} "
            f"elements, by up to {self.largest:.3g} ({self.relative:.3g} of the "
            "largest)"
        )


@dataclass(frozen=True)
class Report:
    """What :func:`check_repeats` saw.

    Attributes:
        repeats: runs made, the first included; fewer than asked for when one differed.
        difference: the first tensor of the first run that differed; None when all were
            equal.
        also: the other tensors that differed in that run.
        digests: name -> sha256 of the first run's tensor, to compare processes by.
        seconds: how long it took.
    """

    repeats: int
    difference: Difference | None
    also: tuple[Difference, ...] = ()
    digests: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def equal(self) -> bool:
        return self.difference is None

    def __str__(self) -> str:
        if self.difference is None:
            return f"{self.repeats} repeats equal in {len(self.digests)} tensors"
        others = f" (and {', '.join(d.name for d in self.also)})" if self.also else ""
        return f"{self.difference}{others}"


def _bits(x: Tensor) -> Tensor:
    """NaN equals NaN of the same bits, and -0 is not 0."""
    x = x.detach().contiguous()
    return x.view(_AS_INTEGER[x.element_size()])


def difference_of(
    name: str, where: str, expected: Tensor, actual: Tensor
) -> Difference | None:
    """How two tensors of one shape differ; None when they are equal bit for bit."""
    assert (expected.shape, expected.dtype) == (actual.shape, actual.dtype), name
    unequal = int((_bits(expected) != _bits(actual)).sum())
    if unequal == 0:
        return None
    gap = (actual.double() - expected.double()).abs().max().item()
    scale = expected.double().abs().max().item()
    return Difference(
        name, where, unequal, expected.numel(), gap, gap / scale if scale else gap
    )


def digest(x: Tensor) -> str:
    """sha256 over shape, dtype and bits."""
    found = hashlib.sha256(f"{tuple(x.shape)} {x.dtype} ".encode())
    found.update(_bits(x).cpu().numpy().tobytes())
    return found.hexdigest()


def poison_free_memory(device: torch.device | str, round: int = 0) -> int:
    """Fill the memory that the next allocations will get with garbage.

    Every free block of torch's caching allocator is filled: in even rounds with NaN, in
    odd rounds with another byte, which makes finite numbers. A kernel that reads memory
    that nobody wrote then gives another result in every round. On the CPU memory
    belongs to malloc: blocks of common sizes are taken, filled and given back.

    Returns:
        Bytes filled.
    """
    device = torch.device(device)
    byte = _NAN_BYTE if round % 2 == 0 else (17 + 37 * round) % 0x7F
    if device.type == "cuda":
        sizes = _free_blocks(device)
    else:
        sizes = [1 << power for power in range(6, 23) for _ in range(4)]
    taken = []
    reserved = torch.cuda.memory_reserved(device) if device.type == "cuda" else 0
    for size in sizes:
        taken.append(torch.empty(size, dtype=torch.uint8, device=device).fill_(byte))
        if device.type == "cuda" and torch.cuda.memory_reserved(device) > reserved:
            # The allocator did not reuse a free block. To go on would grow memory in
            # every round.
            break
    return sum(block.numel() for block in taken)


def _free_blocks(device: torch.device) -> list[int]:
    """Sizes of the free blocks, largest first, so that each is asked for while it is
    whole."""
    index = torch.cuda.current_device() if device.index is None else device.index
    stream = torch.cuda.current_stream(index).cuda_stream
    sizes = []
    for segment in torch.cuda.memory_snapshot():
        if segment["device"] != index or segment["stream"] != stream:
            # the allocator reuses a block only on the stream that it came from
            continue
        small = segment["segment_type"] == "small"
        for block in segment["blocks"]:
            # For the small rest of a large block the allocator would use the pool of
            # small blocks.
            if block["state"] == "inactive" and (small or block["size"] > _SMALL_POOL):
                sizes.append(block["size"])
    return sorted(sizes, reverse=True)


class Competitor:
    """Work on a side stream that takes bandwidth and multiprocessors from all other
    kernels.

    The amount of work differs each time, so that the order in which other kernels'
    blocks are placed and finish is never the same. On the CPU it does nothing.

    Args:
        mib: size of the buffer that is copied; larger than the L2 cache.
        matrix: rows of the bf16 matrices that are multiplied.
    """

    def __init__(
        self, device: torch.device | str, mib: int = 256, matrix: int = 2048
    ) -> None:
        self._device = torch.device(device)
        if self._device.type != "cuda":
            return
        self._stream, self._last = torch.cuda.Stream(self._device), torch.cuda.Event()
        with torch.cuda.stream(self._stream):
            self._source = torch.ones(mib << 20, dtype=torch.uint8, device=self._device)
            self._target = torch.empty_like(self._source)
            self._a = torch.ones(
                matrix, matrix, dtype=torch.bfloat16, device=self._device
            )
            self._product = torch.empty_like(self._a)

    def start(self, round: int) -> None:
        """Queue 8 to 40 copies and as many products, some milliseconds; returns at
        once.

        Queues nothing while it still has work.
        """
        if self._device.type != "cuda" or not self._last.query():
            return
        with torch.cuda.stream(self._stream):
            for _ in range(8 + (7 * round) % 33):
                self._target.copy_(self._source)
                torch.mm(self._a, self._a, out=self._product)
            self._last.record()


def check_repeats(run: Callable[[], Mapping[str, Tensor]], repeats: int) -> Report:
    """Call ``run`` ``repeats`` times and compare every result with the first, bit for
    bit.

    Between runs the allocator's free memory is filled with garbage, different each
    time. During the runs a side stream competes for the device. Results are compared on
    the device. The check stops at the first run that differs.

    Args:
        run: returns tensors by name, the same names each time, in the order in which
            they are computed: the first to differ is reported first. They must be
            tensors of its own, not buffers that the next call writes to.
    """
    began = time.monotonic()
    first = {name: x.detach().clone() for name, x in run().items()}
    device = next(iter(first.values())).device
    competitor = Competitor(device)
    hashes = {name: digest(x) for name, x in first.items()}
    for repeat in range(1, repeats):
        poison_free_memory(device, repeat)
        competitor.start(repeat)
        now = run()
        assert now.keys() == first.keys(), now.keys() ^ first.keys()
        found = _differences(first, now, f"repeat {repeat}")
        if found:
            seconds = time.monotonic() - began
            return Report(repeat + 1, found[0], tuple(found[1:]), hashes, seconds)
        del now
    return Report(repeats, None, (), hashes, time.monotonic() - began)


def _differences(
    first: Mapping[str, Tensor], now: Mapping[str, Tensor], where: str
) -> list[Difference]:
    """One wait for the device when all is equal, however many tensors there are."""
    equal = torch.stack(
        [(_bits(x) == _bits(now[name])).all() for name, x in first.items()]
    )
    suspects = [
        name for name, same in zip(first, equal.tolist(), strict=True) if not same
    ]
    found = [difference_of(name, where, first[name], now[name]) for name in suspects]
    return [difference for difference in found if difference is not None]


def forward_backward(
    module: nn.Module, x: Tensor, d_out: Tensor | None = None, **arguments: Any
) -> Callable[[], dict[str, Tensor]]:
    """A ``run`` for :func:`check_repeats`: the output of ``module(x)`` and every
    gradient.

    Args:
        x: the input; its gradient is named ``dx``.
        d_out: gradient of the output; the same random numbers on every call when None.
        arguments: passed on to the module, whose first result is the output.

    After the output come the gradients, of the last parameters first and ``dx`` at the
    end. This is about the order in which a backward pass makes them.
    """
    x = x.detach().clone().requires_grad_()
    parameters = {n: p for n, p in module.named_parameters() if p.requires_grad}

    def run() -> dict[str, Tensor]:
        out = module(x, **arguments)
        out = out[0] if isinstance(out, tuple) else out
        seed = d_out
        if seed is None:
            generator = torch.Generator(out.device).manual_seed(0)
            seed = torch.empty_like(out).normal_(generator=generator)
        leaves = [*reversed(parameters.values()), x]
        grads = torch.autograd.grad(out, leaves, seed)
        names = [*reversed(parameters), "dx"]
        return {"output": out.detach(), **dict(zip(names, grads, strict=True))}

    return run
