"""Runs a computation again and again and says which tensor differs first, when, and by
how much.

Free memory is filled with garbage between the runs, and the device is kept busy during
them.
"""

from __future__ import annotations

import hashlib
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
    """Two tensors of one name whose bits are not equal."""

    name: str
    where: str  # what was compared with the first: "repeat 17", "process 1"
    elements: int  # that differ
    of: int
    largest: float  # difference of two elements; NaN if one of them is NaN
    relative: float  # that, over the largest element of the first tensor

    def __str__(self) -> str:
        return (
            f"{self.name} differs in {self.where}: {self.elements} of {self.of} "
            f"elements, by up to {self.largest:.3g} ({self.relative:.3g} of the "
            "largest)"
        )


@dataclass(frozen=True)
class Report:
    """What :func:`check_repeats` saw: ``repeats`` runs, of which the last one
    differed in ``difference`` and the tensors of ``also``, or all were equal.

    ``digests`` has the sha256 of the first run's tensors, to compare processes by.
    """

    repeats: int
    difference: Difference | None
    also: tuple[Difference, ...] = ()
    digests: dict[str, str] = field(default_factory=dict)

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


def poison_free_memory(device: torch.device, round: int) -> None:
    """Fill the memory that the next allocations will get with garbage.

    Every free block of torch's caching allocator is filled: in even rounds with NaN, in
    odd rounds with another byte, which makes finite numbers. A kernel that reads memory
    that nobody wrote then gives another result in every round. On the CPU memory
    belongs to malloc: blocks of common sizes are taken, filled and given back.
    """
    byte = _NAN_BYTE if round % 2 == 0 else (17 + 37 * round) % 0x7F
    taken = []
    if device.type != "cuda":
        for size in [1 << power for power in range(6, 23) for _ in range(4)]:
            taken.append(torch.empty(size, dtype=torch.uint8).fill_(byte))
        return
    reserved = torch.cuda.memory_reserved(device)
    for size in _free_blocks(device):
        taken.append(torch.empty(size, dtype=torch.uint8, device=device).fill_(byte))
        if torch.cuda.memory_reserved(device) > reserved:
            # The allocator did not reuse a free block. To go on would grow memory in
            # every round.
            return


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


def competitor(device: torch.device) -> Callable[[int], None]:
    """A function that queues work on a side stream, which takes bandwidth and
    multiprocessors from all other kernels. On the CPU it does nothing.

    The work is 8 to 40 copies and as many products, some milliseconds; the amount
    differs each time, so that the order in which other kernels' blocks are placed and
    finish is never the same. While there is work left, nothing is queued.
    """
    if device.type != "cuda":
        return lambda round: None
    stream = torch.cuda.Stream(device)
    last = torch.cuda.Event()
    with torch.cuda.stream(stream):
        # larger than the L2 cache
        source = torch.ones(256 << 20, dtype=torch.uint8, device=device)
        target = torch.empty_like(source)
        a = torch.ones(2048, 2048, dtype=torch.bfloat16, device=device)
        product = torch.empty_like(a)

    def start(round: int) -> None:
        if not last.query():
            return
        with torch.cuda.stream(stream):
            for _ in range(8 + (7 * round) % 33):
                target.copy_(source)
                torch.mm(a, a, out=product)
            last.record()

    return start


def check_repeats(run: Callable[[], Mapping[str, Tensor]], repeats: int) -> Report:
    """Call ``run`` ``repeats`` times and compare every result with the first, bit for
    bit.

    The check stops at the first run that differs.

    Args:
        run: returns tensors by name, the same names each time, in the order in which
            they are computed: the first to differ is reported first. They must be
            tensors of its own, not buffers that the next call writes to.
    """
    first = {name: x.detach().clone() for name, x in run().items()}
    device = next(iter(first.values())).device
    compete = competitor(device)
    hashes = {name: digest(x) for name, x in first.items()}
    for repeat in range(1, repeats):
        poison_free_memory(device, repeat)
        compete(repeat)
        now = run()
        assert now.keys() == first.keys(), now.keys() ^ first.keys()
        found = _differences(first, now, f"repeat {repeat}")
        if found:
            return Report(repeat + 1, found[0], tuple(found[1:]), hashes)
        del now
    return Report(repeats, None, (), hashes)


def _differences(
    first: Mapping[str, Tensor], now: Mapping[str, Tensor], where: str
) -> list[Difference]:
    """One wait for the device when all is equal, however many tensors there are."""
    equal = torch.stack(
        [(_bits(x) == _bits(now[name])).all() for name, x in first.items()]
    )
    if equal.all():
        return []
    found = [difference_of(name, where, first[name], now[name]) for name in first]
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
