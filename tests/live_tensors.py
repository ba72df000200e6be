"""Counts the bytes of tensors that are alive, so that a law about memory needs no
GPU."""

import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def _storages(values) -> list[torch.UntypedStorage]:
    return [
        x.untyped_storage() for x in tree_leaves(values) if isinstance(x, torch.Tensor)
    ]


class LiveBytes(TorchDispatchMode):
    """Bytes of the storages that were made inside: now, and at most so far."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._sizes: dict[int, int] = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        given = {storage._cdata for storage in _storages((args, kwargs))}
        made = function(*args, **(kwargs or {}))
        for storage in _storages(made):
            if storage._cdata not in given and storage._cdata not in self._sizes:
                self._sizes[storage._cdata] = storage.nbytes()
                self.now += storage.nbytes()
                weakref.finalize(storage, self._freed, storage._cdata)
        self.most = max(self.most, self.now)
        return made

    def _freed(self, storage: int) -> None:
        self.now -= self._sizes.pop(storage)


def bytes_per_token(run, tokens: tuple[int, int]) -> float:
    """How much the peak of ``run(tokens)`` grows with every token."""
    peaks = []
    for count in tokens:
        run(count)  # makes the tables, which are kept
        with LiveBytes() as live:
            held = run(count)
        del held
        peaks.append(live.most)
    return (peaks[1] - peaks[0]) / (tokens[1] - tokens[0])
