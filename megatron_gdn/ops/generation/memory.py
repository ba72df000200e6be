"""The memory of a sequence: the history and the state of a mixer after the sequence's
tokens so far.

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

    A history holds the last inputs of the convolution, the oldest first. It has the
    W - 1 inputs that the next token needs; in the buffers of Megatron's inference
    context it has W inputs. On the grid a history holds all columns of projection rows,
    ``[M, 1 + W - 1 + 64, P]``; :mod:`.aligned` gives the order of the rows.
    """

    history: Tensor  # [M, C, W - 1 or W], in the dtype of the rows or a wider one
    # [M, H, K, V], or a view of [M, H, V, K]; at least fp32 (fp64 for fp64 rows)
    state: Tensor
    # integers [N], the slot of each sequence; below 0: no slot; None: sequence n has
    # slot n
    slots: Tensor | None = None

    def gathered(self) -> tuple[Tensor, Tensor]:
        """The histories and states of all sequences, ``[N, ...]``; those of a sequence
        without a slot are arbitrary."""
        if self.slots is None:
            return self.history, self.state
        read = self.slots.clamp(min=0).long()
        return self.history.index_select(0, read), self.state.index_select(0, read)

    def write(self, history: Tensor, state: Tensor) -> None:
        """Overwrite the histories and states of all sequences; both arguments are
        ``[N, ...]``."""
        for buffer, values in ((self.history, history), (self.state, state)):
            if self.slots is not None:
                write_slots(buffer, self.slots, values)
            elif buffer is not values:
                buffer.copy_(values)

    def after(self, token: int, slots: Tensor | None) -> Memory:
        """The memory after token number ``token``; a negative number counts from the
        end.

        ``slots``: the slots of the returned memory. This object's buffers are
        ``[M, s, ...]``: they hold the memory after each of s tokens.
        """
        return Memory(self.history[:, token], self.state[:, token], slots)

    def steps(self, tokens: int) -> Memory:
        """New buffers ``[N, s + 1, ...]``, for the memory before s ``tokens`` and after
        each of these tokens.

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
    """An uninitialised buffer ``[N, count, ...]`` for ``count`` copies of
    ``x [N, ...]``.

    If x is a view of ``[N, H, V, K]``, so is each copy, since decode writes a state and
    its copy with the same offsets.
    """
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
    """``buffer[slots] = values`` without the slots below zero; the host does not wait
    for a GPU.

    ``buffer [M, ...]``, ``slots [N]``, ``values [N, ...]``. A mask of the slots would
    make the host wait, so on a GPU a kernel skips the slots below zero.
    """
    if not buffer.is_cuda:
        real = slots >= 0
        buffer[slots[real].long()] = values[real].to(buffer.dtype)
        return
    from .step_kernels import write_slots_on_gpu

    # a state may be a view of [V, K]; the kernel copies contiguous slots
    if not buffer[0].is_contiguous():
        buffer = buffer.mT
        values = values.mT
    write_slots_on_gpu(buffer, slots, values.to(buffer.dtype).contiguous())


class MemoryShape(NamedTuple):
    """Sizes of one sequence's :class:`Memory` in one layer, on one tensor-parallel
    rank."""

    channels: int  # C; on the grid P, the width of a projection row
    history_rows: int  # rows of a history: W - 1; on the grid W + 64
    heads: int
    rows: int  # of a state
    columns: int  # of a state
    # True (on the grid): a history is [history_rows, channels]. False: it is
    # [channels, history_rows].
    rows_first: bool = False

    @staticmethod
    @lru_cache(maxsize=64)
    def of(
        layout: Layout, state: StateShape, taps: int, on_grid: bool = False
    ) -> MemoryShape:
        """The sizes for this rank's ``layout``, states of the shape ``state`` and a
        convolution with ``taps`` taps; ``on_grid``: in ``batch_invariant_mode``."""
        if on_grid:
            channels = layout.width
            history_rows = taps + CHUNK
        else:
            channels = layout.conv_width
            history_rows = taps - 1
        return MemoryShape(
            channels, history_rows, state.heads, state.rows, state.columns, on_grid
        )

    @property
    def history(self) -> tuple[int, int]:
        """The shape of a history."""
        if self.rows_first:
            return (self.history_rows, self.channels)
        return (self.channels, self.history_rows)

    @property
    def dynamic_context_history(self) -> tuple[int, int]:
        """The shape of a history in Megatron's dynamic inference context, which stores
        W inputs."""
        if self.rows_first:
            return self.history
        return (self.channels, self.history_rows + 1)

    @property
    def state(self) -> tuple[int, int, int]:
        """The shape of a state, [H, K, V]."""
        return self.heads, self.rows, self.columns

    def zeros(self, sequences: int, dtype: torch.dtype, device: torch.device) -> Memory:
        """The memory of as many new ``sequences``, without slots; ``dtype`` is that of
        the projection rows.

        States are in fp32, or in fp64 for fp64 rows.
        """
        wide = torch.promote_types(dtype, torch.float32)
        return Memory(
            torch.zeros((sequences,) + self.history, dtype=dtype, device=device),
            torch.zeros((sequences,) + self.state, dtype=wide, device=device),
        )

    def check(self, memory: Memory, sequences: int, dtype: torch.dtype) -> None:
        """Raise a ValueError unless ``memory`` fits ``sequences`` sequences of rows in
        ``dtype``.

        A memory with slots may have more slots than sequences, wider dtypes, and
        histories of W inputs, as in Megatron's inference context.
        """
        wide = torch.promote_types(dtype, torch.float32)
        slots = memory.slots
        for name, tensor, shape, longer_shape, least_dtype in (
            (
                "history",
                memory.history,
                self.history,
                self.dynamic_context_history,
                dtype,
            ),
            ("state", memory.state, self.state, self.state, wide),
        ):
            wanted = (sequences,) + shape
            found = tuple(tensor.shape)
            found_dtype = tensor.dtype
            if slots is None:
                fits = found == wanted and found_dtype == least_dtype
            else:
                is_wide = torch.promote_types(found_dtype, least_dtype) == found_dtype
                fits = found[1:] in (shape, longer_shape) and is_wide
                fits = fits and len(slots) == sequences
            if not fits:
                raise ValueError(
                    f"{name} must be {wanted} in {least_dtype} for {sequences} "
                    f"sequences of {dtype} rows, got {found} in {found_dtype}."
                )
