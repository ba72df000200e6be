"""Tables that the host makes from lengths: copied to the device, and cached for each stream.

A table is copied, read and freed in the order of one CUDA stream, and nothing orders two streams.
So every stream has tables of its own. The exception is a CUDA graph: it reads the tables of the
stream that ran before the capture. These are never freed, as no replay is known to be the last.

Switches off, for the mixer's buffers, the fill of uninitialised memory in deterministic mode.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache, wraps
from threading import Lock
from typing import Any, Protocol, cast

import torch
import torch.utils.deterministic
from torch import Tensor

_latest_stream = 0
_read_by_graphs: dict[int, Any] = {}


def to_device(table: Tensor, device: torch.device | str) -> Tensor:
    """``table`` on ``device``. The host does not wait for work queued there.

    A copy from ordinary memory waits; a copy from pinned memory is queued in the stream. Tables
    outlive the call that made them. So they are ordinary tensors even if that call was under
    ``torch.inference_mode``, whose tensors autograd refuses.

    Raises:
        RuntimeError: a CUDA graph is being captured, see :func:`require_no_capture`.
    """
    with torch.inference_mode(False):
        table = table.clone() if table.is_inference() else table
        if torch.device(device).type != "cuda":
            return table.to(device)
        require_no_capture("a table made on the host")
        return table.pin_memory().to(device, non_blocking=True)


def require_no_capture(made: str) -> None:
    """Refuse to make a table while a CUDA graph is captured.

    Each replay would copy the table from host memory that is free by then. Or the table would lie
    in memory of the graph, which only its replays write.

    Raises:
        RuntimeError: says what would have been made, and what to run before.
    """
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"{made} is needed for the first time while a CUDA graph is being captured. Run the "
            f"forward and the backward once before, eagerly, with the same shapes, dtypes and "
            f"packed_seq_params (torch.cuda.make_graphed_callables and Megatron do: "
            f"num_warmup_iters and cuda_graph_warmup_steps must be at least 1)."
        )


def stream_of_tables() -> int:
    """The number of the stream whose tables are read: the current stream; 0 on the CPU.

    While a graph is captured: the stream of the last call before the capture.
    """
    global _latest_stream
    if not torch.cuda.is_initialized():
        return 0
    if not torch.cuda.is_current_stream_capturing():
        _latest_stream = torch._C._cuda_getCurrentRawStream(torch.cuda.current_device())
    return _latest_stream


def keep_if_captured[Made](tables: Made) -> Made:
    """Return ``tables``. While a CUDA graph is captured, also keep them for good."""
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        _read_by_graphs[id(tables)] = tables
    return tables


class _Cached(Protocol):
    def __call__[**Arguments, Made](
        self, make: Callable[Arguments, Made]
    ) -> Callable[Arguments, Made]: ...


def cached_by_stream(most: int) -> _Cached:
    """``lru_cache(most)`` for a function whose results hold tables on a device."""

    def decorate[**Arguments, Made](make: Callable[Arguments, Made]) -> Callable[Arguments, Made]:
        @lru_cache(maxsize=most)
        def made(stream: int, *args: Any, **kwargs: Any) -> Made:
            return make(*args, **kwargs)

        @wraps(make)
        def look_up(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Made:
            return keep_if_captured(made(stream_of_tables(), *args, **kwargs))

        vars(look_up).update(cache_clear=made.cache_clear)
        return look_up

    return decorate


_lock = Lock()
_inside, _kept = 0, True


@contextmanager
def unfilled_memory() -> Iterator[None]:
    """Inside, ``torch.empty`` fills nothing: for code that writes every element before reading it.

    Under ``torch.use_deterministic_algorithms(True)`` torch fills what ``torch.empty`` returns with
    NaN, so that a program that reads it gives the same result in every run. The kernels' buffers
    are about twice the layer's activations. To fill them takes one launch each and writes as many
    bytes as the kernels do.
    Tests over memory poisoned with NaN show that no unwritten element is read.
    """
    if not torch.are_deterministic_algorithms_enabled():
        yield
        return
    global _inside, _kept
    settings = cast(Any, torch.utils.deterministic)  # torch declares no types for it
    with _lock:  # one setting per process, and backward passes run in other threads
        if _inside == 0:
            _kept = settings.fill_uninitialized_memory
            settings.fill_uninitialized_memory = False
        _inside += 1
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            if _inside == 0:
                settings.fill_uninitialized_memory = _kept


def leaves_memory_unfilled[**Arguments, Made](
    function: Callable[Arguments, Made],
) -> Callable[Arguments, Made]:
    """``function`` inside :func:`unfilled_memory`, entered only if torch would fill memory."""

    @wraps(function)
    def call(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Made:
        if not torch.are_deterministic_algorithms_enabled():
            return function(*args, **kwargs)
        with unfilled_memory():
            return function(*args, **kwargs)

    return call
