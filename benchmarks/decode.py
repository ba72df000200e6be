"""Time of a layer's decode step against the floor of reading and writing its states.

``layer_ms`` is an eager step of the layer in Megatron's StaticInferenceContext,
``step_ms`` its step without projections on a dynamic context's buffers, half of whose
slots are taken in another order, as a CUDA graph. The floors are the bytes of histories
and states (``states_floor_ms``: of states), read and written, at the bandwidth of a
copy. A step costs the same after any number of tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from lib.layers import build, start_megatron
from lib.measure import captured, latency_ms
from lib.model import DEVICE
from lib.session import Session

DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32
_WARM_UP = 3  # calls that are not counted
_PROMPT = 8


@torch.inference_mode()
def measure(layer: Any, batch: int, repeats: int, rate: float) -> dict[str, Any]:
    """``rate``: bytes per millisecond of a copy, read and written."""
    from megatron.core.inference.contexts import StaticInferenceContext

    weight = layer.conv_parameters[0]
    context = StaticInferenceContext(batch, _PROMPT + repeats + _WARM_UP)
    x = torch.randn(_PROMPT, batch, layer.config.hidden_size).to(weight)

    def step(x: torch.Tensor) -> None:
        layer(x, inference_context=context)
        context.increment_sequence_len_offset(len(x))

    step(x)
    memory = context.key_value_memory_dict[layer.layer_number]
    floor = 2 * sum(t.numel() * t.element_size() for t in memory) / rate
    took = latency_ms(lambda: step(x[:1]), repeats, _WARM_UP)
    return {
        "batch": batch,
        "dtype": str(weight.dtype),
        "floor_ms": floor,
        "layer_ms": took,
        "layer_over_floor": took / floor,
    }


@torch.inference_mode()
def in_buffers(layer: Any, batch: int, repeats: int, rate: float) -> dict[str, Any]:
    conv_shape, state_shape = layer.mamba_state_shapes_per_request()
    conv = torch.zeros(2 * batch, *conv_shape, dtype=DTYPE, device=DEVICE)
    states = torch.zeros(2 * batch, *state_shape, device=DEVICE)
    slots = torch.randperm(2 * batch)[:batch].to(DEVICE, torch.int32)
    hidden = layer.config.hidden_size
    rows, _ = layer.in_proj(torch.randn(batch, 1, hidden, dtype=DTYPE, device=DEVICE))

    def step() -> torch.Tensor:
        return layer.ssm_decode(rows, conv, states, slots)

    run = captured(step)[0].replay if DEVICE == "cuda" else step
    took = latency_ms(run, repeats, _WARM_UP)
    # half of the slots, read and written
    floor = states.numel() * states.element_size() / rate
    return {"step_ms": took, "states_floor_ms": floor, "step_over_floor": took / floor}


def steps(session: Session) -> None:
    start_megatron()
    rate = session.bandwidth / 1e3
    for layer in session.layers():
        module: Any = build(layer, session.sizes(), "reference", dtype=DTYPE).eval()
        for batch in session.row["batches"]:
            names = {"case": f"{batch} rows", "layer": layer.name}
            if session.late(f"{batch} rows {layer.name}"):
                continue
            found = measure(module, batch, session.repeats, rate)
            if not module.config.batch_invariant_mode:
                found |= in_buffers(module, batch, session.repeats, rate)
            session.emit({**names, **found, "copy_gb_per_s": rate / 1e6})
