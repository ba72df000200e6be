"""FlashQLA's kernels for some heads as tasks, and what stands in for a Hopper GPU meanwhile.

The rule is called as a layer calls it, but FlashQLA's kernels only record their arguments. So
FlashQLA itself decides which kernels a call takes.

    cut      a sequence cut into parts that run side by side; all sequences in deterministic mode
    rows     a batch of whole rows
    uncut    sequences too short to be cut, one and several
    states   states in and out, as in context parallelism
    aligned  whole sequences from state to state, as in ``config.batch_invariant_mode``
    again    a second run of the forward in the backward, of all of these (``recompute="full"``)

tilelang and Triton key what they keep on disk by the kernel, the target and the versions, so a
cache that was filled without a GPU serves a machine with one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

from ..gdn.flash_qla.builds import PARTS, CacheEntry, Heads
from ..gdn.flash_qla.plan import stages
from ..gdn.flash_qla.rule import FlashQlaRule
from ..ops.delta_rule.base import HeadSizes, RuleInputs
from ..ops.documents import Documents
from .tasks import Task

_HEAD_DIM = 128
_SHORT, _LONG = 200, 9000  # tokens; the second is cut
# The forward has three kernels, chosen by sequences * heads: at least this share of the GPU's
# multiprocessors, at least half of that, and fewer.
_FULL = 0.7
# The slowest kernels to compile, slowest first; they begin in this order.
_SLOW = ("fused_chunk_gdr_bwd", "fused_chunk_gdr_fwd", "prepare_dh", "prepare_h", "kkt_solve")


def flash_qla_tasks(heads: Heads, parts: tuple[str, ...], multiprocessors: int) -> list[Task]:
    """Every kernel that these parts of FlashQLA take for these heads, once; the first part first.

    This process compiles for Hopper from here on and cannot use a GPU.
    """
    missing = [name for name in ("flash_qla", "tilelang") if find_spec(name) is None]
    if missing:
        raise ImportError(
            f"FlashQLA's kernels cannot be compiled without {' and '.join(missing)}; install "
            f"flash-qla 0.1.3, or give --kernels triton."
        )
    stand_in_for_hopper(multiprocessors)
    stages()  # puts the fences in, before the kernels are noted
    noted: dict[CacheEntry, Task] = {}

    def note(kernel: Any, args: tuple, kwargs: dict[str, Any]) -> None:
        entry = CacheEntry.of(kernel, args, kwargs, ARCH)
        if entry not in noted:
            compile, soon = partial(_compile, entry, kernel, args, kwargs), part == parts[0]
            noted[entry] = Task(f"{entry.name}, {heads}", compile, entry.is_there, soon)

    with record_flash_qla(note):
        for part in parts:
            for count in _counts(heads.value, multiprocessors):
                if part == "again":
                    for first in PARTS[:-1]:
                        _call(first, heads, count, again=True)
                else:
                    _call(part, heads, count)

    def order(task: Task) -> tuple[bool, int]:
        found = (at for at, name in enumerate(_SLOW) if task.name.startswith(name))
        return not task.soon, next(found, len(_SLOW))

    return sorted(noted.values(), key=order)


def require_heads(sizes: HeadSizes) -> None:
    """Refuse heads that FlashQLA does not take with a ValueError, and say what to give instead."""
    why = FlashQlaRule().why_not_heads(sizes.value_heads)
    if (sizes.key_dim, sizes.value_dim) != (_HEAD_DIM, _HEAD_DIM):
        why = f"flash_qla takes head dims of {_HEAD_DIM}, not {sizes.key_dim} and {sizes.value_dim}"
    if why is not None:
        raise ValueError(f"{why}; this layer runs on fla. Give --kernels triton fla.")


def _compile(entry: CacheEntry, kernel: Any, args: tuple, kwargs: dict[str, Any]) -> bool:
    entry.remember(kernel.compile.__wrapped__(*args, **kwargs))
    return True


def _counts(value_heads: int, multiprocessors: int) -> list[int]:
    """Numbers of sequences that together take every kernel of the forward."""
    full = math.ceil(_FULL * multiprocessors)
    return sorted({1, math.ceil(full / 2 / value_heads), math.ceil(full / value_heads)})


def _call(part: str, heads: Heads, count: int, again: bool = False) -> None:
    """Forward and backward of the rule, on zeros, for so many sequences."""
    rows = max(2, count) if part == "rows" else 1  # a single row counts as a sequence
    tokens, documents = _LONG if part in ("cut", "aligned") else _SHORT, None
    if part in ("uncut", "states", "aligned"):
        offsets = [n * tokens // count for n in range(count + 1)]
        documents = Documents.from_cu_seqlens(offsets, tokens, device="cpu")

    def zeros(*shape: int, dtype: torch.dtype = heads.dtype) -> torch.Tensor:
        return torch.zeros(rows, tokens, *shape, dtype=dtype)

    k, v = zeros(heads.key, _HEAD_DIM), zeros(heads.value, _HEAD_DIM)
    g, beta = (zeros(heads.value, dtype=torch.float32) for _ in range(2))
    rule, inputs = FlashQlaRule(aligned=part == "aligned"), RuleInputs(k, k, v, g, beta)
    begun, initial = rule.begin(inputs, documents), None
    if part == "states":
        initial = torch.zeros_like(begun.state_map().local)
    saved = begun.run(initial).saved
    if again:
        kept = rule.kept_to_run_again(saved)
        saved = rule.run_again(inputs, kept, documents, initial).saved
    backward = rule.begin_backward(v, inputs, saved, documents)
    if part == "states":
        backward.d_initial()
        backward.run(initial, initial)
    else:
        backward.run()
        rule.begin(inputs, documents).run(keep=False)
    if part == "cut":  # other documents may continue this one, see ops.trees
        continued = rule.begin(inputs, documents).run(final=True)
        backward = rule.begin_backward(v, inputs, continued.saved, documents)
        backward.run(None, continued.final)


ARCH = "9.0"
TARGET = {"kind": "cuda", "arch": "sm_90a"}


def stand_in_for_hopper(multiprocessors: int = 132) -> None:
    """From here on torch has a Hopper GPU that cannot be used, and tilelang compiles for it."""
    properties = SimpleNamespace(
        major=9, minor=0, multi_processor_count=multiprocessors, name="Hopper", gcnArchName=""
    )
    torch.cuda.is_available = lambda: True
    torch.cuda.current_device = lambda: 0
    torch.cuda.is_current_stream_capturing = lambda: False
    torch.cuda.get_device_capability = lambda device=None: (9, 0)
    torch.cuda.get_device_properties = lambda device=None: properties
    torch.cuda.synchronize = lambda device=None: None

    from tilelang.contrib import nvcc  # pyright: ignore[reportMissingImports]

    nvcc.get_target_compute_version = lambda target=None: "9.0"


@contextmanager
def record_flash_qla(called: Callable[[Any, tuple, dict[str, Any]], None]) -> Iterator[None]:
    """Inside, FlashQLA's kernels are not run: ``called`` gets each one and its arguments."""
    from tilelang.jit import JITImpl  # pyright: ignore[reportMissingImports]

    def call(kernel: Any, *args: Any, **kwargs: Any) -> Callable:
        kernel.target = TARGET
        called(kernel, args, kwargs)
        return lambda *tensors, **named: None

    with patch.object(JITImpl, "__call__", call):
        yield


class HopperDriver:
    """The methods of a Triton driver that are needed to compile."""

    def get_current_device(self) -> HopperDriver:
        return self  # a device that no launch uses: what is compiled here is never launched

    def get_current_stream(self, device: HopperDriver) -> int:
        return 0

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)


@contextmanager
def compile_triton_only() -> Iterator[list[bool]]:
    """Inside, a launch of a Triton kernel compiles it for Hopper and does not run it; the list says
    of each compilation whether Triton's cache on disk had the result."""
    import triton
    from triton.runtime.jit import JITFunction

    launch, found = JITFunction.run, []

    def run(self: Any, *args: Any, grid: Any, warmup: bool = False, **kwargs: Any) -> Any:
        return launch(self, *args, grid=grid, warmup=True, **kwargs)

    with (
        patch.object(triton.runtime.driver, "_active", HopperDriver()),
        patch.object(
            triton.knobs.compilation, "listener", lambda **event: found.append(event["cache_hit"])
        ),
        patch.object(JITFunction, "run", run),
    ):
        yield found
