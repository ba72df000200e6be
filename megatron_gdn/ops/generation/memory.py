"""The memory of a sequence: the history and the state that a mixer keeps of earlier
tokens.

The caller allocates the buffers; :func:`.step.prefill` and :func:`.step.decode`
overwrite them.

Legend: N sequences, M slots of a buffer, s tokens, P columns of a projection row, C
convolved columns, W conv taps, H heads with a state, K rows of a state, V columns of a
state.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from ..layout import Layout
from ..rules.chunk_table import CHUNK
from ..state_maps.state_map import StateShape


class Memory(NamedTuple):
    """Histories and states of N sequences; both are zero before a sequence's first
    token.

    A history has the last inputs of the convolution, oldest first: W - 1 inputs, which
    the next token needs, or W inputs in the buffers of Megatron's inference context. On
    the grid a history has whole projection rows, ``[M, 1 + W - 1 + 64, P]``, in the
    order that :mod:`.aligned` gives.
    """

    history: Tensor  # [M, C, W - 1 or W], in the dtype of the rows or a wider one
    # [M, H, K, V], or a view of [M, H, V, K]; at least fp32 (fp64 for fp64 rows)
    state: Tensor
    # integers [N]; below 0: no slot; None: sequence n has slot n
    slots: Tensor | None = None

    def gathered(self) -> tuple[Tensor, Tensor]:
        """All sequences' histories and states ``[N, ...]``; arbitrary where a slot is
        negative."""
        if self.slots is None:
            return self.history, self.state
        read = self.slots.clamp(min=0).long()
        return self.history.index_select(0, read), self.state.index_select(0, read)

    def write(self, history: Tensor, state: Tensor) -> None:
        """Overwrite every sequence's history and state with ``history`` and
        ``state [N, ...]``."""
        for buffer, values in ((self.history, history), (self.state, state)):
            if self.slots is not None:
                write_slots(buffer, self.slots, values)
            elif buffer is not values:
                buffer.copy_(values)

    def after(self, token: int, slots: Tensor | None) -> Memory:
        """Entry ``token`` of buffers ``[M, s, ...]`` with the memory after each of s
        tokens."""
        return Memory(self.history[:, token], self.state[:, token], slots)

    def steps(self, tokens: int) -> Memory:
        """Buffers ``[N, s + 1, ...]``: for the memory before s ``tokens`` and after
        each of them.

        Entry 0 is a copy of this memory. :func:`.step.decode` writes the memory after
        each token to the other entries, and :func:`choose` copies one entry of each
        sequence back.

        Raises:
            ValueError: this memory has ``slots``.
        """
        if self.slots is not None:
            raise ValueError(
                "Memory.steps() takes memory without slots. For memory in slots give "
                f"decode your own buffers [M, {tokens}, ...] and the same slots."
            )
        made = Memory(
            _empty_steps(self.history, tokens + 1), _empty_steps(self.state, tokens + 1)
        )
        made.after(0, None).write(self.history, self.state)
        return made


def _empty_steps(x: Tensor, count: int) -> Tensor:
    """An uninitialised buffer ``[N, count, ...]`` with the memory order of
    ``x [N, ...]``."""
    if x.stride(-1) == 1:
        return x.new_empty((len(x), count) + x.shape[1:])
    return x.new_empty((len(x), count) + x.mT.shape[1:]).mT


def choose(memory: Memory, steps: Memory, accepted: Tensor) -> None:
    """Set every sequence's memory back to the memory after its last accepted token.

    Args:
        memory: the memory of N sequences after s tokens; overwritten.
        steps: from :meth:`Memory.steps`, filled by :func:`.step.decode`.
        accepted: int64 ``[N]`` on the memory's device: how many of each sequence's s
            tokens are kept, counted from the first. The host does not wait for this
            tensor.
    """
    number = torch.arange(len(accepted), device=accepted.device)
    memory.write(steps.history[number, accepted], steps.state[number, accepted])


def write_slots(buffer: Tensor, slots: Tensor, values: Tensor) -> None:
    """``buffer[slots] = values``, skipping slots below zero; the host does not wait for
    a GPU."""
    if not buffer.is_cuda:
        real = slots >= 0
        buffer[slots[real].long()] = values[real].to(buffer.dtype)
        return
    from .step_kernels import write_slots_on_gpu

    if not buffer[0].is_contiguous():
        buffer = buffer.mT
        values = values.mT
    write_slots_on_gpu(buffer, slots, values.to(buffer.dtype).contiguous())


class MemoryShape(NamedTuple):
    """Sizes of one sequence's :class:`Memory` in one layer, on one tensor-parallel
    rank."""

    channels: int
    past: int  # rows of history
    heads: int
    rows: int
    columns: int
    rows_first: bool = False  # True: a history is [rows, channels] (on the grid)

    @staticmethod
    @lru_cache(maxsize=64)
    def of(
        layout: Layout, state: StateShape, taps: int, on_grid: bool = False
    ) -> MemoryShape:
        """The sizes for this rank's ``layout``; ``on_grid``: for a mixer on the
        grid."""
        if on_grid:
            channels = layout.width
        else:
            channels = layout.conv_width
        past = taps + CHUNK if on_grid else taps - 1
        return MemoryShape(
            channels, past, state.heads, state.rows, state.columns, on_grid
        )

    @property
    def history(self) -> tuple[int, int]:
        if self.rows_first:
            return (self.past, self.channels)
        return (self.channels, self.past)

    @property
    def window(self) -> tuple[int, int]:
        """The shape of a history in Megatron's dynamic inference context, which keeps W
        inputs."""
        if self.rows_first:
            return self.history
        return (self.channels, self.past + 1)

    @property
    def state(self) -> tuple[int, int, int]:
        return self.heads, self.rows, self.columns

    def zeros(self, sequences: int, dtype: torch.dtype, device: torch.device) -> Memory:
        """The memory of ``sequences`` new sequences; ``dtype``: the projection rows'
        dtype."""
        wide = torch.promote_types(dtype, torch.float32)
        return Memory(
            torch.zeros((sequences,) + self.history, dtype=dtype, device=device),
            torch.zeros((sequences,) + self.state, dtype=wide, device=device),
        )

    def check(self, memory: Memory, sequences: int, dtype: torch.dtype) -> None:
        """Check ``memory`` of N ``sequences``; with slots, M > N, W inputs, wide dtypes
        fit too."""
        wide = torch.promote_types(dtype, torch.float32)
        slots = memory.slots
        for name, tensor, shape, least in (
            ("history", memory.history, self.history, dtype),
            ("state", memory.state, self.state, wide),
        ):
            whole = (sequences,) + shape
            found = tuple(tensor.shape)
            kind = tensor.dtype
            fits = found == whole and kind == least
            if slots is not None:
                if name == "history":
                    longer = self.window
                else:
                    longer = shape
                fits = found[1:] in (shape, longer) and len(slots) == sequences
                fits = fits and torch.promote_types(kind, least) == kind
            if not fits:
                raise ValueError(
                    f"{name} must be {whole} in {least} for {sequences} "
                    f"sequences of {dtype} rows, got {found} in {kind}."
                )
