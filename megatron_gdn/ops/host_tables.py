"""Copies of tables from the host to the device, and caches of tables per CUDA stream.

Two CUDA streams run in no fixed order, so every stream has its own copies of the
tables. A CUDA graph reads the tables of the stream on which the last call before the
capture ran. Tables that a graph reads are never freed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, wraps
from typing import Any

import torch
from torch import Tensor

_latest_stream = 0  # the handle of the stream of the latest call outside a capture
# the tables that CUDA graphs read, by their ids; so Python never frees them
_tables_of_graphs: dict[int, object] = {}


def to_device(table: Tensor, device: torch.device | str) -> Tensor:
    """Copy ``table`` to ``device``; a table that is on a GPU already is returned as it
    is.

    The copy to a GPU is from pinned memory, and the host does not wait for it. The copy
    is made outside of ``torch.inference_mode``, since autograd refuses tensors that are
    made in that mode.
    """
    if table.is_cuda:
        return table
    with torch.inference_mode(False):
        if table.is_inference():
            table = table.clone()
        if torch.device(device).type != "cuda":
            return table.to(device)
        require_no_capture("a table made on the host")
        return table.pin_memory().to(device, non_blocking=True)


def require_no_capture(table_name: str) -> None:
    """Raise an error if a CUDA graph is being captured.

    A captured copy would run in replays only, and would then read freed host memory.
    ``table_name`` stands in the error's text.
    """
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"{table_name} is needed for the first time while a CUDA graph is being "
            "captured. Run the forward and the backward once before, eagerly, with the "
            "same shapes, dtypes and packed_seq_params (num_warmup_iters and "
            "cuda_graph_warmup_steps at least 1; docs/cuda_graphs.md)."
        )


def stream_of_tables() -> int:
    """The handle of the CUDA stream whose tables the current call uses; 0 without CUDA.

    The stream is the current one. During a capture no table can be made. So the stream
    is then the stream of the last call before the capture, which has made the tables.
    """
    global _latest_stream
    if not torch.cuda.is_initialized():
        return 0
    if not torch.cuda.is_current_stream_capturing():
        _latest_stream = torch._C._cuda_getCurrentRawStream(torch.cuda.current_device())
    return _latest_stream


def keep_if_captured[Made](tables: Made) -> Made:
    """Return ``tables``; if a CUDA graph is being captured, the tables are never freed,
    since each replay reads the same addresses."""
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        _tables_of_graphs[id(tables)] = tables
    return tables


def cached_by_stream[**Arguments, Made](
    maxsize: int,
) -> Callable[[Callable[Arguments, Made]], Callable[Arguments, Made]]:
    """A decorator like ``lru_cache``, with separate results for each CUDA stream.

    The results have tensors. Another stream could read a tensor before its copy to the
    device is done. The cache keeps ``maxsize`` results, over all streams together.
    """

    def decorate(make: Callable[Arguments, Made]) -> Callable[Arguments, Made]:
        """Return ``make`` with a cache of its results per CUDA stream and arguments."""

        @lru_cache(maxsize=maxsize)
        def cached_make(stream: int, *args: Any, **kwargs: Any) -> Made:
            return make(*args, **kwargs)

        @wraps(make)
        def look_up(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Made:
            """The result of ``make`` for the current stream, from the cache if it is
            there."""
            if not torch.cuda.is_initialized():
                return cached_make(0, *args, **kwargs)
            return keep_if_captured(cached_make(stream_of_tables(), *args, **kwargs))

        vars(look_up).update(
            cache_clear=cached_make.cache_clear,
            cache_parameters=cached_make.cache_parameters,
        )
        return look_up

    return decorate
