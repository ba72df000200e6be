"""Any number of tokens through linears that compute in FP8."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from megatron.core import fp8_utils

from ..mixers.fp8 import quantises


@contextmanager
def padded_for_fp8(model: Any) -> Iterator[None]:
    """Inside, FP8 linears pad their tokens to what FP8 takes, as in Megatron's own engines.

    The first forward quantises the weights again: Transformer Engine keeps those of the last
    micro-batch, which came before the optimizer's step.

    Args:
        model: a HybridModel or GPTModel, not wrapped.
    """
    utils: Any = fp8_utils
    linears = [m for m in model.modules() if isinstance(m, utils.TE_LINEAR_TYPES)]
    if not linears or not quantises(model.config):
        yield
        return
    model.set_is_first_microbatch()
    padded = utils._fp8_inference_wrapped_modules
    forwards = {linear: vars(linear).get("forward") for linear in linears if linear not in padded}
    utils.prepare_model_for_fp8_inference(model)
    try:
        yield
    finally:  # with it, training would gather a sequence-parallel input twice
        for linear, forward in forwards.items():
            padded.discard(linear)
            del linear.forward
            if forward is not None:
                linear.forward = forward
