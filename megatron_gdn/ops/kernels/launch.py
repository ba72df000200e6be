"""Launches of Triton kernels, prepared once; a later call takes the host a few
microseconds.

Triton's ``kernel[grid](...)`` inspects every argument in each call. A :class:`Launch`
makes this call once and keeps Triton's launcher for later calls. Each launcher is for
one device and one compiled variant of the kernel. The variant depends on the tensors'
dtypes, on which tensors are None, and on which addresses are multiples of 16 bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton import JITFunction, knobs

from .builds import compile_in_one_process
from .tiles import MOST_PROGRAMS

_LARGEST_GRID = 2**31 - 1, MOST_PROGRAMS, MOST_PROGRAMS  # of CUDA, by axis
# bytes; if a pointer is no multiple of 16, Triton compiles another variant
_ALIGNMENT_BYTES = 16
# the size of each `lru_cache` of launches, whose keys are shapes, strides and options
LAUNCH_CACHE_SIZE = 256


def pointers_and_key(
    tensors: Sequence[Tensor | None],
) -> tuple[list[int | None], tuple] | None:
    """The tensors' pointers, and a key of the compiled variant; None if a tensor is not
    on a GPU.

    The key has the dtypes (None: no tensor), and the alignments unless all tensors are
    aligned.
    """
    pointers: list[int | None] = []
    key: list[torch.dtype | bool | None] = []
    all_bits = 0  # its low bits are 0 if all pointers are aligned
    for x in tensors:
        if x is None:
            pointers.append(None)
            key.append(None)
            continue
        if not x.is_cuda:
            return None
        pointer = x.data_ptr()
        pointers.append(pointer)
        key.append(x.dtype)
        all_bits |= pointer
    if all_bits % _ALIGNMENT_BYTES:
        key.extend(
            pointer is not None and pointer % _ALIGNMENT_BYTES == 0
            for pointer in pointers
        )
    return pointers, tuple(key)


class _PreparedLaunch(NamedTuple):
    """A launch by Triton's launcher; a call adds the grid, the stream and pointers."""

    launch: Callable[..., None]  # Triton's launcher, in C
    arguments_before: tuple  # the launcher's arguments before the pointers
    arguments_after: tuple  # the launcher's arguments after the pointers
    compiled: object  # a reference that keeps the GPU function loaded


class Launch:
    """A kernel with its grid, numbers and constants; a call passes only the tensors.

    Raises a ValueError if the grid is larger than CUDA's largest.

        launch = Launch(kernel, (tiles, B), S, stride, H=32, BLOCK_H=32, num_warps=4)
        launch(x, out)          # as kernel[(tiles, B)](x, out, S, stride, H=32, ...)

    In the interpreter, and while Triton's launch hooks are set, every call runs
    `kernel[grid]`. Triton's other settings (``TRITON_DEBUG`` and the like) are read at
    the first call only.
    """

    def __init__(
        self,
        kernel: Any,
        grid: tuple[int, ...],
        *numbers: object,
        num_warps: int,
        **constants: object,
    ) -> None:
        """Keep the arguments; nothing is compiled before the first call.

        Args:
            kernel: a function with ``@triton.jit``.
            grid: the number of programs on one to three axes.
            numbers: the kernel's arguments after the tensors, in order.
            num_warps: the warps of a program. They decide the order of a sum, so no
                launch takes Triton's default.
            constants: its constexpr arguments and compile options, by name.
        """
        self._kernel = kernel
        self._grid = grid
        self._grid_axes = (grid + (1, 1))[:3]
        if any(
            size > most
            for size, most in zip(self._grid_axes, _LARGEST_GRID, strict=True)
        ):
            raise ValueError(
                f"{kernel.__name__} needs a grid of {grid} programs, and CUDA takes at "
                f"most {_LARGEST_GRID}. Use a smaller batch or fewer documents, or "
                "kernels='torch'."
            )
        self._numbers = numbers
        self._constants = {"num_warps": num_warps} | constants
        # by device and key of `pointers_and_key`
        self._prepared_launches: dict[tuple, _PreparedLaunch] = {}
        # whether every call runs `kernel[grid]`, as in Triton's interpreter
        self._never_prepared = not isinstance(kernel, JITFunction)
        if not self._never_prepared:
            compile_in_one_process(kernel)

    def __call__(self, *tensors: Tensor | None) -> None:
        """Run the kernel on the current stream; ``tensors`` are the kernel's first
        arguments.

        If the device, the dtypes, the absent tensors or the alignments are new, the
        call runs `kernel[grid]`, which may compile.
        """
        if self._never_prepared or _has_launch_hooks(self._kernel):
            found = None
        else:
            found = pointers_and_key(tensors)
        if found is None:
            self._kernel[self._grid](*tensors, *self._numbers, **self._constants)
            return
        pointers, key = found
        # Private functions of torch, since the public ones take the host longer.
        device = torch._C._cuda_getDevice()
        prepared = self._prepared_launches.get((device, key))
        if prepared is None:
            compiled = self._kernel[self._grid](
                *tensors, *self._numbers, **self._constants
            )
            prepared = self._prepare(compiled, len(tensors))
            if prepared is None:
                self._never_prepared = True
            else:
                self._prepared_launches[device, key] = prepared
            return
        stream = torch._C._cuda_getCurrentRawStream(device)
        launch, before, after, _ = prepared
        launch(*self._grid_axes, stream, *before, *pointers, *after)

    def _prepare(self, compiled: Any, tensors: int) -> _PreparedLaunch | None:
        """Prepare later launches of ``compiled``, which ``kernel[grid](...)`` returned.

        ``tensors``: the number of the kernel's pointers. Returns None if Triton's
        launcher needs scratch memory or lacks an attribute that this method reads.
        """
        try:
            launcher = compiled.run
            if launcher.global_scratch_size or launcher.profile_scratch_size:
                return None
            # function, two flags, two None for scratch memory, metadata, no hooks
            before = (
                compiled.function,
                launcher.launch_cooperative_grid,
                launcher.launch_pdl,
                None,
                None,
                compiled.packed_metadata,
                None,
                None,
                None,
            )
            after = list(self._numbers)
            for parameter in self._kernel.params[tensors + len(after) :]:
                after.append(self._constants[parameter.name])
            return _PreparedLaunch(launcher.launch, before, tuple(after), compiled)
        except (AttributeError, KeyError):
            return None


def _has_launch_hooks(kernel: JITFunction) -> bool:
    """Whether Triton's launch hooks are set; only Triton's own ``kernel[grid](...)``
    runs hooks."""
    enter = knobs.runtime.launch_enter_hook
    leave = knobs.runtime.launch_exit_hook
    return bool(
        kernel.pre_run_hooks
        or getattr(enter, "calls", enter)
        or getattr(leave, "calls", leave)
    )
