"""Makes hidden errors visible: free memory is filled with garbage, and the device is kept busy."""

from __future__ import annotations

import torch

_NAN_BYTE = 0xFF  # 0xFFFF, 0xFFFFFFFF, ...: NaN in every float format, -1 in every integer
_SMALL_POOL = 1 << 20  # torch's allocator keeps requests up to here in a pool of their own


def poison_free_memory(device: torch.device | str, round: int = 0) -> int:
    """Fill the memory that the next allocations will get with garbage.

    Every free block of torch's caching allocator is filled: in even rounds with NaN, in odd rounds
    with another byte, which makes finite numbers. A kernel that reads memory that nobody wrote then
    gives another result in every round. On the CPU memory belongs to malloc: blocks of common sizes
    are taken, filled and given back.

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
            # The allocator did not reuse a free block. To go on would grow memory in every round.
            break
    return sum(block.numel() for block in taken)


def _free_blocks(device: torch.device) -> list[int]:
    """Sizes of the free blocks, largest first, so that each is asked for while it is whole."""
    index = torch.cuda.current_device() if device.index is None else device.index
    stream = torch.cuda.current_stream(index).cuda_stream
    sizes = []
    for segment in torch.cuda.memory_snapshot():
        if segment["device"] != index or segment["stream"] != stream:
            continue  # the allocator reuses a block only on the stream that it came from
        small = segment["segment_type"] == "small"
        for block in segment["blocks"]:
            # For the small rest of a large block the allocator would use the pool of small blocks.
            if block["state"] == "inactive" and (small or block["size"] > _SMALL_POOL):
                sizes.append(block["size"])
    return sorted(sizes, reverse=True)


class Competitor:
    """Work on a side stream that takes bandwidth and multiprocessors from all other kernels.

    The amount of work differs each time, so that the order in which other kernels' blocks are
    placed and finish is never the same. On the CPU it does nothing.

    Args:
        mib: size of the buffer that is copied; larger than the L2 cache.
        matrix: rows of the bf16 matrices that are multiplied.
    """

    def __init__(self, device: torch.device | str, mib: int = 256, matrix: int = 2048) -> None:
        self._device = torch.device(device)
        if self._device.type != "cuda":
            return
        self._stream, self._last = torch.cuda.Stream(self._device), torch.cuda.Event()
        with torch.cuda.stream(self._stream):
            self._source = torch.ones(mib << 20, dtype=torch.uint8, device=self._device)
            self._target = torch.empty_like(self._source)
            self._a = torch.ones(matrix, matrix, dtype=torch.bfloat16, device=self._device)
            self._product = torch.empty_like(self._a)

    def start(self, round: int) -> None:
        """Queue 8 to 40 copies and as many products, some milliseconds; returns at once.

        Queues nothing while it still has work.
        """
        if self._device.type != "cuda" or not self._last.query():
            return
        with torch.cuda.stream(self._stream):
            for _ in range(8 + (7 * round) % 33):
                self._target.copy_(self._source)
                torch.mm(self._a, self._a, out=self._product)
            self._last.record()
