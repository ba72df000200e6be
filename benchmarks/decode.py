"""Time of a layer's decode step against the floor of reading and writing its states.

Milliseconds per eager step of the layer in Megatron's StaticInferenceContext. The floor
is the bytes of histories and states, read and written, at the bandwidth of a copy
measured here. A step costs the same after any number of tokens.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from lib.layers import DEVICE, build, start_megatron
from lib.session import Session

ON_GPU = DEVICE == "cuda"
DTYPE = torch.bfloat16 if ON_GPU else torch.float32
_WARM_UP = 3  # calls that are not counted
_PROMPT = 8


def milliseconds(run: Callable[[], object], repeats: int, on_gpu: bool) -> float:
    """The median of single calls, each begun when the one before has ended."""
    times = []
    for _ in range(repeats + _WARM_UP):
        if on_gpu:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            run()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end))
        else:
            began = time.perf_counter()
            run()
            times.append(1e3 * (time.perf_counter() - began))
    return statistics.median(times[_WARM_UP:])


def copy_rate(on_gpu: bool, repeats: int) -> float:
    """Bytes read and written per millisecond by a copy of 1 GiB (1 MiB without a
    GPU)."""
    size = 1 << (30 if on_gpu else 20)
    source = torch.empty(size, dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    return 2 * size / milliseconds(lambda: target.copy_(source), repeats, on_gpu)


@torch.inference_mode()
def measure(layer: Any, batch: int, repeats: int, rate: float) -> dict[str, Any]:
    from megatron.core.inference.contexts import StaticInferenceContext

    weight = layer.conv_parameters[0]
    hidden = layer.config.hidden_size
    context = StaticInferenceContext(batch, _PROMPT + repeats + _WARM_UP)
    x = torch.randn(_PROMPT, batch, hidden, dtype=weight.dtype, device=weight.device)

    def step(x: torch.Tensor) -> None:
        layer(x, inference_context=context)
        context.increment_sequence_len_offset(len(x))

    step(x)
    memory = context.key_value_memory_dict[layer.layer_number]
    floor = 2 * sum(t.numel() * t.element_size() for t in memory) / rate
    took = milliseconds(lambda: step(x[:1]), repeats, weight.is_cuda)
    return {
        "batch": batch,
        "dtype": str(weight.dtype),
        "floor_ms": floor,
        "layer_ms": took,
        "layer_over_floor": took / floor,
    }


def steps(session: Session) -> None:
    start_megatron()
    rate = copy_rate(ON_GPU, session.repeats)
    for layer in session.layers():
        module = build(layer, session.sizes(), "reference", dtype=DTYPE).eval()
        for batch in session.row["batches"]:
            names = {"case": f"{batch} rows", "layer": layer.name}
            if not session.late(f"{batch} rows {layer.name}"):
                found = measure(module, batch, session.repeats, rate)
                session.emit({**names, **found, "copy_gb_per_s": rate / 1e6})
