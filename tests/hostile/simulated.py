"""Runs programs of Triton kernels on tensors that have sizes and strides and no memory.

A launch on meta tensors runs some programs of its grid in Triton's interpreter, twice:
once as compiled, with integers of 32 bits where the kernel has them, and once with 64
bits for every integer. Loads return zeros, or the index that :meth:`Simulation.holds`
gave for a table of indices. Both runs must reach the same elements, and every element
must lie inside its tensor.
"""

from __future__ import annotations

import random
from contextlib import contextmanager

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.jit import mangle_type

# The largest sizes of a grid's axes on CUDA.
GRID = 2**31 - 1, 65535, 65535
# addresses of different tensors are 2^46 bytes apart, more than any tensor has
_SPACING = 46
_ALL_OF = 8  # an axis of at most this many programs runs all of them


class Simulation:
    """The launches on meta tensors, and what their loads return."""

    def __init__(self) -> None:
        self.launched: set[str] = set()
        self.runs = True  # False: launches are noted, and no program runs
        self._held: list[tuple[torch.Tensor, int]] = []

    def holds(self, table: torch.Tensor, index: int) -> torch.Tensor:
        """Let loads from ``table``, a meta tensor of indices, return ``index``."""
        self._held.append((table, index))
        return table

    def index_in(self, table: torch.Tensor) -> int:
        """What a load from ``table`` returns."""
        return next((index for held, index in self._held if held is table), 0)

    def run(self, kernel, *args, grid, warmup=False, **kwargs) -> None:
        """In place of ``InterpretedFunction.run``."""
        grid = (*grid, 1, 1)[:3]
        name = kernel.fn.__name__
        self.launched.add(name)
        for axis, (size, most) in enumerate(zip(grid, GRID, strict=True)):
            assert 0 < size <= most, (
                f"{name}: axis {axis} of the grid {grid} has at most {most}"
            )
        tensors = [x for x in args if isinstance(x, torch.Tensor)]
        for program in _programs(grid) if self.runs else ():
            as_compiled, wide = (
                _reached(kernel, args, kwargs, grid, program, self, wide=wide)
                for wide in (False, True)
            )
            assert len(as_compiled) == len(wide), (
                f"{name}: program {program} takes another branch"
            )
            for found, exact in zip(as_compiled, wide, strict=True):
                _compare(name, program, tensors, found, exact)


def _compare(name, program, tensors, found, exact) -> None:
    """The addresses of one load or store, of the run as compiled and of the wide
    one."""
    for address in np.unique(exact >> _SPACING):
        x = tensors[int(address) - 1]
        inside = exact[exact >> _SPACING == address] - (address << _SPACING)
        last = sum(
            (n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True)
        )
        least = int(inside.min())
        most = int(inside.max()) // x.element_size()
        assert least >= 0 and most <= last, (
            f"{name}: program {program} reaches elements {least} to {most} of a tensor "
            f"{tuple(x.shape)} with strides {x.stride()}"
        )
    assert np.array_equal(found, exact), (
        f"{name}: an offset of program {program} does not fit into its integer"
    )


def _programs(grid):
    """The last program and one between, or all of a short first axis that end the other
    axes."""
    draw = random.Random(0)
    _, *others = last = tuple(size - 1 for size in grid)
    if grid[0] <= _ALL_OF:
        return [(place, *others) for place in range(grid[0])]
    return [tuple(draw.randrange(size) for size in grid), last]


def _reached(kernel, args, kwargs, grid, program, simulation, wide):
    """The addresses of each load and store of one program, without those that a mask
    hides."""
    reached: list[np.ndarray] = []
    tensors = [x for x in args if isinstance(x, torch.Tensor)]

    convert = interpreter._implicit_cvt

    def converted(x):
        """What the kernel gets for the argument ``x``."""
        if isinstance(x, torch.Tensor):
            place = next(i for i, tensor in enumerate(tensors) if tensor is x)
            handle = np.array([(place + 1) << _SPACING], dtype=np.uint64)
        elif type(x) is int:
            narrow = -(2**31) <= x < 2**31 and not wide
            handle = np.array([x], dtype=np.int32 if narrow else np.int64)
        else:
            return convert(x)
        ty = tl.str_to_ty(mangle_type(x), None)
        return tl.tensor(interpreter.TensorHandle(handle, ty), ty)

    def load(builder, ptrs, mask, other, *rest):
        """Note the addresses; return an index for integers and zeros for all else."""
        kind = ptrs.get_element_ty()
        shown = np.broadcast_to(mask.data, ptrs.data.shape).astype(bool)
        reached.append(ptrs.data[shown].astype(np.int64))
        made = np.zeros(ptrs.data.shape, dtype=interpreter._get_np_dtype(kind))
        if kind.is_int() and shown.any():
            table = tensors[int(ptrs.data[shown].flat[0]) // 2**_SPACING - 1]
            made[shown] = simulation.index_in(table)
        if other is not None:
            made = np.where(shown, made, other.data)
        return interpreter.TensorHandle(made, kind)

    def store(builder, ptrs, value, mask, *rest):
        shown = np.broadcast_to(mask.data, ptrs.data.shape).astype(bool)
        reached.append(ptrs.data[shown].astype(np.int64))

    executor = interpreter.GridExecutor(kernel.rewrite(), kernel.arg_names, (1, 1, 1))
    executor._init_args_hst = lambda *given: given
    executor._restore_args_dev = lambda *given: None
    changes = {"create_masked_load": load, "create_masked_store": store}
    changes["set_grid_dim"] = lambda self, *_: setattr(self, "grid_dim", grid)
    changes["set_grid_idx"] = lambda self, *_: setattr(self, "grid_idx", program)
    with _patched(changes, converted, wide), np.errstate(all="ignore"):
        executor(*args, **kwargs)
    return reached


@contextmanager
def _patched(methods, converted, wide):
    """Change the interpreter's builder and arguments; ``wide``: integers of 32 bits
    have 64."""
    builder = interpreter.InterpreterBuilder
    Handle = interpreter.TensorHandle
    changes = [(builder, name, method) for name, method in methods.items()]
    changes.append((interpreter, "_implicit_cvt", converted))
    if wide:
        dtype_of = interpreter._get_np_dtype

        def wide_dtype_of(kind):
            found = dtype_of(kind)
            return np.dtype(np.int64) if found == np.int32 else found

        def wide_bitcast(self, x, kind):
            """Of floats and integers of 32 bits, as which the integers are cast
            first."""
            data = x.data.astype(np.int32) if x.data.dtype == np.int64 else x.data
            made = data.view(dtype_of(kind.scalar))
            return Handle(
                made.astype(np.int64) if made.dtype == np.int32 else made, kind.scalar
            )

        def of(value):
            return Handle(np.array([value], dtype=np.int64), tl.int32)

        changes += [
            (interpreter, "_get_np_dtype", wide_dtype_of),
            (interpreter, "_validate_np_data_size", lambda *_: True),
            (builder, "create_bitcast", wide_bitcast),
            (builder, "get_int32", lambda self, value: of(value)),
            (
                builder,
                "create_get_program_id",
                lambda self, axis: of(self.grid_idx[axis]),
            ),
            (
                builder,
                "create_get_num_programs",
                lambda self, axis: of(self.grid_dim[axis]),
            ),
            (
                builder,
                "create_make_range",
                lambda self, kind, start, stop: Handle(
                    np.arange(start, stop), tl.int32
                ),
            ),
        ]
    kept = [(home, name, getattr(home, name)) for home, name, _ in changes]
    for home, name, new in changes:
        setattr(home, name, new)
    try:
        yield
    finally:
        for home, name, old in kept:
            setattr(home, name, old)
